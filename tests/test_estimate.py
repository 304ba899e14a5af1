"""Estimates: counts equal those of a real run, times follow the roofline, and the command line says what it did."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner, Result
from torch import Tensor, nn

from dpart.cli import main
from dpart.compiler.capture import capture
from dpart.compiler.extract import extract
from dpart.compiler.workload import Workload
from dpart.profiler.counting import KernelCounter, count
from dpart.profiler.devices import device_kind
from dpart.profiler.estimate import Efficiencies, estimate
from dpart.profiler.frames import frames
from dpart.profiler.measure import profile
from dpart.profiler.profile import Profile
from dpart.profiler.splits import SplitFinder
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, write_file
from tests.shapes import HIDDEN, LAYERS, SEQUENCE, chain, llama, record
from tests.workloads import gpt2, resnet, unet


@pytest.mark.parametrize("workload", [gpt2, resnet, unet])
def test_counts_and_stash_equal_those_of_a_real_run(workload) -> None:
    captured = capture(workload(), microbatch_size=2)
    real = {c.layer: c for c in profile(captured, repeats=1).costs}
    recorded = record(captured)
    found = SplitFinder(captured, frames(captured), gpu=False).splits(1)
    for layer, split in zip(captured.graph.layers, found, strict=True):
        module, sources, _ = extract(captured, layer.name)
        arguments, leaves = [], []
        for name in sources:
            value = recorded[name]
            if isinstance(value, Tensor):
                value = value.detach().clone()
                if name in captured.graph.value and captured.graph.value[name].differentiable:
                    leaves.append(value.requires_grad_())
                    value = value.clone()
            arguments.append(value)
        counted = count(
            lambda m=module, a=arguments: m(*a),
            leaves,
            {**dict(module.named_parameters()), **dict(module.named_buffers())},
        )
        assert names(counted.forward) == names(split.counts.forward), layer.name
        assert counted == split.counts, layer.name
        assert split.counts.stash_bytes == real[layer.name].stash_bytes
        assert split.workspace_bytes == real[layer.name].workspace_bytes
    estimated = {c.layer: c for c in estimate(captured, "cpu").costs}
    for field in ("parameter_bytes", "trainable_bytes", "output_bytes", "stash_bytes", "workspace_bytes"):
        assert [getattr(c, field) for c in estimated.values()] == [getattr(c, field) for c in real.values()]
    assert all(c.repeats == 0 and c.forward_seconds >= 0 for c in estimated.values())


def names(kernels) -> list[str]:
    return [kernel.name for kernel in kernels]


def test_operations_are_two_for_each_weight_and_row_and_bytes_those_of_the_tensors() -> None:
    captured = capture(chain(nn.Linear(8, 16), nn.ReLU(inplace=True)), microbatch_size=4)
    linear, relu, _ = (split.counts for split in SplitFinder(captured, frames(captured), gpu=True).splits(1))
    (product,) = linear.forward
    assert product.flops == 2 * 4 * 8 * 16
    assert product.moved_bytes == 4 * (4 * 8 + 8 * 16 + 16 + 4 * 16)
    assert sum(k.flops for k in linear.backward) == product.flops  # Inputs of the model need no gradient.
    assert linear.input_backward == ()
    assert [k.name for k in relu.backward] == ["threshold_backward"]
    assert [k.moved_bytes for k in relu.forward] == [4 * 2 * 4 * 16]


def test_a_look_up_reads_its_rows_and_a_causal_attention_has_half() -> None:
    table, rows = torch.zeros(1000, 4), torch.zeros(3, dtype=torch.long)
    with KernelCounter() as counter:
        F.embedding(rows, table)
    assert [k.moved_bytes for k in counter.kernels] == [3 * 8 + 2 * 3 * 16]
    q = torch.zeros(2, 3, 8, 4)
    flops = []
    for causal in (False, True):
        with KernelCounter() as counter:
            F.scaled_dot_product_attention(q, q, q, is_causal=causal)
        flops.append(sum(k.flops for k in counter.kernels))
    assert flops == [4 * 2 * 3 * 8 * 8 * 4, 2 * 2 * 3 * 8 * 8 * 4]


def test_a_model_takes_six_operations_a_token_and_weight_and_attention_besides() -> None:
    captured = capture(llama(), microbatch_size=1)
    kernels = [
        k
        for s in SplitFinder(captured, frames(captured), gpu=True).splits(1)
        for k in (*s.counts.forward, *s.counts.backward)
    ]
    weights = sum(p.numel() for n, p in captured.model.named_parameters() if p.dim() == 2 and "embed" not in n)
    assert sum(k.flops for k in kernels if k.kind == "product") == 6 * weights * SEQUENCE
    # Scores and values, two products forward and five backward, half of them behind the causal flag.
    assert sum(k.flops for k in kernels if k.kind == "attention") == 7 * SEQUENCE * SEQUENCE * HIDDEN * LAYERS


def test_blocks_that_repeat_are_walked_once() -> None:
    walked = []
    for depth in (2, 6):
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(depth)]
        captured = capture(chain(nn.LayerNorm(8), *blocks), microbatch_size=2)
        finder = SplitFinder(captured, frames(captured), gpu=True)
        for degree in (1, 2):
            assert len(finder.splits(degree)) == 3 * depth + 2
        walked.append(finder.num_walked)
    assert walked[0] == walked[1]


def test_times_follow_the_device() -> None:
    captured = capture(llama(), microbatch_size=1)
    free = Efficiencies(launch_seconds=0.0)
    kind = device_kind("h100")
    flops = dataclasses.replace(
        kind.flops, **{f.name: 2 * getattr(kind.flops, f.name) for f in dataclasses.fields(kind.flops)}
    )
    twice = dataclasses.replace(
        kind, flops=flops, memory_bandwidth_bytes_per_second=2 * kind.memory_bandwidth_bytes_per_second
    )
    slow, fast = (estimate(captured, k, efficiencies=free) for k in (kind, twice))
    assert slow.step_seconds == pytest.approx(2 * fast.step_seconds, rel=1e-12)
    late = estimate(captured, kind, efficiencies=Efficiencies(launch_seconds=1.0))
    kernels = SplitFinder(captured, frames(captured), gpu=True).splits(1)
    launched = sum(len(s.counts.forward) + len(s.counts.backward) for s in kernels)
    assert late.step_seconds - slow.step_seconds == pytest.approx(launched, rel=1e-9)
    for cost in slow.costs:
        assert 0 <= cost.weight_backward_seconds <= cost.backward_seconds


def test_the_estimate_says_so_and_survives_its_file(tmp_path) -> None:
    found = estimate(capture(llama(), microbatch_size=1), "h100", degrees=(4, 2))
    assert found.machine.estimated
    assert found.machine.device == "h100"
    assert found.step_seconds == sum(c.forward_seconds + c.backward_seconds for c in found.costs)
    assert all([s.degree for s in c.splits] == [2, 4] for c in found.costs)
    write_file(found, tmp_path / "profile.json")
    assert read_file(Profile, tmp_path / "profile.json") == found


def test_a_model_too_large_for_any_machine_is_built_without_memory() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2**20, 2**20, bias=False), nn.ReLU())

    x = torch.zeros(4, 1).expand(4, 2**20)
    captured = capture(Workload(build, args=(x,), loss=lambda y: y.mean()), meta=True)
    assert captured.graph.microbatch_size == 1
    assert estimate(captured, "h100").costs[0].parameter_bytes == 4 * 2**40


def test_a_model_that_cannot_be_built_without_numbers_is_built_with_them() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(torch.linspace(0, 0.5, 3)[1].item()))

    captured = capture(Workload(build, args=(torch.randn(4, 4),), loss=lambda y: y.mean()), meta=True)
    assert not captured.model.is_meta


def test_faults() -> None:
    captured = capture(llama(), microbatch_size=1)
    with pytest.raises(UserError, match="at least 1, got 0"):
        estimate(captured, "h100", degrees=(0, 2))
    with pytest.raises(UserError, match="no device 'h1000'"):
        estimate(captured, "h1000")
    with pytest.raises(UserError, match="on the meta device"):
        profile(captured)


MODEL = """
import torch
from torch import nn
import dpart


