"""What the commands do: read, work with progress shown, print, write, and say what to type next.

Tables go to standard output; progress to standard error, and only where that is a terminal.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import dpart
from dpart.partitioner.certificates import check_plan, play, with_profile
from dpart.partitioner.objectives import partition_for
from dpart.partitioner.plan import Plan
from dpart.partitioner.table import check_table, microbatch_table, plan_table
from dpart.partitioner.trace import write_trace
from dpart.profiler.devices import device_kind
from dpart.profiler.estimate import DEGREES
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, refuse_existing, relative, write_file
from dpart.runtime.program import Program
from dpart.tables import profile_table
from dpart.topology_commands import checked_topology

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


def estimate(
    model: str,
    output: Path,
    *,
    device: str,
    degrees: Sequence[int] | None,
    microbatch_size: int | None,
    force: bool,
) -> None:
    """``dpart profile --estimate``: a profile file for a device of the catalogue, from counts."""
    refuse_existing(output, force=force)
    kind = device_kind(device)
    with _status("importing the model"):
        workload = dpart.load_workload(model)
    with _status("capturing the model"):
        captured = dpart.capture(workload, microbatch_size=microbatch_size, meta=True)
    with _bar("estimating") as progress:
        found = dpart.estimate(captured, kind, degrees=degrees or DEGREES, progress=progress)
    write_file(found, output, force=force)
    console = _console()
    console.print(profile_table(found))
    _next(console, output, f"dpart partition {_word(output)} -o plan.json --topology TOPOLOGY")


def partition(
    profiles: Sequence[Path],
    topology: str | None,
    output: Path,
    *,
    trace: Path | None,
    force: bool,
    batch_size: int | None,
    **options: Any,
) -> None:
    """``dpart partition``: from profile files and a topology to a plan file."""
    for path in (output, *([trace] if trace is not None else [])):
        refuse_existing(path, force=force)
    found = [read_file(Profile, path) for path in profiles]
    devices = None if topology is None else checked_topology(topology)
    # One batch for all of them, or their steps could not be compared.
    batch_size = batch_size or found[0].batch_size
    with _status("partitioning") as progress:
        plans = [partition_for(p, devices, batch_size=batch_size, progress=progress, **options) for p in found]
    best = min(range(len(plans)), key=lambda i: plans[i].step_seconds)
    plan = with_profile(plans[best], relative(profiles[best], output))
    write_file(plan, output, force=force)
    console = _console()
    console.print(plan_table(plan))
    if len(plans) > 1:
        console.print(microbatch_table(plans, best))
    if trace is not None:
        write_trace(play(plan, found[best]), trace, force=force)
        console.print(f"\nWrote {trace}: open it at ui.perfetto.dev", soft_wrap=True, markup=False, highlight=False)
    _next(console, output, f"dpart emit MODEL {_word(output)} -o build")


def check_certificate(plan: Path, profile: Path | None) -> int:
    """``dpart partition --check-certificate``: recomputes what a plan claims; the exit status, 0 if all holds."""
    read = read_file(Plan, plan)
    if profile is None:
        if read.question is None or not read.question.profile:
            raise UserError(f"{plan} does not say which profile it was made from: name it.")
        profile = plan.parent / read.question.profile
    with _status("checking") as progress:
        checks = check_plan(read, read_file(Profile, profile), progress=progress)
    console = _console()
    console.print(check_table(read, checks))
    return 0 if all(check.holds for check in checks) else 1


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
