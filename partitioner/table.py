"""The plan as tables for the terminal: its stages, the plans it beat, what to know about it."""

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpart.partitioner.certify import Check
from dpart.partitioner.plan import Alternative, Plan, Stage
from dpart.partitioner.units import format_bytes, format_seconds

_LAYERS_WIDTH = 20
_MOST_ROWS = 12
"""Of the first and of the last stages."""


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
    table = _table("")
    for column in ("what", "stated", "found"):
        table.add_column(column, overflow="fold")
    for check in faults:
        table.add_row(escape(check.what), check.stated, check.found)
    title = f"The certificate does not hold: {len(faults)} of {len(checks)} checks fail"
    return Group(Text(title, style="bold"), table)


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
    """A row a stage, with a column for every decision that some stage makes; of many stages the first and last ones."""
    stages = plan.stages
    columns: list[tuple[str, bool, Callable[[Stage], str]]] = [
        ("replicas", True, lambda s: str(s.num_replicas)),
        ("tensor\nparallel", any(s.tensor_parallel_degree > 1 for s in stages),
         lambda s: str(s.tensor_parallel_degree)),
        ("devices", True, lambda s: _range(s.devices)),
        ("recom-\nputed", any(s.recompute for s in stages), _recomputed),
        ("ZeRO", any(s.optimizer_sharding for s in stages), lambda s: str(s.optimizer_sharding or "-")),
        ("forward", True, lambda s: format_seconds(s.forward_seconds)),
        ("backward", True, lambda s: format_seconds(s.backward_seconds)),
        ("receive", True, lambda s: format_seconds(s.receive_seconds) if s.receive_seconds else "-"),
        ("all-\nreduce", any(s.all_reduce_seconds for s in stages),
         lambda s: format_seconds(s.all_reduce_seconds) if s.all_reduce_seconds else "-"),
        ("in\nflight", True, lambda s: str(s.in_flight)),
        ("memory", True, lambda s: _memory(s, plan)),
    ]  # fmt: skip
    shown = [(name, cell) for name, wanted, cell in columns if wanted]
    table = _table(f"{plan.model}: {len(stages)} stage(s) on {_used(plan)} of {plan.num_devices} devices")
    table.add_column("stage", justify="right")
    table.add_column("layers", overflow="fold", min_width=_LAYERS_WIDTH)
    for name, _ in shown:
        table.add_column(name, justify="right", no_wrap=name != "devices", overflow="fold")
    for s, stage in enumerate(stages):
        if len(stages) <= 2 * _MOST_ROWS or s < _MOST_ROWS or s >= len(stages) - _MOST_ROWS:
            table.add_row(str(s), escape(_layers(stage)), *(cell(stage) for _, cell in shown))
        elif s == _MOST_ROWS:
            table.add_row("...", f"{len(stages) - 2 * _MOST_ROWS} more in the file")
    return table


def _recomputed(stage: Stage) -> str:
    layers = sum(len(region) for region in stage.recompute)
    return f"{layers / len(stage.layers):.0%}" if layers else "-"


def _memory(stage: Stage, plan: Plan) -> str:
    peak = stage.memory.total_bytes
    return f"{format_bytes(peak)} ({peak / plan.limit_bytes(stage):.0%})"


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
        f"{plan.microbatch_size}, {_schedule(plan)}; devices wait {plan.bubble:.0%} of it.\n"
        f"{_proof(plan)}"
        f"Memory: {_limits(plan)} of each device may be used, with {plan.optimizer}.\n"
        f"Topology: {plan.topology}."
    )


def _schedule(plan: Plan) -> str:
    return (
        plan.schedule if plan.warm_up_depth == 1 else f"{plan.schedule} with {plan.warm_up_depth:g} times the warm-up"
    )


def _limits(plan: Plan) -> str:
    limits = plan.pool_limits_bytes or (plan.memory_limit_bytes,)
    return " or ".join(format_bytes(limit) for limit in dict.fromkeys(limits))


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
        title=escape(title) or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
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
