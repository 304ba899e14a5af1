"""The plan as tables for the terminal: its stages, the plans it beat, what to know about it."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpart.partitioner.certify import Check
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


def check_table(plan: Plan, checks: Sequence[Check]) -> RenderableType:
    """What a check of a certificate found: faults one by one, the rest in a line."""
    faults = [check for check in checks if not check.holds]
    proved = (
        f"The certificate holds: {len(checks)} checks. No plan of its space has an objective below "
        f"{format_seconds(plan.certificate.lower_bound_seconds)}; the best found has "
        f"{format_seconds(plan.certificate.best_objective_seconds)}, {plan.certificate.gap:.3%} above."
        if plan.certificate is not None
        else ""
    )
    if not faults:
        return Text(proved)
    table = _table(f"The certificate does not hold: {len(faults)} of {len(checks)} checks fail")
    for column in ("what", "stated", "found"):
        table.add_column(column, overflow="fold")
    for check in faults:
        table.add_row(escape(check.what), check.stated, check.found)
    return table


def microbatch_table(plans: Sequence[Plan], best: int) -> Table:
    """The plans for several microbatch sizes, the chosen one marked."""
    table = _table("Microbatch sizes")
    for column in ("rows", "microbatches", "step", ""):
        table.add_column(column, justify="right")
    for i, plan in enumerate(plans):
        row = (str(plan.microbatch_size), str(plan.num_microbatches), format_seconds(plan.step_seconds))
        table.add_row(*row, "chosen" if i == best else "")
    return table


def _stages(plan: Plan) -> Table:
    table = _table(f"{plan.model}: {len(plan.stages)} stage(s) on {_used(plan)} of {plan.num_devices} devices")
    table.add_column("stage", justify="right")
    table.add_column("layers", overflow="fold")
    table.add_column("replicas", justify="right", no_wrap=True)
    table.add_column("devices", justify="right", overflow="fold")
    degrees = any(stage.tensor_parallel_degree > 1 for stage in plan.stages)
    again = any(stage.recompute for stage in plan.stages)
    sharded = any(stage.optimizer_sharding for stage in plan.stages)
    chosen = [("tensor\nparallel", degrees), ("recom-\nputed", again), ("ZeRO", sharded)]
    for column, shown in chosen:
        if shown:
            table.add_column(column, justify="right", no_wrap=True)
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
            *([str(stage.tensor_parallel_degree)] if degrees else []),
            *([_recomputed(stage)] if again else []),
            *([str(stage.optimizer_sharding or "-")] if sharded else []),
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds),
            format_seconds(stage.receive_seconds) if stage.receive_seconds else "-",
            *([format_seconds(stage.all_reduce_seconds) if stage.all_reduce_seconds else "-"] if reduces else []),
            str(stage.in_flight),
            f"{format_bytes(peak)} ({peak / limit:.0%})",
        )
    return table


def _recomputed(stage: Stage) -> str:
    layers = sum(len(region) for region in stage.recompute)
    return f"{layers} of {len(stage.layers)}" if layers else "-"


def _proof(plan: Plan) -> str:
    """How good the plan is known to be."""
    certificate, bottleneck = plan.certificate, format_seconds(plan.bottleneck_seconds)
    if certificate is None:
        proof = "proved the smallest" if plan.optimal else "not proved the smallest"
        return f"Bottleneck: {bottleneck} per microbatch, {proof} ({plan.method}).\n"
    best, lower = (format_seconds(s) for s in (certificate.best_objective_seconds, certificate.lower_bound_seconds))
    own = f", this plan's is {format_seconds(certificate.objective_seconds)}"
    same = certificate.objective_seconds <= certificate.best_objective_seconds * (1 + 1e-9)
    return (
        f"Certificate: the best objective found is {best}{'' if same else own}; none can be below {lower} (gap "
        f"{certificate.gap:.2%}).\nProved over: {certificate.space}.\n"
    )


def _summary(plan: Plan) -> str:
    return (
        f"Step: {format_seconds(plan.step_seconds)} predicted for {plan.num_microbatches} microbatches of "
        f"{plan.microbatch_size}, {plan.schedule}; devices wait {plan.bubble:.0%} of it.\n"
        f"{_proof(plan)}"
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
    return sum(len(stage.devices) for stage in plan.stages)
