"""What the commands do: read, work with progress shown, print, write, and say what to type next.

Tables go to standard output; progress to standard error, and only where that is a terminal.
"""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import dpart
from dpart.partitioner.plan import Plan
from dpart.partitioner.table import plan_table
from dpart.profiler.profile import Profile
from dpart.runtime.files import read_file, refuse_existing, write_file
from dpart.runtime.program import Program
from dpart.tables import profile_table

_NARROWEST = 116


def profile(model: str, output: Path, *, microbatch_size: int | None, repeats: int | None, force: bool) -> None:
    """``dpart profile``: measures the layers of a workload into a profile file."""
    refuse_existing(output, force=force)
    with _status("importing the model"):
        workload = dpart.load_workload(model)
    with _status("capturing the model"):
        captured = dpart.capture(workload, microbatch_size=microbatch_size)
    with _bar("profiling") as progress:
        found = dpart.profile(captured, repeats=repeats, progress=progress)
    write_file(found, output, force=force)
    console = _console()
    console.print(profile_table(found))
    _next(console, output, f"dpart partition {_word(output)} -o plan.json")


def partition(profile: Path, topology: Path | None, output: Path, *, force: bool, **options: Any) -> None:
    """``dpart partition``: from a profile file and a topology file to a plan file."""
    refuse_existing(output, force=force)
    found = read_file(Profile, profile)
    devices = None if topology is None else dpart.read_topology(topology)
    with _status("partitioning") as progress:
        plan = dpart.partition(found, devices, progress=progress, **options)
    write_file(plan, output, force=force)
    console = _console()
    console.print(plan_table(plan))
    _next(console, output, f"dpart emit MODEL {_word(output)} -o build")


def emit(model: str, plan: Path, output: Path, *, force: bool) -> None:
    """``dpart emit``: from a workload and a plan file to a build folder."""
    refuse_existing(output, force=force)
    chosen = read_file(Plan, plan)
    with _status("importing the model"):
        workload = dpart.load_workload(model)
    with _status("capturing the model"):
        captured = dpart.capture(workload, microbatch_size=chosen.microbatch_size)
    with _status("writing the stages"):
        dpart.emit(captured, chosen, output, workload=model, force=force)
    console = _console()
    for stage, made in enumerate(chosen.stages):
        first, last = made.layers[0], made.layers[-1]
        file = output / f"stage_{stage}.py"
        console.print(f"{file}: {len(made.layers)} layers, {first} to {last}", soft_wrap=True, markup=False)
    workers = sum(made.num_replicas for made in chosen.stages)
    train = f"torchrun --standalone --nproc-per-node {workers} {_word(output / 'train.py')}"
    _next(console, output, f"dpart verify {_word(model)} {_word(output)}", train)


def verify(
    model: str, folder: Path, *, steps: int, optimizer: Literal["sgd", "adam"] | None, lr: float, seed: int
) -> int:
    """``dpart verify``: compares a build with the whole model; the exit status, 0 if they agree."""
    program = read_file(Program, folder / "program.json")
    with _status("importing the model"):
        workload = dpart.load_workload(model)
    with _status("running the model whole and split"):
        report = dpart.verify(workload, folder, steps=steps, optimizer=optimizer, lr=lr, seed=seed)
    console = _console()
    console.print(report.table())
    if report.agrees:
        train = f"torchrun --standalone --nproc-per-node {len(program.workers)} {_word(folder / 'train.py')}"
        _next(console, None, train)
    return 0 if report.agrees else 1


def _console() -> Console:
    """Tables as wide as the terminal; where there is none, wide enough for them."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _NARROWEST))


def _next(console: Console, written: Path | None, *commands: str) -> None:
    if written is not None:
        console.print(f"\nWrote {written}", soft_wrap=True, markup=False, highlight=False)
    for command in commands:
        console.print(f"Next: {command}", soft_wrap=True, markup=False, highlight=False)


def _word(text: object) -> str:
    return shlex.quote(str(text))


@contextmanager
def _status(doing: str) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(f"{doing} ...") as status:
        yield lambda text: status.update(f"{doing}: {text} ...")


@contextmanager
def _bar(doing: str) -> Iterator[Callable[[int, int, str], None]]:
    console = Console(stderr=True)
    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
