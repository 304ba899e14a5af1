"""An explanation as tables for the terminal, each with the sentence that sums it up."""

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpart.partitioner.answers import (
    BandwidthRange,
    Binding,
    Curve,
    CurvePoint,
    Explanation,
    Robustness,
    Sensitivity,
    ShadowPrices,
)
from dpart.partitioner.units import format_bandwidth, format_bytes, format_seconds

_MILLION = 1e6


def explanation_table(explanation: Explanation) -> RenderableType:
    """Everything that was answered; a console prints it."""
    e = explanation
    parts: list[RenderableType] = [
        Text(f"{e.model}: {e.stages}; {format_seconds(e.step_seconds)} a step.\nTopology: {e.topology}.")
    ]
    if e.curve is not None:
        parts += [Text(), _curve(e.curve), *_fewest(e.curve)]
    if e.prices is not None:
        parts += [Text(), _prices(e.prices, e.step_seconds), Text(_binding(e.prices.binding, e.step_seconds))]
    if e.sensitivity is not None:
        parts += [Text(), _ranges(e.sensitivity), Text(_robust(e.sensitivity.robustness))]
    return Group(*parts)


def _curve(curve: Curve) -> Table:
    table = _table("Step time by number of devices")
    has_prices = any(point.dollars_per_sample is not None for point in curve.points)
    for column in ("devices", "used", "step", "objective", "bound", "samples/s", *(["$/M samples"] * has_prices)):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for point in curve.points:
        table.add_row(*_point(point, curve.batch_size, has_prices))
    return table


def _point(point: CurvePoint, batch_size: int, has_prices: bool) -> list[str]:
    step, dollars = point.step_seconds, point.dollars_per_sample
    if step is None:
        return [str(point.num_devices), *("-" for _ in range(5 + has_prices)), escape(_in_short(point.note))]
    cost = [_dollars(dollars)] if has_prices else []
    plan = f"{point.stages} ({point.note})" if point.note else point.stages
    return [
        str(point.num_devices),
        str(point.used_devices),
        format_seconds(step),
        _seconds(point.objective_seconds),
        _seconds(point.lower_bound_seconds),
        f"{batch_size / step:.4g}" if step else "-",
        *cost,
        escape(plan),
    ]


def _fewest(curve: Curve) -> list[RenderableType]:
    if curve.target_step_seconds is None:
        return []
    target = format_seconds(curve.target_step_seconds)
    if curve.fewest is None:
        fastest = min(p.step_seconds for p in curve.points if p.step_seconds is not None)
        return [Text(f"No number of devices reaches {target} a step: the fastest is {format_seconds(fastest)}.")]
    step = format_seconds(curve.fewest.step_seconds or 0.0)
    return [Text(f"{curve.fewest.num_devices} devices are the fewest found for {target} a step: {step}.")]


def _prices(prices: ShadowPrices, step_seconds: float) -> Table:
    table = _table("What a little more would save")
    table.add_column("with", overflow="fold")
    for column in ("step", "saved", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for price in prices.prices:
        share = price.saved_seconds / step_seconds if step_seconds else 0.0
        table.add_row(
            escape(price.what),
            format_seconds(price.step_seconds),
            format_seconds(price.saved_seconds) if price.saved_seconds else "-",
            f"{share:.1%}" if price.saved_seconds else "-",
            "the same" if price.same_plan else price.stages,
        )
    return table


def _binding(binding: Binding, step_seconds: float) -> str:
    b = binding
    parts = [f"computing {format_seconds(b.compute_seconds)}"]
    if b.all_reduce_seconds:
        parts.append(f"all-reduce {format_seconds(b.all_reduce_seconds)}")
    limit = b.memory_limit_bytes
    fullest = f"Stage {b.fullest_stage} is the fullest, with {format_bytes(b.fullest_bytes)} of {format_bytes(limit)}"
    if b.unlimited_step_seconds < step_seconds * (1 - 1e-6):
        saved = format_seconds(step_seconds - b.unlimited_step_seconds)
        memory = f"memory binds: without a limit the step would be {saved} shorter."
    else:
        memory = "memory does not bind."
    return (
        f"Bottleneck: stage {b.stage}, by {b.resource}: {format_seconds(b.stage_seconds)} a microbatch "
        f"({', '.join(parts)}).\n{fullest}; {memory}"
    )


def _ranges(sensitivity: Sensitivity) -> Table:
    table = _table("Bandwidths over which the plan stays the best")
    table.add_column("level")
    for column in ("bandwidth", "from", "to"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("below", overflow="fold")
    table.add_column("above", overflow="fold")
    for found in sensitivity.bandwidths:
        table.add_row(
            escape(found.level),
            format_bandwidth(found.bandwidth_bytes_per_second),
            *_ends(found),
            escape(found.below or "the same"),
            escape(found.above or "the same"),
        )
    return table


def _ends(found: BandwidthRange) -> tuple[str, str]:
    """The ends; those of the range tried are marked, as the plan may win beyond them."""
    low, high = format_bandwidth(found.low_bytes_per_second), format_bandwidth(found.high_bytes_per_second)
    return low if found.below else f"<= {low}", high if found.above else f">= {high}"


def _robust(found: Robustness) -> str:
    lost = f"keeping it loses {found.worst_loss:.2%} at worst, {found.mean_loss:.2%} on average"
    return (
        f"With the times of layers wrong by {found.relative_error:.0%}, the plan stays the best in "
        f"{found.same_share:.0%} of {found.draws} draws; {lost}."
    )


def _dollars(per_sample: float | None) -> str:
    """Of a million samples."""
    if per_sample is None:
        return "-"
    dollars = per_sample * _MILLION
    return f"{dollars:,.0f}" if dollars >= 100 else f"{dollars:.3g}"


def _seconds(seconds: float | None) -> str:
    return format_seconds(seconds) if seconds is not None else "-"


def _in_short(text: str) -> str:
    """The first clause: what it is, without by how much and what to do."""
    return text.split(". ")[0].partition(":")[0].rstrip(".")


def _table(title: str) -> Table:
    return Table(
        title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
