"""GPT-3 (175 billion parameters) by its published shape, without weights: for profiles estimated from a catalogue.

    dpart profile --estimate a100-80 examples/gpt3.py:gpt3_175b -o profile.json

The model is built on the meta device: every tensor has its shape and no memory. It is GPT-2's architecture with 96
blocks of width 12288, dense attention in every block, tied embeddings, no dropout. A step has 3.2 million tokens,
as 1,536 sequences of 2,048. Needs ``pip install transformers``.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import dpart

SEQUENCES, CONTEXT = 1536, 2048


def gpt3_175b() -> dpart.Workload:
    """175 billion parameters in bfloat16."""
    config = GPT2Config(
        vocab_size=50257, n_positions=CONTEXT, n_embd=12288, n_layer=96, n_head=96, use_cache=False,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="causal",
    )  # fmt: skip
    AttentionInterface.register("causal", sdpa_attention_forward)  # A causal flag in place of a mask in memory.
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).to(torch.bfloat16)
        tokens = torch.empty(SEQUENCES, CONTEXT, dtype=torch.long)
    return dpart.Workload(model, args=(tokens,), targets=(tokens.clone(),), loss=loss, name="gpt3-175b")


def loss(output: object, target: Tensor) -> Tensor:
    """Cross entropy of the next token, in float32."""
    return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())
