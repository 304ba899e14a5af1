"""A profile as a table for the terminal: the costliest layers, and the sum over all beside the whole step.

Of an estimated one also what the whole model takes on one rank at each tensor-parallel degree.
"""

from collections import Counter

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
    if profile.machine.estimated:
        return Group(table, *_degrees(profile), Text(_estimated(profile, total)))
    return Group(table, Text(_summary(profile, total)))


def _degrees(profile: Profile) -> list[RenderableType]:
    """One row a degree: sums over the layers, for one rank and one microbatch."""
    if not any(cost.splits for cost in profile.costs):
        return []
    table = Table(
        title="By tensor-parallel degree, one rank of the group",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for column in ("degree", "forward", "backward", "parameters", "stash", "all-reduced", "layers split"):
        table.add_column(column, justify="left" if column == "layers split" else "right", overflow="fold")
    table.add_row(
        "1",
        format_seconds(sum(c.forward_seconds for c in profile.costs)),
        format_seconds(sum(c.backward_seconds for c in profile.costs)),
        format_bytes(sum(c.parameter_bytes for c in profile.costs)),
        format_bytes(sum(c.stash_bytes for c in profile.costs)),
        "-",
        "-",
    )
    for degree in [split.degree for split in profile.costs[0].splits]:
        splits = [split for cost in profile.costs for split in cost.splits if split.degree == degree]
        kinds = Counter(split.split for split in splits if split.split != "replicated")
        reduced = sum(split.forward_reduce_bytes + split.backward_reduce_bytes for split in splits)
        table.add_row(
            str(degree),
            format_seconds(sum(split.forward_seconds for split in splits)),
            format_seconds(sum(split.backward_seconds for split in splits)),
            format_bytes(sum(split.parameter_bytes for split in splits)),
            format_bytes(sum(split.stash_bytes for split in splits)),
            format_bytes(reduced) if reduced else "-",
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none",
        )
    return [table]


def _estimated(profile: Profile, total: float) -> str:
    return (
        f"Sum over layers: {format_seconds(total)} on {profile.machine.device}, estimated from operation and byte "
        "counts: nothing was run."
    )


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
