"""A GPT-2 of 10.8 million parameters that reads bytes, trained on Python's own help texts.

    dpart profile   examples/gpt2.py:workload -o profile.json
    dpart partition profile.json -o plan.json
    dpart emit      examples/gpt2.py:workload plan.json -o build/gpt2
    torchrun --standalone --nproc-per-node 2 build/gpt2/train.py --steps 40 --lr 1e-3

Needs ``pip install transformers``; the text comes with Python.
"""

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import dpart

ROWS, CONTEXT, BYTES = 16, 128, 256


def workload() -> dpart.Workload:
    """The model with random weights (always the same ones), and batches of text."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=BYTES, n_positions=CONTEXT, n_embd=384, n_layer=6, n_head=6, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids, target = next(batches())
    return dpart.Workload(
        model=GPT2LMHeadModel(config), args=(ids,), targets=(target,), loss=loss, batches=batches, name="gpt2"
    )


def loss(output: object, target: Tensor) -> Tensor:
    """Cross entropy of the next byte."""
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of text at random places, without end; the target is the text one byte on."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (ROWS,), generator=generator).tolist()
        window = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
