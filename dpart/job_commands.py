"""What ``dpart compile`` does: ``dpart profile``, ``dpart partition`` and ``dpart emit``, as a job file says.

::

    dpart.yaml ─ read_job ─> Job ─ profile or estimate, at every microbatch size ─> profiles ─ partition each ─> plans
    the fastest plan ─ emit ─> DIR, with profile.json and plan.json
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

import dpart
from dpart.compiler.captured import CapturedModel
from dpart.compiler.workload import Workload
from dpart.job import Job, read_job
from dpart.partitioner.bandwidths import check_bandwidths
from dpart.partitioner.certificates import play, with_profile
from dpart.partitioner.objectives import partition_for
from dpart.partitioner.plan import Plan
from dpart.partitioner.table import microbatch_table, plan_table
from dpart.partitioner.trace import write_trace
from dpart.profiler.profile import DEFAULT_DEGREES, Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, refuse_existing, relative, write_file
from dpart.runtime.program import Program
from dpart.terminal import bar, say, say_next, status, tables, word


@dataclass(frozen=True)
class Planned:
    """Plans with the profiles they were made from, in one order; the fastest one is taken."""

    profiles: tuple[Profile, ...]
    plans: tuple[Plan, ...]

    @property
    def best(self) -> int:
        """Number of the fastest plan; of equal ones the first."""
        return min(range(len(self.plans)), key=lambda i: self.plans[i].step_seconds)

    @property
    def plan(self) -> Plan:
        """The fastest plan, which names its profile's file in the build folder."""
        return with_profile(self.plans[self.best], self.file_name(self.best))

    def file_name(self, number: int) -> str:
        """Of a profile in the build folder: with its microbatch size, where there are several."""
        rows = self.profiles[number].graph.microbatch_size
        return "profile.json" if len(self.profiles) == 1 else f"profile-{rows}.json"


def compile_job(path: Path, output: Path, *, dry_run: bool, force: bool) -> None:
    """``dpart compile``: from a job file to a build folder, or to a plan on the screen."""
    job = read_job(path)
    if not dry_run:
        refuse_existing(output, force=force)
    for warning in check_bandwidths(job.topology) if job.topology is not None else ():
        click.echo(f"Warning: {path}: topology: {warning}", err=True)
    with status("importing the model"):
        workload = dpart.load_workload(job.model)
    captured, profiles = _profiles(job, workload)
    try:
        planned = Planned(profiles, _plans(job, profiles))
        _show(planned)
        if not dry_run:
            _emit(job, workload, captured, planned, output, force=force)
    except UserError as error:
        if dry_run or job.profiles or job.estimate is not None:
            raise
        raise UserError(f"{error}\n{_rescue(profiles, output, path)}") from error
    console = tables()
    if dry_run:
        say(console, "\nNothing was written.")
        return
    workers = read_file(Program, output / "program.json").workers
    train = f"torchrun --standalone --nproc-per-node {len(workers)} {word(output / 'train.py')}"
    say_next(console, output, f"dpart verify {word(job.model)} {word(output)}", train)


def _profiles(job: Job, workload: Workload) -> tuple[dict[int, CapturedModel], tuple[Profile, ...]]:
    """The profiles, with the captures that can be emitted, by rows of a microbatch."""
    if job.profiles:
        return {}, tuple(read_file(Profile, path) for path in job.profiles)
    captured: dict[int, CapturedModel] = {}
    found = []
    for size in job.microbatch_sizes or (None,):
        with status("capturing the model"):
            model = dpart.capture(workload, microbatch_size=size, meta=job.estimate is not None)
        with bar("profiling" if job.estimate is None else "estimating") as progress:
            if job.estimate is not None:
                # Captured without numbers: to be emitted, it is captured again.
                degrees = job.degrees or DEFAULT_DEGREES
                found.append(dpart.estimate(model, job.estimate, degrees=degrees, progress=progress))
            else:
                found.append(dpart.profile(model, repeats=job.repeats, progress=progress))
                captured[model.graph.microbatch_size] = model
    return captured, tuple(found)


def _plans(job: Job, profiles: Sequence[Profile]) -> tuple[Plan, ...]:
    # One batch for all of them, or their steps could not be compared.
    options = {"batch_size": profiles[0].batch_size} | dict(job.options)
    with status("partitioning") as progress:
        return tuple(partition_for(p, job.topology, progress=progress, **options) for p in profiles)


def _emit(
    job: Job, workload: Workload, captured: dict[int, CapturedModel], planned: Planned, output: Path, *, force: bool
) -> None:
    plan = planned.plan
    model = captured.get(plan.microbatch_size)
    if model is None:
        with status("capturing the model"):
            model = dpart.capture(workload, microbatch_size=plan.microbatch_size)
    with status("writing the stages"):
        dpart.emit(model, plan, output, workload=job.model, force=force)
    if "profile" in job.keep:
        for number, profile in enumerate(planned.profiles):
            write_file(profile, output / planned.file_name(number))
    if "trace" in job.keep:
        write_trace(play(plan, planned.profiles[planned.best]), output / "trace.json")


def _show(planned: Planned) -> None:
    console = tables()
    console.print(plan_table(planned.plan))
    if len(planned.plans) > 1:
        console.print(microbatch_table(planned.plans, planned.best))


def _rescue(profiles: Sequence[Profile], output: Path, job: Path) -> str:
    """Writes what was measured beside the build folder that is not to be; says how to use it."""
    paths = []
    for profile in profiles:
        path = output.parent / f"{output.name}.profile-{profile.graph.microbatch_size}.json"
        write_file(profile, path, force=True)
        paths.append(relative(path, job))
    return f"What was measured is kept: plan with it by the line profile: [{', '.join(paths)}] of {job}."
