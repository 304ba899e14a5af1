"""``train.py``: where batches come from, what is saved and reported, and which data is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from split import Case, plan_for
from torch import nn

from dpart.codegen.emit import emit
from dpart.compiler.capture import capture
from dpart.compiler.workload import Workload
from dpart.runtime.errors import UserError
from dpart.runtime.microbatch import batch_rows, check_batch, split_batch
from dpart.runtime.program import Tensor

DATA = """
import torch


def batches():
    torch.manual_seed(0)
    for _ in range(3):
        x = torch.randn(7, 8)
        yield {"x": x, "y": x.flip(1)}


def wrong():
    yield torch.randn(7, 9), torch.randn(7, 8).double()


def different():
    yield torch.randn(7, 8) + float(__import__("os").environ["RANK"]), torch.randn(7, 8)


def nothing():
    return []
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    """A build of two stages, with a data file beside it."""
    folder = tmp_path_factory.mktemp("training")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    workload = Workload(model, args=(torch.randn(8, 8),), targets=(torch.randn(8, 8),), loss=F.mse_loss)
    captured = capture(workload, microbatch_size=2)
    emit(captured, plan_for(captured, Case("mlp", workload, (1, 1))), folder / "build")
    (folder / "data.py").write_text(DATA)
    return folder


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(folder / "build" / "train.py"), *options]
    return subprocess.run([*command, *script], capture_output=True, text=True, timeout=120)


def test_it_trains_on_given_data_saves_and_reports(build: Path) -> None:
    done = run(
        build, "--steps", "40", "--lr", "0.01", "--data", f"{build / 'data.py'}:batches",
        "--save", str(build / "trained"), "--json", str(build / "run.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((build / "run.json").read_text())
    assert len(report["losses"]) == 40
    assert report["losses"][-1] < report["losses"][0] / 2
    assert "step " in done.stdout
    assert "predicted" in done.stdout
    before, after = {}, {}
    for stage in (0, 1):
        before |= load_file(build / "build" / f"stage_{stage}.safetensors")
        after |= load_file(build / "trained" / f"stage_{stage}.safetensors")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("wrong", ("input_1 must have shape ('rows', 8), got (7, 9)", "target must be float32, got float64")),
        ("different", ("The ranks read different batches",)),
        ("nothing", ("gave no batch",)),
    ],
)
def test_data_that_does_not_fit_is_one_clear_message(build: Path, name: str, parts: tuple[str, ...]) -> None:
    done = run(build, "--data", f"{build / 'data.py'}:{name}")
    assert done.returncode != 0
    for part in parts:
        assert part in done.stderr, done.stderr
    assert "Traceback" not in done.stderr.split("torch.distributed.elastic")[0].split("Traceback (most recent")[0]


def test_a_folder_that_exists_is_refused_before_the_training(build: Path) -> None:
    (build / "there").mkdir()
    done = run(build, "--steps", "2", "--save", str(build / "there"))
    assert done.returncode != 0
    assert "exists already" in done.stderr
    assert "loss " not in done.stdout


def test_random_batches_say_so(build: Path) -> None:
    done = run(build, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("training on random batches") == 1


def test_microbatches_cover_the_rows_once_and_none_is_empty() -> None:
    """Field case: fewer or empty chunks than asked for."""
    for rows in range(1, 14):
        for size in range(1, 15):
            x, constant = torch.arange(rows * 2).view(rows, 2), torch.ones(3)
            parts = split_batch((x, constant), (0, None), size)
            assert torch.equal(torch.cat([part.leaves[0] for part in parts]), x)
            assert all(part.leaves[1] is constant for part in parts)
            assert [part.rows for part in parts[:-1]] == [size] * (len(parts) - 1)
            assert 1 <= parts[-1].rows <= size
            assert sum(part.weight for part in parts) == pytest.approx(1)


def test_a_batch_must_fit() -> None:
    inputs = (Tensor("x", (2, 4), "float32", 0), Tensor("y", (2,), "int64", 0))
    check_batch((torch.randn(9, 4), torch.zeros(9, dtype=torch.int64)), inputs)
    with pytest.raises(UserError, match=r"2 tensors \(x, y\), got 1"):
        check_batch((torch.randn(9, 4),), inputs)
    with pytest.raises(UserError, match="one number of rows"):
        batch_rows((torch.randn(9, 4), torch.zeros(8)), (0, 0))
