"""What ``dpart explain`` and ``dpart diff`` do: read, answer with progress shown, print, write."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpart.partitioner.answers_table import explanation_table
from dpart.partitioner.diff import diff as plan_diff
from dpart.partitioner.diff_table import diff_table
from dpart.partitioner.plan import Plan
from dpart.partitioner.questions import explain as answers
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import from_json, read_file, read_text, refuse_existing, write_file
from dpart.terminal import say_next, status, tables
from dpart.topology_commands import checked_topology

_TIME_LIMIT = "time_limit_seconds"
"""The one option of `partition` that is no constraint: it may be given beside a plan."""


def explain(
    file: Path,
    topology: str | None,
    output: Path | None,
    *,
    force: bool,
    options: Mapping[str, Any],
    **asked: Any,
) -> None:
    """``dpart explain``: of a profile file and a topology, or of a plan file, the answers to questions.

    Args:
        options: Of `partition`, those that were given.
        asked: Of `dpart.partitioner.questions.explain`.
    """
    if output is not None:
        refuse_existing(output, force=force)
    plan, profile = _plan_and_profile(file)
    if plan is not None and (topology is not None or set(options) - {_TIME_LIMIT}):
        raise UserError(
            f"{file} is a plan, which says its topology and constraints: leave out --topology and the options of "
            "dpart partition, or explain its profile."
        )
    devices = None if topology is None else checked_topology(topology)
    with status("explaining") as progress:
        found = answers(profile, devices, plan=plan, progress=progress, **asked, **options)
    console = tables()
    console.print(explanation_table(found))
    if output is not None:
        write_file(found, output, force=force)
        say_next(console, output)


def diff(before: Path, after: Path, output: Path | None, *, force: bool) -> None:
    """``dpart diff``: of two plan files, what changed."""
    if output is not None:
        refuse_existing(output, force=force)
    found = plan_diff(read_file(Plan, before), read_file(Plan, after))
    console = tables()
    console.print(diff_table(found, str(before), str(after)))
    if output is not None:
        write_file(found, output, force=force)
        say_next(console, output)


def _plan_and_profile(file: Path) -> tuple[Plan | None, Profile]:
    """A plan with the profile it names, or a profile alone."""
    text = read_text(file)
    if not re.match(r'\s*{\s*"format":\s*"dpart\.plan"', text):
        return None, from_json(Profile, text, str(file))
    plan = from_json(Plan, text, str(file))
    if plan.question is None or not plan.question.profile:
        raise UserError(f"{file} does not say which profile it was made from: explain the profile.")
    return plan, read_file(Profile, file.parent / plan.question.profile)
