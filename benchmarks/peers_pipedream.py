"""PipeDream's released optimizer (msr-fiddle/pipedream, 2019) as a `Problem`, to the last of its conventions.

Our searcher must return its values on its own profiles. What differs from our cost model, and stays here:
all-reduce takes 4 (r - 1) / r of the parameters and is added to compute, then both are divided by the
replicas r; transfers count only where a compression ratio is given, and then hide behind compute; the stash
holds activations and parameters alike and the stage's own microbatch is not in it; all-reduce is divided by
the machines of the level below, in the first stage of a (sub-)pipeline only; differences of states that are
not nested pass as first stages.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from peers_pipedream_graph import StateTable, Vector, read_graph, tabulate_states

from dpart.partitioner import pipedream
from dpart.partitioner.search import Found, LevelStage, Matrix

MAX_STATES = 8000
"""Of which matrices are made: 512 MB each at this size."""

MAX_COUNTED_STATES = 300_000


@dataclass(frozen=True)
class Options:
    """The released program's flags.

    Attributes:
        machines: Per level, innermost first.
        bandwidths: Bytes per second, per level.
        memory_bytes: Of each machine; read only with `use_memory_constraint`.
    """

    machines: tuple[int, ...]
    bandwidths: tuple[float, ...]
    memory_bytes: float = 16e9
    straight_pipeline: bool = False
    use_memory_constraint: bool = False
    use_fewer_machines: bool = False
    activation_compression_ratio: float | None = None


@dataclass(frozen=True)
class Answer:
    """What the search found.

    Attributes:
        value: Seconds per minibatch; None where nothing fits or there are more than `MAX_STATES` states.
        states: Without the empty one, as the released program counts; None above `MAX_COUNTED_STATES`.
        seconds: From reading the file to the answer.
        levels: Stages per level, outermost first; `num_machines` are the replicas of the stage at that level.
        raw_seconds: Compute of each of them on one device, all-reduce and transfers apart.
    """

    value: float | None
    states: int | None
    seconds: float
    levels: tuple[tuple[LevelStage, ...], ...]
    raw_seconds: tuple[tuple[float, ...], ...]


def _between(total: Vector) -> Matrix:
    """[S, S] of what state j has more than state i."""
    return total[None, :] - total[:, None]


@dataclass(frozen=True)
class ReleasedProblem:
    """The released cost model. `num_machines` of a stage are slots: with `use_fewer_machines` some stay idle."""

    table: StateTable
    options: Options
    nested: npt.NDArray[np.bool_] = field(init=False)
    parameter_bytes: Matrix = field(init=False)
    stash_bytes: Matrix = field(init=False)
    machines: tuple[int, ...] = field(init=False)
    use_fewer: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Derive the matrices. `nested` is wider than inclusion: any later state will do for a first stage."""
        parameters = _between(self.table.parameter_bytes)
        object.__setattr__(self, "nested", ~np.tri(len(parameters), dtype=np.bool_))
        object.__setattr__(self, "parameter_bytes", parameters)
        object.__setattr__(self, "stash_bytes", parameters + _between(self.table.activation_bytes))
        object.__setattr__(self, "machines", self.options.machines)

    def compute_seconds(self) -> Matrix:
        """Seconds of one minibatch on one device."""
        return np.where(self.nested, _between(self.table.seconds), np.inf)

    def unsplit_seconds(self, level: int, num_machines: int, after: int, inner: Matrix) -> Matrix:
        """As a first stage: nothing comes in, and the level below shares the all-reduce."""
        return self._best_use(num_machines, after, lambda r, behind: self._unsplit(level, r, behind, inner), first=True)

    def stage_seconds(self, level: int, num_machines: int, after: int, inner: Matrix) -> Matrix:
        """As a later stage, which is charged its transfers on both sides."""
        return self._best_use(num_machines, after, lambda r, behind: self._stage(level, r, behind, inner), first=False)

    def _best_use(self, slots: int, after: int, cost: Callable[[int, int], Matrix], first: bool) -> Matrix:
        """With `use_fewer_machines`, the best number of replicas for the slots.

        Idle slots count as machines behind the stage, and a first stage of a single state never leaves any.
        """
        value = cost(slots, after)
        if self.options.use_fewer_machines:
            single = np.eye(len(value), k=1, dtype=np.bool_) if first else False
            for r in range(1, slots):
                value = np.minimum(value, np.where(single, np.inf, cost(r, after + slots - r)))
        return value

    def replicas(self, level: int, stage: LevelStage, inner: Matrix, first: bool) -> int:
        """How many of a stage's slots are used; on ties the fewest."""
        if not self.options.use_fewer_machines or (first and stage.stop == stage.start + 1):
            return stage.num_machines
        cost = self._unsplit if first else self._stage
        return min(
            range(1, stage.num_machines + 1),
            key=lambda r: cost(level, r, stage.after + stage.num_machines - r, inner)[stage.start, stage.stop],
        )

    def _unsplit(self, level: int, r: int, after: int, inner: Matrix) -> Matrix:
        reduce = 4 * (r - 1) * self.parameter_bytes / (self.options.bandwidths[level] * r)
        reduce /= self.machines[level - 1] if level else 1
        return self._within_limits((inner + reduce) / r, r, after)

    def _stage(self, level: int, r: int, after: int, inner: Matrix) -> Matrix:
        bandwidth, ratio = self.options.bandwidths[level], self.options.activation_compression_ratio
        value = (inner + 4 * (r - 1) * self.parameter_bytes / (bandwidth * r)) / r
        if ratio is not None:
            transfer = 2.0 * self.table.output_bytes / (bandwidth * r) / ratio
            outgoing = transfer.copy()
            outgoing[-1] = -np.inf
            value = np.maximum(value, np.maximum(transfer[:, None], outgoing[None, :]))
        return np.where(self.table.inside, self._within_limits(value, r, after), np.inf)

    def _within_limits(self, value: Matrix, r: int, after: int) -> Matrix:
        if self.options.straight_pipeline and r > 1:
            return np.full_like(value, np.inf)
        if self.options.use_memory_constraint:
            return np.where(math.ceil(after / r) * self.stash_bytes > self.options.memory_bytes, np.inf, value)
        return value


