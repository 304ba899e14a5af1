"""A profile as a table for the terminal: the costliest layers, and the sum over all beside the whole step."""

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpart.partitioner.units import format_bytes, format_seconds
from dpart.profiler.profile import LayerCost, Profile

_MOST_ROWS = 10


def profile_table(profile: Profile) -> RenderableType:
    """The costliest layers first; a console prints it."""
    costs = sorted(profile.costs, key=_seconds, reverse=True)
    total = sum(map(_seconds, costs))
    shown = costs[:_MOST_ROWS]
    rows = profile.graph.microbatch_size
    title = f"{profile.graph.model}: the costliest {len(shown)} of {len(costs)} layers, for a microbatch of {rows}"
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("layer", overflow="fold")
    table.add_column("kind")
    for column in ("forward", "backward", "share", "parameters", "stash"):
        table.add_column(column, justify="right")
    for cost in shown:
        table.add_row(
            escape(cost.layer),
            escape(profile.graph.layer[cost.layer].kind),
            format_seconds(cost.forward_seconds),
            format_seconds(cost.backward_seconds) if cost.backward_seconds else "-",
            f"{_seconds(cost) / total:.1%}" if total else "-",
            format_bytes(cost.parameter_bytes) if cost.parameter_bytes else "-",
            format_bytes(cost.stash_bytes) if cost.stash_bytes else "-",
        )
    return Group(table, Text(_summary(profile, total)))


def _summary(profile: Profile, total: float) -> str:
    machine = profile.machine
    where = f"one of {machine.num_devices} CPU cores" if machine.device == "cpu" else machine.device
    ratio = f" ({total / profile.step_seconds:.2f}x)" if profile.step_seconds else ""
    return (
        f"Sum over layers: {format_seconds(total)}; the whole step, measured: "
        f"{format_seconds(profile.step_seconds)}{ratio}; on {where}."
    )


def _seconds(cost: LayerCost) -> float:
    return cost.forward_seconds + cost.backward_seconds
