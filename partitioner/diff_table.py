"""What changed between two plans, as tables for the terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpart.partitioner.diff import BytesChange, Decision, Move, PlanDiff, SecondsChange, StageDiff
from dpart.partitioner.units import format_bytes, format_seconds

_MOST_LAYERS = 3


def diff_table(diff: PlanDiff, before: str, after: str) -> RenderableType:
    """Everything that changed; a console prints it.

    Args:
        before: What to call the first plan.
        after: And the second.
    """
    parts: list[RenderableType] = []
    if not diff.same_model:
        parts.append(
            Text("Note: the plans are for different models; layers of the same name are taken to be the same.")
        )
    if diff.is_same:
        return Group(*parts, Text(f"{diff.model}: {before} and {after} decide and predict the same."))
    parts.append(_plan(diff, before, after))
    if diff.moves:
        parts += [Text(), _moves(diff.moves)]
    elif diff.same_model:
        parts += [Text(), Text("Every layer stands where it stood.")]
    if any(not stage.is_same for stage in diff.stages):
        parts += [Text(), _stages(diff)]
    return Group(*parts)


def _plan(diff: PlanDiff, before: str, after: str) -> Table:
    table = _table(f"{diff.model}: from {before} to {after}")
    table.add_column("")
    for column in (before, after, "change"):
        table.add_column(escape(column), justify="right", overflow="fold")
    for row in _rows(diff.decisions, diff.seconds, diff.memory):
        table.add_row(*row)
    return table


def _moves(moves: tuple[Move, ...]) -> Table:
    table = _table("Layers that moved")
    table.add_column("layers", overflow="fold")
    table.add_column("number", justify="right")
    table.add_column("from stage", justify="right")
    table.add_column("to stage", justify="right")
    for move in moves:
        names = move.layers
        text = ", ".join(names) if len(names) <= _MOST_LAYERS else f"{names[0]} to {names[-1]}"
        table.add_row(escape(text), str(len(names)), _number(move.source), _number(move.target))
    return table


def _stages(diff: PlanDiff) -> Table:
    table = _table("Stages")
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right", overflow="fold")
    for stage in diff.stages:
        if stage.is_same:
            continue
        head = _head(stage)
        if stage.before is None or stage.after is None:
            table.add_row(*head, "new" if stage.before is None else "gone", "", "", "")
        for row in _rows(stage.decisions, stage.seconds, stage.memory):
            table.add_row(*head, *row)
            head = ("", "")
    return table


def _head(stage: StageDiff) -> tuple[str, str]:
    numbers = [str(n) for n in (stage.before, stage.after) if n is not None]
    layers = [stage.num_layers_before] * (stage.before is not None) + [stage.num_layers_after] * (
        stage.after is not None
    )
    return " -> ".join(dict.fromkeys(numbers)), " -> ".join(dict.fromkeys(map(str, layers)))


def _rows(
    decisions: tuple[Decision, ...], seconds: tuple[SecondsChange, ...], memory: tuple[BytesChange, ...]
) -> list[tuple[str, str, str, str]]:
    rows = [(d.what, escape(d.before), escape(d.after), "") for d in decisions]
    for s in seconds:
        texts = format_seconds(s.before_seconds), format_seconds(s.after_seconds)
        rows.append((s.what, *texts, _change(s.before_seconds, s.after_seconds)))
    for b in memory:
        texts = format_bytes(b.before_bytes), format_bytes(b.after_bytes)
        rows.append((f"{b.what} memory", *texts, _change(b.before_bytes, b.after_bytes)))
    return rows


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""


def _number(stage: int | None) -> str:
    return "-" if stage is None else str(stage)


def _table(title: str) -> Table:
    return Table(
        title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
