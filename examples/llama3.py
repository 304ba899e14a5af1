"""Llama 3 (8B, 70B, 405B) by its published shapes, without weights: for profiles estimated from a catalogue of devices.

    dpart profile --estimate h100 examples/llama3.py:llama3_405b -o profile.json

The models are built on the meta device: every tensor has its shape and no memory. Weights and activations are
bfloat16; a batch has the sequences of the published training runs. Needs ``pip install transformers``.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import dpart

VOCABULARY = 128256


def llama3_8b() -> dpart.Workload:
    """8.03 billion parameters; 4 million tokens a step."""
    return _workload("llama3-8b", hidden=4096, inner=14336, layers=32, heads=32, sequences=512)


def llama3_70b() -> dpart.Workload:
    """70.6 billion parameters; 16 million tokens a step."""
    return _workload("llama3-70b", hidden=8192, inner=28672, layers=80, heads=64, sequences=2048)


def llama3_405b() -> dpart.Workload:
    """405.9 billion parameters; 16 million tokens a step."""
    return _workload("llama3-405b", hidden=16384, inner=53248, layers=126, heads=128, sequences=2048)


def loss(output: object, target: Tensor) -> Tensor:
    """Cross entropy of the next token, in float32."""
    return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


def _workload(name: str, *, hidden: int, inner: int, layers: int, heads: int, sequences: int) -> dpart.Workload:
    config = LlamaConfig(
        vocab_size=VOCABULARY, rms_norm_eps=1e-5, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=False,
        attn_implementation="causal",
    )  # fmt: skip
    AttentionInterface.register("causal", sdpa_attention_forward)  # A causal flag in place of a mask in memory.
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty(sequences, 8192, dtype=torch.long)
    return dpart.Workload(model, args=(tokens,), targets=(tokens.clone(),), loss=loss, name=name)
