"""GPT-2, ResNet and U-Net, split every way that is promised, against the unsplit model."""

import pytest
import torch
from click.testing import CliRunner
from split import Case, Difference, compare
from workloads import gpt2, resnet, unet

import dpart
from dpart.cli import main

MODELS = {"gpt2": gpt2, "resnet": resnet, "unet": unet}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipelines_are_equal_to_the_last_bit(stages: int, tmp_path) -> None:
    cases = [Case(name, make(), (1,) * stages) for name, make in MODELS.items()]
    for name, found in compare(cases, tmp_path).items():
        assert found == Difference(0.0, 0.0, 0.0, 0.0, found.gradients_compared), name


@pytest.mark.parametrize("replicas", [[(2, 1), (1, 2)], [(3, 1)]], ids=("2-1 and 1-2", "3-1"))
def test_replicas_are_equal_to_a_millionth(replicas: list[tuple[int, ...]], tmp_path) -> None:
    """Six rows in microbatches of 2 are 3 microbatches, of 4 are 2: not divisible by 2 or by 3 replicas."""
    sizes = {(2, 1): 2, (1, 2): 2, (3, 1): 1}
    cases = [
        Case(f"{name} {'-'.join(map(str, r))}", make(), r, microbatch_size=sizes[r] if name == "gpt2" else 2)
        for r in replicas
        for name, make in MODELS.items()
    ]
    for name, found in compare(cases, tmp_path).items():
        assert found.relative_gradient <= 1e-6, name
        assert found.loss <= 1e-6, name


WORKLOAD = """
import torch
from torch import nn
import dpart


def workload(width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 8))
    x = torch.randn(10, 8)
    return dpart.Workload(model, args=(x,), targets=(x,), loss=nn.functional.mse_loss)


def other():
    return workload(width=16)
"""


def test_the_command_compares_and_finds_a_difference(tmp_path) -> None:
    """The steps of the command line, and that verify does not pass on a build whose stage computes otherwise."""
    (tmp_path / "model.py").write_text(WORKLOAD)
    model, build = f"{tmp_path / 'model.py'}:workload", tmp_path / "build"
    runner = CliRunner()
    for command in (
        ["profile", model, "-o", str(tmp_path / "profile.json"), "--repeats", "1"],
        ["partition", str(tmp_path / "profile.json"), "--stages", "2", "-o", str(tmp_path / "plan.json")],
        ["emit", model, str(tmp_path / "plan.json"), "-o", str(build)],
    ):
        done = runner.invoke(main, command)
        assert done.exit_code == 0, done.output
    good = runner.invoke(main, ["verify", model, str(build), "--steps", "2"])
    assert good.exit_code == 0, good.output
    assert "Exactly equal" in good.output
    wrong = runner.invoke(main, ["verify", f"{tmp_path / 'model.py'}:other", str(build)])
    assert wrong.exit_code == 1
    assert "emit it again" in wrong.output
    source = build / "stage_1.py"
    text = source.read_text()
    assert "(0.2)" in text or "p=0.2" in text or "0.2" in (build / "stage_0.py").read_text()
    source.write_text(text.replace("F.mse_loss(", "1.0000001 * F.mse_loss("))
    assert source.read_text() != text
    broken = runner.invoke(main, ["verify", model, str(build), "--steps", "1"])
    assert broken.exit_code == 1, broken.output


def test_compile_is_its_steps_composed() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    x = torch.randn(8, 8)
    loss = torch.nn.functional.mse_loss
    pipeline = dpart.compile(model, example_inputs=(x,), targets=(x,), loss=loss, num_stages=2, repeats=1)
    captured = dpart.capture(dpart.Workload(model, (x,), {}, (x,), loss))
    assert captured.graph == pipeline.captured.graph
    assert pipeline.profile.graph == pipeline.captured.graph
    assert dpart.partition(pipeline.profile, num_stages=2) == pipeline.plan
    assert pipeline.verify(steps=1).agrees


def test_compile_without_inputs_says_what_to_pass() -> None:
    with pytest.raises(dpart.UserError, match="example_inputs="):
        dpart.compile(torch.nn.Linear(4, 4))
