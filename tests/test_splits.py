"""Splits over tensor-parallel ranks: found from operations, and the ranks together compute what the layer does."""

import random

import pytest
import torch
from torch import Tensor, nn

from dpart.compiler.capture import capture
from dpart.compiler.captured import CapturedModel
from dpart.compiler.workload import Workload
from dpart.profiler.estimate import estimate
from dpart.profiler.frames import LayerFrame, frames
from dpart.profiler.split_rules import RULES
from dpart.profiler.splits import SplitFinder
from dpart.profiler.views import place_in_view
from dpart.profiler.walk import Walk
from tests.shapes import HIDDEN, SEQUENCE, at, chain, llama, next_token_loss, record
from tests.workloads import resnet


def test_a_transformer_splits_as_megatron_does() -> None:
    captured = capture(llama(), microbatch_size=2)
    found = estimate(captured, "h100", degrees=(2,))
    splits = at(found, 2)
    value = 2 * SEQUENCE * HIDDEN * 4
    kinds = {name.rpartition(".")[2]: split.split for name, split in splits.items()}
    assert kinds == {
        "embed_tokens": "vocabulary", "input_layernorm": "replicated", "self_attn": "heads", "add": "replicated",
        "post_attention_layernorm": "replicated", "mlp": "column-row", "add_1": "replicated", "norm": "replicated",
        "lm_head": "vocabulary", "loss": "vocabulary",
    }  # fmt: skip
    for name in ("model.layers.0.self_attn", "model.layers.2.mlp"):
        split, whole = splits[name], found.cost[name]
        assert (split.forward_reduces, split.forward_reduce_bytes) == (1, value)
        assert (split.backward_reduces, split.backward_reduce_bytes) == (1, value)
        assert split.trainable_bytes * 2 == whole.trainable_bytes
        assert split.stash_bytes < whole.stash_bytes
        assert 0 < split.weight_backward_seconds < split.backward_seconds < whole.backward_seconds
    assert (splits["model.embed_tokens"].forward_reduces, splits["model.embed_tokens"].backward_reduces) == (1, 0)
    head, loss = splits["lm_head"], splits["loss"]
    assert (head.forward_reduces, head.backward_reduces, head.backward_reduce_bytes) == (0, 1, value)
    assert (loss.forward_reduces, loss.forward_reduce_bytes) == (3, 3 * 2 * SEQUENCE * 4)
    norm = found.cost["model.layers.0.input_layernorm"]
    assert splits[norm.layer].forward_seconds == norm.forward_seconds
    assert splits[norm.layer].parameter_bytes == norm.parameter_bytes


def test_each_rank_does_its_part_of_the_operations() -> None:
    captured = capture(llama(), microbatch_size=1)
    finder = SplitFinder(captured, frames(captured), gpu=True)
    whole, half = finder.splits(1), finder.splits(2)
    for before, after in zip(whole, half, strict=True):
        if after.split in ("heads", "column-row", "vocabulary"):
            flops = [sum(k.flops for k in (*s.counts.forward, *s.counts.backward)) for s in (before, after)]
            assert flops[0] == 2 * flops[1]


@pytest.mark.parametrize(("heads", "kv_heads", "split"), [(4, 2, "replicated"), (4, 4, "heads"), (2, 1, "replicated")])
def test_heads_that_the_degree_does_not_divide_stay_together(heads: int, kv_heads: int, split: str) -> None:
    found = estimate(capture(llama(heads=heads, kv_heads=kv_heads), microbatch_size=1), "h100", degrees=(4,))
    attention = at(found, 4)["model.layers.1.self_attn"]
    assert attention.split == split
    if split == "replicated":
        assert attention.trainable_bytes == found.cost["model.layers.1.self_attn"].trainable_bytes
        assert attention.forward_reduces == attention.backward_reduces == 0
    assert at(found, 4)["model.layers.1.mlp"].split == "column-row"


