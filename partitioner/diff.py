"""`diff`: what changed from one plan of a model to another: which layers moved, what the stages do otherwise, and
what is predicted of it.

Stages have numbers, and a stage that is split shifts the numbers of all behind it. So the stages of the two plans
are matched first, in order, such that as many layers as possible stand in matched stages; a layer has moved if its
stage is not the match of the one where it stood::

    a:  0: l0 l1 l2   1: l3 l4 l5           0 = 0, 1 = 2, stage 1 of b is new
    b:  0: l0 l1      1: l2 l3   2: l4 l5   moved: l2 (0 to 1), l3 (1 to 1, new)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Literal

from dpart.partitioner.plan import Plan, Stage, StageMemory
from dpart.partitioner.units import format_bytes
from dpart.runtime.errors import UserError


@dataclass(frozen=True)
class Move:
    """Layers, one after another in the first plan, that stand in another stage in the second.

    Attributes:
        source: Number of their stage in the first plan; None if the first plan has no such layer.
        target: In the second.
    """

    layers: tuple[str, ...]
    source: int | None
    target: int | None


@dataclass(frozen=True)
class Decision:
    """Something that was decided, or asked for, and is different; as texts."""

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class SecondsChange:
    """A predicted time that is different."""

    what: str
    before_seconds: float
    after_seconds: float


@dataclass(frozen=True)
class BytesChange:
    """A predicted number of bytes that is different."""

    what: str
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class StageDiff:
    """A pair of matched stages, or a stage that has no match.

    Attributes:
        before: Number in the first plan; None for a new stage.
        after: Number in the second; None for a stage that is gone.
        num_layers_before: Layers of the stage in the first plan.
        num_layers_after: In the second.
        decisions: Replicas, tensor-parallel degree, sharding, recomputation, devices; none without a match.
        seconds: Forward, backward, receive, all-reduce; none without a match.
        memory: On each device, by what it is for, and in all; none without a match.
    """

    before: int | None
    after: int | None
    num_layers_before: int
    num_layers_after: int
    decisions: tuple[Decision, ...]
    seconds: tuple[SecondsChange, ...]
    memory: tuple[BytesChange, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing about the stage changed."""
        matched = self.before is not None and self.after is not None
        return matched and not (self.decisions or self.seconds or self.memory)


@dataclass(frozen=True)
class PlanDiff:
    """What changed from one plan to another.

    Attributes:
        same_model: Whether the plans are for graphs of the same fingerprint.
        decisions: Of the plan as a whole: schedule, microbatches, topology, what was asked for.
        seconds: Of the step.
        memory: Of the fullest device.
        moves: In the order of the first plan's layers; new layers last.
        stages: In the order of the second plan; those that are gone where they stood.
    """

    format: Literal["dpart.diff"]
    version: Literal[1]
    model: str
    same_model: bool
    decisions: tuple[Decision, ...]
    seconds: tuple[SecondsChange, ...]
    memory: tuple[BytesChange, ...]
    moves: tuple[Move, ...]
    stages: tuple[StageDiff, ...]

    @property
    def is_same(self) -> bool:
        """Whether the plans decide and predict the same."""
        changed = self.decisions or self.seconds or self.memory or self.moves
        return self.same_model and not changed and all(stage.is_same for stage in self.stages)


def diff(before: Plan, after: Plan) -> PlanDiff:
    """What changed from one plan to another of the same model, or of one that has some of the same layers.

    Raises:
        UserError: The plans have no layer in common.
    """
    pairs = match_stages(before.stages, after.stages)
    peaks = [max((s.memory.total_bytes for s in plan.stages), default=0) for plan in (before, after)]
    return PlanDiff(
        format="dpart.diff",
        version=1,
        model=after.model,
        same_model=before.fingerprint == after.fingerprint,
        decisions=_decisions(_PLAN, before, after),
        seconds=_seconds(_PLAN_SECONDS, before, after),
        memory=(BytesChange("fullest device", *peaks),) if peaks[0] != peaks[1] else (),
        moves=_moves(before.stages, after.stages, pairs),
        stages=_stages(before.stages, after.stages, pairs),
    )


