"""The command line: what can be typed. What the commands do stands in `dpart.commands`, loaded when one runs.

Exit status: 0; 1 for the user's mistake or the outside world's fault (one message, no traceback); 2 for usage.
"""

import math
from pathlib import Path
from typing import IO, Any, Literal

import click

import dpart
from dpart.cli_compile import compile_
from dpart.cli_questions import diff, explain
from dpart.cli_topology import topology as topology_group
from dpart.partitioner.units import parse_size, parse_time
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


class _Seconds(click.ParamType[float]):
    """A time with its unit."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds of ``2 ms``."""
        try:
            return value if isinstance(value, float) else parse_time(value)
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


class _Stages(click.ParamType[tuple[int, ...]]):
    """Stages of ZeRO."""

    name = "stages"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """(0, 1) of ``0,1``."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part in ("0", "1", "2", "3") for part in parts):
            self.fail(f"expected stages of ZeRO from 0 to 3, such as 0,1; got {value!r}.", param, ctx)
        return tuple(int(part) for part in parts)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len(names) < 2 or not all(names):
        raise click.BadParameter(f"expected two layers or more, such as a,b; got {text!r}.", param_hint="--together")
    return names


def _pin(text: str) -> tuple[str, int]:
    layer, _, stage = text.rpartition("=")
    if not layer or not stage.isdecimal():
        raise click.BadParameter(f"expected a layer and its stage, such as a=0; got {text!r}.", param_hint="--pin")
    return layer, int(stage)


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
@click.option(
    "--estimate", metavar="DEVICE", help="Estimate for a device of the catalogue, such as h100; nothing runs."
)
@click.option("--degrees", type=_Counts(), help="Tensor-parallel degrees to estimate.  [default: 1,2,4,8]")
@_FORCE
def profile(model: str, output: Path, force: bool, **options: Any) -> None:
    """Measures what every layer of MODEL costs on this machine, or estimates it for a device you do not have.

    \b
    Example:
      dpart profile examples/gpt2.py:workload -o profile.json --microbatch-size 4
      dpart profile --estimate h100 examples/llama3.py:llama3_405b -o profile.json
    """
    device = options["estimate"]
    if device is None and options["degrees"] is not None:
        raise click.UsageError("--degrees goes with --estimate: what is measured is measured at degree 1.")
    if device is not None and options["repeats"] is not None:
        raise click.UsageError("--repeats does not go with --estimate: nothing is timed.")
    if device is not None:
        dpart.commands.estimate(
            model,
            output,
            device=device,
            degrees=options["degrees"],
            microbatch_size=options["microbatch_size"],
            force=force,
        )
    else:
        dpart.commands.profile(
            model, output, microbatch_size=options["microbatch_size"], repeats=options["repeats"], force=force
        )


@main.command()
@click.argument("profiles", type=_PATH, nargs=-1, metavar="PROFILE...")
@click.option("-t", "--topology", metavar="WORD_OR_FILE",
    help="YAML file of devices and links, or a word such as 4xdgx-h100.  [default: the profile's machine]",
)  # fmt: skip
@click.option("-o", "--output", type=_PATH, default=Path("plan.json"), show_default=True)
@click.option("--method", type=click.Choice(["dp", "pipedream", "ilp"]), default="dp", show_default=True)
@click.option("--objective", type=click.Choice(["time", "cost", "devices"]), default="time", show_default=True)
@click.option("--target", type=_Seconds(), metavar="TIME", help="A step's, such as '2 s', for --objective devices.")
@click.option("--schedule", type=click.Choice(["1f1b", "gpipe", "zb-h1", "pipedream", "2bw", "auto"]), default="1f1b",
    show_default=True, help="auto: 1f1b, then deeper warm-ups and zb-h1 on the plans found.",
)  # fmt: skip
@click.option("--optimizer", type=click.Choice(["adam", "adam-mixed", "sgd"]), default="adam", show_default=True)
@click.option("--batch-size", type=_AT_LEAST_ONE, help="Rows per step.  [default: the profile's]")
@click.option("--devices", type=_AT_LEAST_ONE, help="Use at most the first so many devices.")
@click.option("--stages", type=_AT_LEAST_ONE, help="Exactly so many stages.")
@click.option("--max-stages", type=_AT_LEAST_ONE, help="At most so many stages.")
@click.option("--replicas", type=_Counts(), help="Replicas of each stage, such as 2,1.")
@click.option("--tensor-parallel", type=_Counts(), help="Degrees to choose from, such as 1,2.  [default: all known]")
@click.option("--sharding", type=_Stages(), help="Stages of ZeRO to choose from; 0 is none.  [default: 0,1,2,3]")
@click.option("--no-recompute", is_flag=True, help="Keep every activation.")
@click.option("--together", multiple=True, metavar="LAYERS", help="Layers that no cut separates, such as a,b; repeat.")
@click.option("--pin", multiple=True, metavar="LAYER=STAGE", help="A layer that stands in this stage; repeat.")
@click.option("--memory-limit", type=_Size(), help="Of each device, such as '80 GiB'.  [default: 90 % of its memory]")
@click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True, max=math.inf), default=60.0, show_default=True,
    help="Seconds after which the proof is as good as it is.",
)  # fmt: skip
@click.option("--trace", type=_PATH, metavar="FILE", help="Write the predicted step for ui.perfetto.dev, too.")
@click.option(
    "--check-certificate", type=_PATH, metavar="PLAN", help="Check this plan instead; PROFILE may be left out."
)
@_FORCE
def partition(
    profiles: tuple[Path, ...],
    topology: str | None,
    output: Path,
    trace: Path | None,
    check_certificate: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Finds the plan with the smallest predicted step time that fits, and shows what it beat.

    Several PROFILEs are of one model at several microbatch sizes: the best plan of all is chosen.

    \b
    Example:
      dpart partition profile.json --topology 2xdgx-a100 -o plan.json
      dpart partition --check-certificate plan.json
    """
    if check_certificate is not None:
        profile = profiles[0] if profiles else None
        click.get_current_context().exit(dpart.commands.check_certificate(check_certificate, profile))
    if not profiles:
        raise click.UsageError("Missing argument 'PROFILE...'.")
    dpart.commands.partition(
        profiles,
        topology,
        output,
        trace=trace,
        force=force,
        objective=options["objective"],
        target_step_seconds=options["target"],
        method=options["method"],
        schedule=options["schedule"],
        optimizer=options["optimizer"],
        batch_size=options["batch_size"],
        num_devices=options["devices"],
        num_stages=options["stages"],
        max_stages=options["max_stages"],
        replicas=options["replicas"],
        tensor_parallel=options["tensor_parallel"],
        sharding=options["sharding"],
        recompute=not options["no_recompute"],
        together=[_names(text) for text in options["together"]],
        pins=dict(_pin(text) for text in options["pin"]),
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


main.add_command(topology_group)
main.add_command(compile_)
main.add_command(explain)
main.add_command(diff)

if __name__ == "__main__":
    main()