def test_a_vocabulary_that_the_degree_does_not_divide_is_split_unevenly() -> None:
    found = estimate(capture(llama(vocabulary=67), microbatch_size=1), "h100", degrees=(4,))
    assert at(found, 4)["lm_head"].parameter_bytes == 17 * HIDDEN * 4
    assert at(found, 4)["loss"].split == "vocabulary"


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ["self_attn", "mlp"])
def test_the_ranks_of_a_split_layer_add_up_to_the_whole(name: str, degree: int) -> None:
    captured = capture(llama(device="cpu", kv_heads=4), microbatch_size=2)
    (frame,) = [f for f in frames(captured) if f.layer.name == f"model.layers.1.{name}"]
    recorded = record(captured)
    whole, gradient = run_rank(captured, frame, recorded, 1, 0)
    ranks = [run_rank(captured, frame, recorded, degree, rank) for rank in range(degree)]
    for added, expected in ((sum(r for r, _ in ranks), whole), (sum(g for _, g in ranks), gradient)):
        assert (added - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (ranks[0][0] - whole).abs().max() > 0.1 * whole.abs().max()


class Rank(Walk):
    """A walk on one rank's real weights."""

    rank = 0

    def parameter(self, name: str) -> Tensor:
        if name not in self.parameters:
            tensor = self.original(name).detach()
            dim = self.shards.get(name)
            self.parameters[name] = tensor if dim is None else tensor.chunk(self.degree, dim)[self.rank]
        return self.parameters[name]


def run_rank(captured: CapturedModel, frame: LayerFrame, recorded, degree: int, rank: int) -> tuple[Tensor, Tensor]:
    sources, leaves = {}, []
    for source, needs_gradient in zip(frame.sources, frame.differentiable, strict=True):
        value = recorded[source.name]
        if needs_gradient:
            value = value.detach().clone().requires_grad_()
            leaves.append(value)
        sources[source] = (value, None)
    walk = Rank(frame.nodes, captured.module, sources, RULES, degree=degree, whole=frozenset(), gpu=False)
    walk.rank = rank
    (result,) = walk.run(frame.outputs)
    generator = torch.Generator().manual_seed(0)
    (gradient,) = torch.autograd.grad(result, leaves, torch.randn(result.shape, generator=generator))
    return result.detach(), gradient


def test_a_value_between_layers_stays_split_where_its_readers_take_it_so() -> None:
    found = estimate(
        capture(chain(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), microbatch_size=2), "h100", degrees=(2,)
    )
    first, act, second, loss = at(found, 2).values()
    assert [s.split for s in (first, act, second, loss)] == ["column", "sharded", "row", "replicated"]
    assert [s.forward_reduces for s in (first, act, second)] == [0, 0, 1]
    assert second.forward_reduce_bytes == 2 * 8 * 4
    assert act.stash_bytes * 2 == found.costs[1].stash_bytes


def test_a_lone_linear_gathers_what_it_gives_and_adds_up_its_inputs_gradient() -> None:
    given = chain(nn.LayerNorm(8), nn.Linear(8, 16), nn.LayerNorm(16))
    found = estimate(capture(given, microbatch_size=2), "h100", degrees=(2,))
    linear = at(found, 2)["1"]
    assert linear.split == "column"
    assert (linear.forward_reduces, linear.forward_reduce_bytes) == (1, 2 * 16 * 4 // 2)
    assert (linear.backward_reduces, linear.backward_reduce_bytes) == (1, 2 * 8 * 4)
    assert at(found, 2)["2"].split == "replicated"


def test_convolutions_split_by_channels() -> None:
    found = estimate(capture(resnet(), microbatch_size=2), "h100", degrees=(2,))
    splits = at(found, 2)
    first, second, norm, add = (splits[name] for name in ("0", "1.0.conv1", "1.0.bn2", "1.0.add"))
    assert (first.split, second.split, norm.split, add.split) == ("channels", "channels", "sharded", "sharded")
    assert (first.forward_reduces, second.forward_reduces, norm.forward_reduces) == (0, 1, 0)
    assert second.forward_reduce_bytes == found.graph.value["_1_0_conv1"].size_bytes
    assert first.parameter_bytes * 2 == found.cost["0"].parameter_bytes
    assert norm.trainable_bytes * 2 == found.cost["1.0.bn2"].trainable_bytes


def test_experts_share_out_their_hidden_width_and_the_router_stays_whole() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False, sliding_window=None,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(4, SEQUENCE, dtype=torch.long)
    captured = capture(Workload(model, args=(ids,), targets=(ids,), loss=next_token_loss), microbatch_size=1)
    found = estimate(captured, "h100", degrees=(2,))
    mixture = at(found, 2)["model.layers.0.mlp"]
    experts, router = 4 * 3 * 48 * 32 * 2, 4 * 32 * 2
    assert mixture.split == "experts"
    assert found.cost["model.layers.0.mlp"].trainable_bytes == experts + router
    assert mixture.trainable_bytes == experts // 2 + router
    assert (mixture.forward_reduces, mixture.forward_reduce_bytes) == (1, SEQUENCE * 32 * 2)
    # The gradient of what the experts read, and that of the two weights a token gives its experts.
    assert (mixture.backward_reduces, mixture.backward_reduce_bytes) == (2, SEQUENCE * 32 * 2 + SEQUENCE * 2 * 4)


@pytest.mark.parametrize("seed", range(40))
def test_a_view_of_a_shard_is_a_shard_of_the_view(seed: int) -> None:
    rng = random.Random(seed)
    factors = [rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(2, 4))]
    before, after = cut(rng, factors), cut(rng, factors)
    x = torch.arange(torch.tensor(factors).prod().item()).reshape(before)
    for dim in range(len(before)):
        place = place_in_view(before, after, dim, 2)
        if place is None or before[dim] % 2:
            continue
        part = x.reshape(after).narrow(place, 0, after[place] // 2)
        inner = x.stride(dim) if x.dim() else 1
        rows = (part.flatten() // inner % before[dim]).unique()
        assert len(rows) == before[dim] // 2
        assert torch.equal(x.index_select(dim, rows).reshape(part.shape), part)


def cut(rng: random.Random, factors: list[int]) -> tuple[int, ...]:
    sizes: list[int] = []
    for factor in factors:
        if sizes and rng.random() < 0.5:
            sizes[-1] *= factor
        else:
            sizes.append(factor)
    return tuple(sizes)
