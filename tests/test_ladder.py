"""ARCHITECTURE.md is true: its folders exist, its ladder holds, and the quick parts load nothing heavy."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
LADDER = re.search(r"^    (\w+(?: < \w+)+)$", PAGE, re.MULTILINE)[1].split(" < ")
OUTSIDE_RUNTIME = {"torch", "numpy", "safetensors", "pydantic", "tqdm", "dpart"}


def imported(source: Path) -> list[str]:
    """Full names of the modules a file imports, at any depth of its code."""
    names = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: a relative import"
            names += (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "dpart" else [node.module]
            )
    return names


def test_the_folders_of_the_picture_exist_and_no_others() -> None:
    drawn = set(re.findall(r"^(\w+)/ ", PAGE, re.MULTILINE))
    assert drawn == set(LADDER)
    assert {p.parent.name for p in ROOT.glob("*/__init__.py")} == drawn


@pytest.mark.parametrize("folder", LADDER)
def test_imports_go_down_the_ladder(folder: str) -> None:
    allowed = set(LADDER[: LADDER.index(folder) + 1])
    sources = list((ROOT / folder).glob("*.py"))
    assert sources
    for source in sources:
        for name in imported(source):
            first, _, rest = name.partition(".")
            assert first not in LADDER or first == "dpart", f"{source.name} imports {name} without dpart."
            if first == "dpart" and folder != "dpart":
                assert rest.partition(".")[0] in allowed, f"{folder}/{source.name} imports {name}"


def test_the_runtime_imports_nothing_but_what_the_page_says() -> None:
    for source in (ROOT / "runtime").glob("*.py"):
        for name in imported(source):
            first = name.partition(".")[0]
            assert first in OUTSIDE_RUNTIME or first in sys.stdlib_module_names, f"{source.name} imports {name}"


@pytest.mark.parametrize(
    "module",
    ["dpart", "dpart.cli", "dpart.partitioner.partition", "dpart.profiler.profile", "dpart.runtime.schedule",
     "dpart.runtime.program", "dpart.runtime.check"],
)  # fmt: skip
def test_what_must_be_quick_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_worker_loads_no_tracer_and_no_solver() -> None:
    code = "import sys, dpart.runtime.training; print([m for m in ('pulp', 'networkx', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    # torch itself imports networkx in places; what counts is that dpart's own heavy rungs stay out.
    assert "pulp" not in done.stdout
    assert "rich" not in done.stdout
