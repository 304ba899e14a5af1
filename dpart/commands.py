"""What the commands do: read, work with progress shown, print, write, and say what to type next.

Tables go to standard output; progress to standard error, and only where that is a terminal.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import dpart
from dpart.partitioner.certificates import check_plan, play, with_profile
from dpart.partitioner.objectives import partition_for
from dpart.partitioner.plan import Plan
from dpart.partitioner.table import check_table, microbatch_table, plan_table
from dpart.partitioner.trace import write_trace
from dpart.profiler.devices import device_kind
from dpart.profiler.profile import DEFAULT_DEGREES, Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, refuse_existing, relative, write_file
from dpart.runtime.program import Program
from dpart.tables import profile_table
from dpart.terminal import bar, say_next, status, tables, word
from dpart.topology_commands import checked_topology


def profile(model: str, output: Path, *, microbatch_size: int | None, repeats: int | None, force: bool) -> None:
    """``dpart profile``: measures the layers of a workload into a profile file."""
    refuse_existing(output, force=force)
    with status("importing the model"):
        workload = dpart.load_workload(model)
    with status("capturing the model"):
        captured = dpart.capture(workload, microbatch_size=microbatch_size)
    with bar("profiling") as progress:
        found = dpart.profile(captured, repeats=repeats, progress=progress)
    write_file(found, output, force=force)
    console = tables()
    console.print(profile_table(found))
    say_next(console, output, f"dpart partition {word(output)} -o plan.json")


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
    with status("importing the model"):
        workload = dpart.load_workload(model)
    with status("capturing the model"):
        captured = dpart.capture(workload, microbatch_size=microbatch_size, meta=True)
    with bar("estimating") as progress:
        found = dpart.estimate(captured, kind, degrees=degrees or DEFAULT_DEGREES, progress=progress)
    write_file(found, output, force=force)
    console = tables()
    console.print(profile_table(found))
    say_next(console, output, f"dpart partition {word(output)} -o plan.json --topology TOPOLOGY")


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
    with status("partitioning") as progress:
        plans = [partition_for(p, devices, batch_size=batch_size, progress=progress, **options) for p in found]
    best = min(range(len(plans)), key=lambda i: plans[i].step_seconds)
    plan = with_profile(plans[best], relative(profiles[best], output))
    write_file(plan, output, force=force)
    console = tables()
    console.print(plan_table(plan))
    if len(plans) > 1:
        console.print(microbatch_table(plans, best))
    if trace is not None:
        write_trace(play(plan, found[best]), trace, force=force)
        console.print(f"\nWrote {trace}: open it at ui.perfetto.dev", soft_wrap=True, markup=False, highlight=False)
    say_next(console, output, f"dpart emit MODEL {word(output)} -o build")


def check_certificate(plan: Path, profile: Path | None) -> int:
    """``dpart partition --check-certificate``: recomputes what a plan claims; the exit status, 0 if all holds."""
    read = read_file(Plan, plan)
    if profile is None:
        if read.question is None or not read.question.profile:
            raise UserError(f"{plan} does not say which profile it was made from: name it.")
        profile = plan.parent / read.question.profile
    with status("checking") as progress:
        checks = check_plan(read, read_file(Profile, profile), progress=progress)
    console = tables()
    console.print(check_table(read, checks))
    return 0 if all(check.holds for check in checks) else 1


def emit(model: str, plan: Path, output: Path, *, force: bool) -> None:
    """``dpart emit``: from a workload and a plan file to a build folder."""
    refuse_existing(output, force=force)
    chosen = read_file(Plan, plan)
    with status("importing the model"):
        workload = dpart.load_workload(model)
    with status("capturing the model"):
        captured = dpart.capture(workload, microbatch_size=chosen.microbatch_size)
    with status("writing the stages"):
        dpart.emit(captured, chosen, output, workload=model, force=force)
    console = tables()
    for stage, made in enumerate(chosen.stages):
        first, last = made.layers[0], made.layers[-1]
        file = output / f"stage_{stage}.py"
        console.print(f"{file}: {len(made.layers)} layers, {first} to {last}", soft_wrap=True, markup=False)
    workers = sum(made.num_replicas for made in chosen.stages)
    train = f"torchrun --standalone --nproc-per-node {workers} {word(output / 'train.py')}"
    say_next(console, output, f"dpart verify {word(model)} {word(output)}", train)


def verify(
    model: str, folder: Path, *, steps: int, optimizer: Literal["sgd", "adam"] | None, lr: float, seed: int
) -> int:
    """``dpart verify``: compares a build with the whole model; the exit status, 0 if they agree."""
    program = read_file(Program, folder / "program.json")
    with status("importing the model"):
        workload = dpart.load_workload(model)
    with status("running the model whole and split"):
        report = dpart.verify(workload, folder, steps=steps, optimizer=optimizer, lr=lr, seed=seed)
    console = tables()
    console.print(report.table())
    if report.agrees:
        train = f"torchrun --standalone --nproc-per-node {len(program.workers)} {word(folder / 'train.py')}"
        say_next(console, None, train)
    return 0 if report.agrees else 1