def workload():
    with torch.device("meta"):
        x = torch.empty(8, 16)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return dpart.Workload(model, args=(x,), targets=(x,), loss=nn.functional.mse_loss, name="shapes")
"""


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path}/model.py:workload"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_the_command_estimates_a_model_that_has_no_numbers(model: str, tmp_path: Path) -> None:
    done = run("profile", "--estimate", "h100", model, "-o", tmp_path / "p.json", "--degrees", "1,2")
    assert done.exit_code == 0, done.output
    for part in ("shapes", "microbatch of 1", "By tensor-parallel degree", "column", "estimated", "on h100"):
        assert part in done.output
    found = read_file(Profile, tmp_path / "p.json")
    assert found.batch_size == 8
    assert [split.degree for split in found.costs[0].splits] == [2]


def test_the_command_refuses(model: str, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    for words, part in (
        (("--estimate", "h1000"), "the closest is h100"),
        ((), "--estimate h100"),
        (("--estimate", "h100", "--microbatch-size", "9"), "between 1 and the example batch's 8 rows"),
    ):
        done = run("profile", *words, model, "-o", output)
        assert done.exit_code == 1
        assert part in done.output.replace("\n", " ")
    assert run("profile", model, "--degrees", "2", "-o", output).exit_code == 2
    assert run("profile", "--estimate", "h100", model, "--repeats", "2", "-o", output).exit_code == 2
    assert not output.exists()
