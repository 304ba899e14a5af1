"""``dpart explain`` and ``dpart diff``: what can be typed. What they do is loaded when one runs; never torch."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from dpart.partitioner.units import parse_size, parse_time

_PATH = click.Path(path_type=Path)
_AT_LEAST_ONE = click.IntRange(min=1)
_FORCE = click.option("--force", is_flag=True, help="Replace the output if it exists.")
_ANSWERS = ("curve", "prices", "sensitivity")


def _answers(_: click.Context, __: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if wrong := [name for name in names if name not in _ANSWERS]:
        raise click.BadParameter(f"expected some of {','.join(_ANSWERS)}; got {wrong[0]!r}.")
    return names


def _counts(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"expected numbers of devices, such as 1,2,4; got {text!r}.")
    return tuple(map(int, parts))


def _size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}; got {text!r}.") from None


def _time(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    try:
        return None if text is None else parse_time(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}; got {text!r}.") from None


@click.command()
@click.argument("file", type=_PATH, metavar="PROFILE_OR_PLAN")
@click.option("-t", "--topology", metavar="WORD_OR_FILE",
    help="YAML file of devices and links, or a word such as 4xdgx-h100.  [default: the profile's machine]",
)  # fmt: skip
@click.option("--what", default=",".join(_ANSWERS), show_default=True, callback=_answers, help="Which answers.")
@click.option("-o", "--output", type=_PATH, metavar="FILE", help="Write the answers as JSON, too.")
@click.option("--target-step", callback=_time, metavar="TIME", help="Find the fewest devices for it, such as '1.2 s'.")
@click.option("--device-counts", callback=_counts, metavar="COUNTS",
    help="Of the curve, such as 1,2,4.  [default: all where there are few, else powers of two]",
)  # fmt: skip
@click.option("--error", type=click.FloatRange(min=0), default=0.1, show_default=True, help="Of layers' times.")
@click.option("--draws", type=_AT_LEAST_ONE, default=10, show_default=True, help="Of wrong profiles.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
@click.option("--method", metavar="NAME", help="As the options below, of dpart partition.")
@click.option("--schedule", metavar="NAME")
@click.option("--optimizer", metavar="NAME")
@click.option("--batch-size", type=_AT_LEAST_ONE)
@click.option("--devices", "num_devices", type=_AT_LEAST_ONE)
@click.option("--memory-limit", "memory_limit_bytes", callback=_size, metavar="SIZE")
@click.option("--time-limit", "time_limit_seconds", type=click.FloatRange(min=0, min_open=True),
    help="Seconds, of every plan.",
)  # fmt: skip
@_FORCE
def explain(
    file: Path,
    topology: str | None,
    what: tuple[str, ...],
    output: Path | None,
    target_step: float | None,
    device_counts: tuple[int, ...] | None,
    error: float,
    draws: int,
    seed: int,
    force: bool,
    **options: Any,
) -> None:
    """Answers questions about the best plan, by planning again with one thing changed.

    \b
    curve:       the step time on every number of devices, its bound, what a sample costs
    prices:      what binds; what one more device, 1 GiB more memory, 10 % more bandwidth save
    sensitivity: the bandwidths, and the errors of the profile, under which the plan stays the best

    Of a PLAN the questions are asked under the constraints it was made under, whichever they are.

    \b
    Example:
      dpart explain profile.json --topology 2xdgx-a100-80 -o explain.json
      dpart explain plan.json --what curve --target-step '1.2 s'
    """
    import_module("dpart.question_commands").explain(
        file,
        topology,
        output,
        force=force,
        options={name: value for name, value in options.items() if value is not None},
        what=what,
        target_step_seconds=target_step,
        device_counts=device_counts,
        relative_error=error,
        draws=draws,
        seed=seed,
    )


@click.command()
@click.argument("before", type=_PATH, metavar="PLAN")
@click.argument("after", type=_PATH, metavar="PLAN")
@click.option("-o", "--output", type=_PATH, metavar="FILE", help="Write the changes as JSON, too.")
@_FORCE
def diff(before: Path, after: Path, output: Path | None, force: bool) -> None:
    """Shows what changed from one plan to another: layers, replicas, schedule, predicted seconds and bytes.

    \b
    Example:
      dpart diff old.json new.json
    """
    import_module("dpart.question_commands").diff(before, after, output, force=force)
