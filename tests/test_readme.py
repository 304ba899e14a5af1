"""What README.md, the examples and the Makefile tell a stranger to type is what there is."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dpart
from dpart.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRAINED = [path for path in EXAMPLES if "\ndef workload(" in path.read_text(encoding="utf-8")]
"""Those that can be trained; the others are models of which only the shapes are here, to be estimated."""


def commands(text: str) -> list[list[str]]:
    """The words of every line of code that calls dpart; prompt, Make's prefix and comments left out."""
    text = "".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)) or text
    lines = [line.strip().removeprefix("$ ").removeprefix("$(BIN)/") for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if re.match(r"dpart +[a-z]", line)]


@pytest.mark.parametrize("source", [ROOT / "README.md", ROOT / "Makefile", *EXAMPLES], ids=lambda path: path.name)
def test_every_command_and_option_exists(source: Path) -> None:
    found = commands(source.read_text(encoding="utf-8"))
    assert {words[1] for words in found} >= ({"profile"} if source in EXAMPLES else {"profile", "partition", "emit"})
    for _, name, *words in found:
        main.commands[name].make_context(name, words)


def test_links_files_and_targets_exist() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"examples/[\w/.]+\.(?:py|yaml)", README):
        assert (ROOT / path).exists(), path
    pages = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^ *|`)make (\w+)", pages, re.MULTILINE):
        assert f"\n{target}:" in MAKEFILE, target


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch) -> None:
    shutil.copy(ROOT / "examples" / "topologies" / "two_hosts.yaml", tmp_path / "cluster.yaml")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    exec(compile(blocks[0], "README.md", "exec"), {"model": model, "x": x, "y": y, "F": F})
    assert (tmp_path / "build" / "train.py").is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "topologies").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_topologies_are_valid(path: Path) -> None:
    assert dpart.read_topology(path).num_devices > 1


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_the_examples_give_workloads_with_batches_that_fit(path: Path) -> None:
    workload = dpart.load_workload(f"{path}:workload")
    model = workload.build()
    batch = next(iter(workload.batches()))
    assert [x.shape[1:] for x in batch] == [x.shape[1:] for x in model.example]
    assert model(*model.rows(2)).isfinite()


def test_every_public_name_loads_and_has_a_type() -> None:
    stub = (ROOT / "dpart" / "__init__.pyi").read_text(encoding="utf-8")
    typed = set(re.findall(r"as (\w+)$", stub, re.MULTILINE)) | {"__version__"}
    assert typed == {*dpart.__all__, "commands"}
    for name in typed:
        assert getattr(dpart, name) is not None