def match_stages(before: Sequence[Stage], after: Sequence[Stage]) -> dict[int, int]:
    """Which stage of the first plan is which of the second, in order, for the most layers in matched stages.

    Raises:
        UserError: The plans have no layer in common.
    """
    shared = [[len(set(a.layers) & set(b.layers)) for b in after] for a in before]
    if not any(map(any, shared)):
        raise UserError("The two plans have no layer in common: they are for different models.")
    rows, columns = len(before), len(after)
    best = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], shared[i][j] + best[i + 1][j + 1])
    pairs, i, j = {}, 0, 0
    while i < rows and j < columns:
        if shared[i][j] and best[i][j] == shared[i][j] + best[i + 1][j + 1]:
            pairs[i] = j
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _moves(before: Sequence[Stage], after: Sequence[Stage], pairs: dict[int, int]) -> tuple[Move, ...]:
    source = {name: s for s, stage in enumerate(before) for name in stage.layers}
    target = {name: s for s, stage in enumerate(after) for name in stage.layers}
    ways = [(name, source.get(name), target.get(name)) for name in dict.fromkeys([*source, *target])]
    moves = []
    for (s, t), run in groupby(ways, key=lambda way: way[1:]):
        if s is None or pairs.get(s, -1) != t:
            moves.append(Move(tuple(name for name, _, _ in run), s, t))
    return tuple(moves)


def _stages(before: Sequence[Stage], after: Sequence[Stage], pairs: dict[int, int]) -> tuple[StageDiff, ...]:
    origin = {t: s for s, t in pairs.items()}
    found, gone = [], [s for s in range(len(before)) if s not in pairs]
    for t, stage in enumerate(after):
        s = origin.get(t)
        if s is None:
            found.append(StageDiff(None, t, 0, len(stage.layers), (), (), ()))
            continue
        while gone and gone[0] < s:
            found.append(_gone(before, gone.pop(0)))
        old = before[s]
        found.append(
            StageDiff(
                s,
                t,
                len(old.layers),
                len(stage.layers),
                _decisions(_STAGE, old, stage),
                _seconds(_STAGE_SECONDS, old, stage),
                _bytes(old.memory, stage.memory),
            )
        )
    return (*found, *(_gone(before, s) for s in gone))


def _gone(before: Sequence[Stage], s: int) -> StageDiff:
    return StageDiff(s, None, len(before[s].layers), 0, (), (), ())


def _decisions(fields_: "Sequence[tuple[str, Callable[..., str]]]", old: object, new: object) -> tuple[Decision, ...]:
    texts = ((what, text(old), text(new)) for what, text in fields_)
    return tuple(Decision(*row) for row in texts if row[1] != row[2])


def _seconds(names: Sequence[tuple[str, str]], old: object, new: object) -> tuple[SecondsChange, ...]:
    rows = ((what, getattr(old, name), getattr(new, name)) for what, name in names)
    return tuple(SecondsChange(*row) for row in rows if row[1] != row[2])


def _bytes(old: StageMemory, new: StageMemory) -> tuple[BytesChange, ...]:
    names = [(f.name.removesuffix("_bytes"), f.name) for f in fields(StageMemory)]
    rows = ((what, getattr(old, name), getattr(new, name)) for what, name in [*names, ("total", "total_bytes")])
    return tuple(BytesChange(*row) for row in rows if row[1] != row[2])


def _devices(stage: Stage) -> str:
    row = stage.devices
    if len(row) > 2 and row == tuple(range(row[0], row[-1] + 1)):
        return f"{row[0]} to {row[-1]}"
    return ", ".join(map(str, row))


def _recomputed(stage: Stage) -> str:
    layers = [name for region in stage.recompute for name in region]
    if not layers:
        return "none"
    return "all layers" if set(layers) == set(stage.layers) else ", ".join(layers)


_PLAN: tuple[tuple[str, Callable[[Plan], str]], ...] = (
    ("stages", lambda p: str(len(p.stages))),
    ("devices used", lambda p: str(sum(len(s.devices) for s in p.stages))),
    ("schedule", lambda p: p.schedule),
    ("warm-up depth", lambda p: f"{p.warm_up_depth:g}"),
    ("microbatch size", lambda p: str(p.microbatch_size)),
    ("microbatches", lambda p: str(p.num_microbatches)),
    ("optimizer", lambda p: p.optimizer),
    ("method", lambda p: p.method),
    ("memory limit", lambda p: format_bytes(p.memory_limit_bytes)),
    ("topology", lambda p: p.topology),
)

_PLAN_SECONDS = (("step", "step_seconds"), ("bottleneck", "bottleneck_seconds"))

_STAGE: tuple[tuple[str, Callable[[Stage], str]], ...] = (
    ("replicas", lambda s: str(s.num_replicas)),
    ("tensor parallel", lambda s: str(s.tensor_parallel_degree)),
    ("splits", lambda s: ", ".join(sorted({f"{split.split}" for split in s.splits})) or "none"),
    ("ZeRO", lambda s: str(s.optimizer_sharding)),
    ("recomputed", _recomputed),
    ("devices", _devices),
    ("in flight", lambda s: str(s.in_flight)),
)

_STAGE_SECONDS = (
    ("forward", "forward_seconds"),
    ("backward", "backward_seconds"),
    ("receive", "receive_seconds"),
    ("all-reduce", "all_reduce_seconds"),
)
