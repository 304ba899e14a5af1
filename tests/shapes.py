"""Small models for estimates: a Llama with or without numbers, chains of modules; and what a model's nodes give."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dpart.compiler.captured import CapturedModel
from dpart.compiler.workload import Workload
from dpart.profiler.profile import Profile, SplitCost

SEQUENCE, HIDDEN, LAYERS = 16, 32, 3


def llama(*, device: str = "meta", heads: int = 4, kv_heads: int = 2, vocabulary: int = 66) -> Workload:
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("causal", sdpa_attention_forward)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=SEQUENCE, use_cache=False,
        attn_implementation="causal", initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.randint(vocabulary, (8, SEQUENCE))
    return Workload(model, args=(ids,), targets=(ids.clone(),), loss=next_token_loss)


def next_token_loss(output: object, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


def chain(*modules: nn.Module, inputs: int = 8) -> Workload:
    x = torch.randn(6, inputs)
    return Workload(
        nn.Sequential(*modules), args=(x,), targets=(torch.zeros(6),), loss=lambda y, t: (y.sum(1) - t).mean()
    )


def at(found: Profile, degree: int) -> dict[str, SplitCost]:
    return {c.layer: s for c in found.costs for s in c.splits if s.degree == degree}


def record(captured: CapturedModel) -> dict[str, object]:
    """What every node of a model with numbers gives."""
    seen: dict[str, object] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = super().run_node(n)
            seen[n.name] = result.clone() if isinstance(result, Tensor) else result
            return result

    with torch.no_grad():
        Recorder(captured.module).run(*captured.model.rows(captured.graph.microbatch_size))
    return seen