def optimize(path: str, options: Options) -> Answer:
    """Read a profile and find what the released program finds.

    Raises:
        GraphError: The file is no profile.
        OSError: It cannot be read.
    """
    began = time.perf_counter()
    with open(path, encoding="utf-8") as file:
        table = tabulate_states(read_graph(file.read()), MAX_STATES, MAX_COUNTED_STATES)
    if not isinstance(table, StateTable):
        return Answer(None, table, time.perf_counter() - began, (), ())
    problem = ReleasedProblem(table, options)
    found = pipedream.search(problem)
    seconds = time.perf_counter() - began
    num_states = len(table.seconds) - 1
    if found is None:
        return Answer(None, num_states, seconds, (), ())
    levels = _used(problem, found)
    raw = tuple(tuple(float(table.seconds[s.stop] - table.seconds[s.start]) for s in level) for level in levels)
    return Answer(found.bottleneck_seconds, num_states, seconds, levels, raw)


def _used(problem: ReleasedProblem, found: Found) -> tuple[tuple[LevelStage, ...], ...]:
    """The plan with idle slots taken out of the stages."""
    if not problem.options.use_fewer_machines:
        return found.levels
    inner = problem.compute_seconds()
    levels = []
    for level, stages in enumerate(reversed(found.levels)):
        heads = {stage.start for stage in found.levels[-level - 2]} if level + 1 < len(found.levels) else {0}
        used = (problem.replicas(level, stage, inner, stage.start in heads) for stage in stages)
        levels.append(tuple(LevelStage(s.start, s.stop, r, s.after) for s, r in zip(stages, used, strict=True)))
        if level + 1 < len(found.levels):
            inner = pipedream.solve_level(problem, level, inner)
    return tuple(reversed(levels))
