"""A worker that raises or is killed ends the run everywhere within 10 seconds, and is named."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from split import Case, plan_for
from torch import nn

from dpart.codegen.emit import emit
from dpart.compiler.capture import capture
from dpart.compiler.workload import Workload

LIMIT_SECONDS = 10.0
RAISE = "raise ZeroDivisionError('the fault')"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def build(folder: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    workload = Workload(model, args=(torch.randn(8, 8),), targets=(torch.randn(8, 8),), loss=F.mse_loss)
    captured = capture(workload, microbatch_size=2)
    emit(captured, plan_for(captured, Case("chain", workload, (1, 1, 1))), folder)
    return folder


def run(folder: Path, workers: int, *options: str) -> tuple[int, float, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    done = subprocess.run(
        [*command, str(folder / "train.py"), "--steps", "50", *options], capture_output=True, text=True, timeout=120
    )
    return done.returncode, time.time(), done.stdout + done.stderr


def sabotage(folder: Path, stage: int, call: int, statement: str) -> None:
    """Makes the stage's module do something in its `call`-th forward, and say when."""
    source = folder / f"stage_{stage}.py"
    fault = (
        f"\n\nStage{stage}.calls = 0\nwhole = Stage{stage}.forward\n\n\ndef forward(self, *args):\n"
        f"    Stage{stage}.calls += 1\n    if Stage{stage}.calls == {call}:\n"
        f"        print('AT', time.time(), flush=True)\n        {statement}\n"
        f"    return whole(self, *args)\n\n\nStage{stage}.forward = forward\n"
    )
    source.write_text(source.read_text().replace("from torch", "import os, signal, time\nfrom torch", 1) + fault)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        # Call 11 of 4 a step: microbatch 2 of the third step.
        (RAISE, r"dpart: stage 1, replica 0, microbatch 2, forward: ZeroDivisionError: the fault"),
        (KILL, r"dpart: stage [02], replica 0, microbatch \d, \w+: waiting for .* rank 1.*gone.*stage 1, replica 0"),
    ],
    ids=("raises", "killed"),
)
def test_a_fault_ends_all_ranks_and_names_stage_and_microbatch(statement: str, words: str, tmp_path) -> None:
    folder = build(tmp_path / "build")
    sabotage(folder, 1, 11, statement)
    code, ended, output = run(folder, 3)
    began = re.search(r"AT ([\d.]+)", output)
    assert code != 0
    assert began is not None, output[-2000:]
    assert ended - float(began[1]) < LIMIT_SECONDS
    assert re.search(words, output), output[-3000:]


def test_the_wrong_number_of_workers_is_one_clear_message(tmp_path) -> None:
    folder = build(tmp_path / "build")
    code, _, output = run(folder, 2)
    assert code != 0
    assert output.count("dpart: This build has 3 workers, and torchrun started 2") == 1
    (folder / "stage_1.safetensors").unlink()
    code, _, output = run(folder, 3)
    assert code != 0
    assert output.count("stage_1.safetensors: no such file") == 1
    alone = subprocess.run([sys.executable, str(folder / "train.py")], capture_output=True, text=True, timeout=60)
    assert alone.returncode == 1
    assert alone.stderr.startswith("dpart: Start this with torchrun")
    assert "Traceback" not in alone.stderr
