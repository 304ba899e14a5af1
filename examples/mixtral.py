"""Mixtral 8x7B by its published shape, without weights: for profiles estimated from a catalogue of devices.

    dpart profile --estimate h100 examples/mixtral.py:mixtral_8x7b -o profile.json

The model is built on the meta device: every tensor has its shape and no memory. Each block has eight experts, of
which every token takes two: 46.7 billion parameters in all, 12.9 billion at work on a token. Needs
``pip install transformers``.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, MixtralConfig, MixtralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import dpart

SEQUENCES, CONTEXT = 1024, 4096


def mixtral_8x7b() -> dpart.Workload:
    """46.7 billion parameters in bfloat16; 4 million tokens a step."""
    config = MixtralConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, sliding_window=None, use_cache=False,
        output_router_logits=False, attn_implementation="causal", experts_implementation="grouped_mm",
    )  # fmt: skip
    AttentionInterface.register("causal", sdpa_attention_forward)  # A causal flag in place of a mask in memory.
    with torch.device("meta"):
        model = MixtralForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty(SEQUENCES, CONTEXT, dtype=torch.long)
    return dpart.Workload(model, args=(tokens,), targets=(tokens.clone(),), loss=loss, name="mixtral-8x7b")


def loss(output: object, target: Tensor) -> Tensor:
    """Cross entropy of the next token, in float32."""
    return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())
