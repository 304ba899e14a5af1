"""The plan as tables for the terminal: its stages, the plans it beat, what to know about it."""

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpart.partitioner.plan import Alternative, Plan, Stage
from dpart.partitioner.units import format_bytes, format_seconds


def plan_table(plan: Plan) -> RenderableType:
    """Everything a person needs to judge a plan; a console prints it."""
    parts: list[RenderableType] = [_stages(plan), Text(_summary(plan))]
    if plan.alternatives:
        parts += [Text(), _alternatives(plan)]
    if plan.notes:
        parts += [Text(), *(Text(f"Note: {note}") for note in plan.notes)]
    return Group(*parts)


def _stages(plan: Plan) -> Table:
    table = _table(f"{plan.model}: {len(plan.stages)} stage(s) on {_used(plan)} of {plan.num_devices} devices")
    table.add_column("stage", justify="right")
    table.add_column("layers", overflow="fold")
    table.add_column("replicas", justify="right", no_wrap=True)
    table.add_column("devices", justify="right", overflow="fold")
    reduces = any(stage.all_reduce_seconds for stage in plan.stages)
    for column in ("forward", "backward", "receive", *(["all-reduce"] if reduces else [])):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("in\nflight", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    for s, stage in enumerate(plan.stages):
        peak, limit = stage.memory.total_bytes, plan.memory_limit_bytes
        table.add_row(
            str(s),
            escape(_layers(stage)),
            str(stage.num_replicas),
            _range(stage.devices),
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds),
            format_seconds(stage.receive_seconds) if stage.receive_seconds else "-",
            *([format_seconds(stage.all_reduce_seconds) if stage.all_reduce_seconds else "-"] if reduces else []),
            str(stage.in_flight),
            f"{format_bytes(peak)} ({peak / limit:.0%})",
        )
    return table


def _summary(plan: Plan) -> str:
    proof = "proved the smallest" if plan.optimal else "not proved the smallest"
    return (
        f"Step: {format_seconds(plan.step_seconds)} predicted for {plan.num_microbatches} microbatches of "
        f"{plan.microbatch_size}, {plan.schedule}; devices wait {plan.bubble:.0%} of it.\n"
        f"Bottleneck: {format_seconds(plan.bottleneck_seconds)} per microbatch, {proof} ({plan.method}).\n"
        f"Memory: {format_bytes(plan.memory_limit_bytes)} of each device may be used, with {plan.optimizer}.\n"
        f"Topology: {plan.topology}."
    )


def _alternatives(plan: Plan) -> Table:
    table = _table("Other plans")
    table.add_column("plan")
    table.add_column("replicas", justify="right")
    table.add_column("step", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("", overflow="fold")
    for other in plan.alternatives:
        table.add_row(other.name, _replicas(other), *_times(other, plan), escape(other.note))
    return table


def _times(other: Alternative, plan: Plan) -> tuple[str, str]:
    if other.step_seconds is None:
        return "-", "-"
    ratio = f"{other.step_seconds / plan.step_seconds:.2f}x" if plan.step_seconds else "-"
    return format_seconds(other.step_seconds), ratio


def _table(title: str) -> Table:
    return Table(
        title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def _layers(stage: Stage) -> str:
    first, last, n = stage.layers[0], stage.layers[-1], len(stage.layers)
    return first if n == 1 else f"{first} to\n{last} ({n})"


def _range(devices: tuple[int, ...]) -> str:
    if len(devices) > 2 and devices == tuple(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    return ", ".join(map(str, devices))


def _replicas(other: Alternative) -> str:
    row, n = other.replicas, len(other.replicas)
    return f"{row[0]} x {n} stages" if n > 4 and len(set(row)) == 1 else "-".join(map(str, row))


def _used(plan: Plan) -> int:
    return sum(stage.num_replicas for stage in plan.stages)
