"""Emitted stages: readable, small, loadable, and named as the original."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from split import Case, plan_for
from torch import nn
from workloads import gpt2, resnet, unet

from dpart.codegen.emit import emit
from dpart.compiler.capture import capture
from dpart.compiler.workload import Workload
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file
from dpart.runtime.program import Program
from dpart.runtime.stage import load_stage


def emitted(workload: Workload, stages: int, folder: Path):
    captured = capture(workload, microbatch_size=2)
    emit(captured, plan_for(captured, Case("x", workload, (1,) * stages)), folder)
    return captured


@pytest.mark.parametrize("make", [gpt2, resnet, unet])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_load_and_their_names_are_the_originals(make, stages: int, tmp_path) -> None:
    captured = emitted(make(), stages, tmp_path / "build")
    program = read_file(Program, tmp_path / "build" / "program.json")
    original = captured.model.model.state_dict()
    seen = {}
    for stage in program.stages:
        seen |= load_stage(tmp_path / "build", stage).state_dict()
    assert seen.keys() == original.keys()
    assert all(torch.equal(seen[name], tensor) for name, tensor in original.items())


@pytest.mark.parametrize("make", [gpt2, resnet, unet])
def test_the_source_passes_ruff_and_imports_torch_only(make, tmp_path) -> None:
    emitted(make(), 3, tmp_path / "build")
    sources = sorted((tmp_path / "build").glob("stage_*.py"))
    subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", *map(str, sources)], check=True)
    for source in sources:
        imports = [line for line in source.read_text().splitlines() if line.startswith(("import", "from"))]
        assert all(line.split()[1].split(".")[0] == "torch" for line in imports)
        assert "aten" not in source.read_text()


def test_twelve_blocks_over_four_stages_are_one_class_each_and_short(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    workload = gpt2()
    config = transformers.GPT2Config(
        n_layer=12, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    workload = replace(workload, model=transformers.GPT2LMHeadModel(config))
    captured = capture(workload, microbatch_size=2)
    between = tuple(f"transformer.h.{i}.ln_1" for i in (3, 6, 9))
    for cuts, limit in ((None, 420), (between, 400)):
        emit(captured, plan_for(captured, Case("x", workload, (1,) * 4, cuts)), tmp_path / str(limit))
        texts = [path.read_text() for path in (tmp_path / str(limit)).glob("stage_*.py")]
        assert all(text.count("class GPT2Block") == 1 and "nn.LayerNorm" in text for text in texts)
        assert sum(text.count("\n") for text in texts) <= limit


def test_blocks_that_differ_in_numbers_are_one_class_with_arguments(tmp_path) -> None:
    class Block(nn.Module):
        def __init__(self, width: int, rate: float) -> None:
            super().__init__()
            self.up, self.down, self.rate = nn.Linear(4, width), nn.Linear(width, 4), rate

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)) * self.rate)

    model = nn.Sequential(nn.ModuleDict({"blocks": nn.Sequential(*[Block(8 * i, i / 4) for i in (1, 2, 3)])})["blocks"])
    workload = Workload(model, args=(torch.randn(4, 4),), targets=(torch.randn(4, 4),), loss=nn.functional.mse_loss)
    emitted(workload, 1, tmp_path / "build")
    text = (tmp_path / "build" / "stage_0.py").read_text()
    assert text.count("class Block") == 1
    assert "def __init__(self, out_features: int, rate: float) -> None:" in text
    assert "Block(out_features=16, rate=0.5)" in text


def test_equal_blocks_run_in_a_loop(tmp_path) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    workload = Workload(Chain(), args=(torch.randn(4, 4),), targets=(torch.randn(4, 4),), loss=nn.functional.mse_loss)
    captured = capture(workload, microbatch_size=2)
    emit(captured, plan_for(captured, Case("x", workload, (1, 1), ("layers.2.0",))), tmp_path / "build")
    first, last = ((tmp_path / "build" / f"stage_{i}.py").read_text() for i in (0, 1))
    assert "nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])" in first
    assert "for block in self.layers:\n            x = block(x)" in first
    assert "nn.ModuleDict({str(i): nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for i in range(2, 6)})" in last.replace(
        "\n            ", ""
    ).replace("\n        ", "")
    assert "for block in self.layers.values():" in last


def test_a_plan_for_another_model_and_a_folder_that_exists_are_refused(tmp_path) -> None:
    captured = capture(unet(), microbatch_size=2)
    plan = plan_for(captured, Case("x", unet(), (1, 1)))
    other = capture(resnet(), microbatch_size=2)
    with pytest.raises(UserError, match=plan.fingerprint):
        emit(other, plan, tmp_path / "build")
    assert not (tmp_path / "build").exists()
    (tmp_path / "build").mkdir()
    with pytest.raises(UserError, match="exists already"):
        emit(captured, plan, tmp_path / "build")
    assert list((tmp_path / "build").iterdir()) == []


def test_hostile_names_never_enter_the_source(tmp_path) -> None:
    hostile = 'x"]; import os #'

    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(hostile, nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, hostile)(x)

    model = Hostile()
    workload = Workload(model, args=(torch.randn(4, 4),), targets=(torch.randn(4, 4),), loss=nn.functional.mse_loss)
    with pytest.raises(UserError, match="rename it"):
        emitted(workload, 1, tmp_path / "build")
    assert not (tmp_path / "build").exists()


def test_hostile_class_names_never_enter_the_source(tmp_path) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    Inner.__name__ = Inner.__qualname__ = "X(): pass\nimport os\nclass Y"

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    workload = Workload(
        Outer(), args=(torch.randn(4, 4),), targets=(torch.randn(4, 4),), loss=nn.functional.mse_loss,
        name='"""\nimport os\n"""',
    )  # fmt: skip
    with pytest.raises(UserError, match="rename it"):
        emitted(workload, 1, tmp_path / "build")
    assert not (tmp_path / "build").exists()
    Inner.__name__ = Inner.__qualname__ = "Inner"
    emitted(workload, 1, tmp_path / "build")
    sources = [(tmp_path / "build" / name).read_text() for name in ("stage_0.py", "train.py")]
    assert not any(line.startswith("import os") for text in sources for line in text.splitlines())


def test_tied_weights_are_stored_for_each_stage_that_has_them(tmp_path) -> None:
    emitted(gpt2(), 2, tmp_path / "build")
    program = read_file(Program, tmp_path / "build" / "program.json")
    assert [(s.names, s.stages) for s in program.shared_parameters] == [
        (("transformer.wte.weight", "lm_head.weight"), (0, 1))
    ]
    first, last = (load_file(tmp_path / "build" / f"stage_{i}.safetensors") for i in (0, 1))
    assert torch.equal(first["transformer.wte.weight"], last["lm_head.weight"])
