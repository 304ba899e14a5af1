"""The command line: what can be typed. What the commands do stands in `dpart.commands`, loaded when one runs.

Exit status: 0; 1 for the user's mistake or the outside world's fault (one message, no traceback); 2 for usage.
"""

import math
from pathlib import Path
from typing import IO, Any, Literal

import click

import dpart
from dpart.partitioner.units import parse_size
from dpart.runtime.errors import PeerError, UserError


class _Fault(click.ClickException):
    """A message for the user, as the command line prints it."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints it on standard error."""
        click.echo(f"dpart: {self.message}", file=file, err=file is None)


class _Group(click.Group):
    """Turns the two kinds of failure that are no bugs into messages."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except (UserError, PeerError) as error:
            raise _Fault(str(error)) from error


class _Size(click.ParamType[int]):
    """A number of bytes with its unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of ``80 GiB``."""
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(f"{error}, got {value!r}.", param, ctx)


class _Counts(click.ParamType[tuple[int, ...]]):
    """Positive whole numbers, one a stage."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """(2, 1) of ``2,1`` or ``2-1``."""
        if isinstance(value, tuple):
            return value
        parts = value.replace("-", ",").split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"expected replicas of each stage, such as 2,1; got {value!r}.", param, ctx)
        return tuple(int(part) for part in parts)


_AT_LEAST_ONE = click.IntRange(min=1)
_PATH = click.Path(path_type=Path)
_FORCE = click.option("--force", is_flag=True, help="Replace the output if it exists.")
_MODEL = click.argument("model", metavar="MODEL")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(dpart.__version__, prog_name="dpart")
def main() -> None:
    """Splits a PyTorch model over devices: profile its layers, partition them, emit stages, train.

    MODEL is file.py:callable or package.module:callable; the callable returns a dpart.Workload.

    \b
    Example:
      dpart profile   examples/gpt2.py:workload -o profile.json
      dpart partition profile.json --topology examples/topologies/two_hosts.yaml -o plan.json
      dpart emit      examples/gpt2.py:workload plan.json -o build/gpt2
      dpart verify    examples/gpt2.py:workload build/gpt2
      torchrun --standalone --nproc-per-node 2 build/gpt2/train.py
    """


@main.command()
@_MODEL
@click.option("-o", "--output", type=_PATH, default=Path("profile.json"), show_default=True)
@click.option("--microbatch-size", type=_AT_LEAST_ONE, help="Rows per microbatch.  [default: an eighth of the batch]")
@click.option("--repeats", type=_AT_LEAST_ONE, help="Times each layer is timed.  [default: 5 to 30, about 0.25 s]")
@_FORCE
def profile(model: str, output: Path, microbatch_size: int | None, repeats: int | None, force: bool) -> None:
    """Measures what every layer of MODEL costs on this machine.

    \b
    Example:
      dpart profile examples/gpt2.py:workload -o profile.json --microbatch-size 4
    """
    dpart.commands.profile(model, output, microbatch_size=microbatch_size, repeats=repeats, force=force)


@main.command()
@click.argument("profile", type=_PATH)
@click.option("-t", "--topology", type=_PATH, help="YAML file of devices and links.  [default: the profile's machine]")
@click.option("-o", "--output", type=_PATH, default=Path("plan.json"), show_default=True)
@click.option("--method", type=click.Choice(["pipedream", "ilp"]), default="pipedream", show_default=True)
@click.option("--schedule", type=click.Choice(["1f1b", "gpipe"]), default="1f1b", show_default=True)
@click.option("--optimizer", type=click.Choice(["adam", "sgd"]), default="adam", show_default=True)
@click.option("--batch-size", type=_AT_LEAST_ONE, help="Rows per step.  [default: the profile's]")
@click.option("--devices", type=_AT_LEAST_ONE, help="Use at most the first so many devices.")
@click.option("--stages", type=_AT_LEAST_ONE, help="Exactly so many stages.")
@click.option("--max-stages", type=_AT_LEAST_ONE, help="At most so many stages.")
@click.option("--replicas", type=_Counts(), help="Replicas of each stage, such as 2,1; only the cuts are chosen.")
@click.option("--memory-limit", type=_Size(), help="Of each device, such as '80 GiB'.  [default: 90 % of its memory]")
@click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True, max=math.inf), default=60.0, show_default=True,
    help="Seconds for the integer programme.",
)  # fmt: skip
@_FORCE
def partition(profile: Path, topology: Path | None, output: Path, force: bool, **options: Any) -> None:
    """Finds the plan with the smallest predicted step time that fits, and shows what it beat.

    \b
    Example:
      dpart partition profile.json --topology examples/topologies/two_hosts.yaml -o plan.json
    """
    dpart.commands.partition(
        profile,
        topology,
        output,
        force=force,
        method=options["method"],
        schedule=options["schedule"],
        optimizer=options["optimizer"],
        batch_size=options["batch_size"],
        num_devices=options["devices"],
        num_stages=options["stages"],
        max_stages=options["max_stages"],
        replicas=options["replicas"],
        memory_limit_bytes=options["memory_limit"],
        time_limit_seconds=options["time_limit"],
    )


@main.command()
@_MODEL
@click.argument("plan", type=_PATH)
@click.option("-o", "--output", type=_PATH, required=True, metavar="DIR")
@_FORCE
def emit(model: str, plan: Path, output: Path, force: bool) -> None:
    """Writes DIR: a module per stage, its weights, and train.py for torchrun.

    \b
    Example:
      dpart emit examples/gpt2.py:workload plan.json -o build/gpt2
    """
    dpart.commands.emit(model, plan, output, force=force)


@main.command()
@_MODEL
@click.argument("folder", type=_PATH, metavar="DIR")
@click.option("--steps", type=_AT_LEAST_ONE, default=3, show_default=True)
@click.option("--optimizer", type=click.Choice(["adam", "sgd"]), help="[default: the plan's]")
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), default=1e-3, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the dropout masks.")
def verify(
    model: str, folder: Path, steps: int, optimizer: Literal["adam", "sgd"] | None, lr: float, seed: int
) -> None:
    """Trains MODEL whole in one process and split by DIR's workers, and compares every number.

    \b
    Example:
      dpart verify examples/gpt2.py:workload build/gpt2 --steps 3
    """
    click.get_current_context().exit(
        dpart.commands.verify(model, folder, steps=steps, optimizer=optimizer, lr=lr, seed=seed)
    )


if __name__ == "__main__":
    main()
