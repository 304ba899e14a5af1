"""Piper (Tarnawski et al., NeurIPS 2021) as a problem of the least bottleneck, to the last of its conventions.

Seconds per microbatch of a stage with d replicas, N microbatches a batch, bandwidth B: compute / d, plus twice the
bytes of every edge that crosses its boundary / (d B), plus 4 (d - 1) / (d N B) of its parameters. Everything is
added, and an edge is charged to both stages it joins. Replicas divide the batch, and there are no more of them in
all than it has microbatches. A stage holds the stashes of ceil((its replicas and all behind it) / d) microbatches;
which of its layers recompute is in `peers_piper_recompute.py`.
"""

from dataclasses import dataclass

import numpy as np
from peers_piper_graph import Integers, LayerGraph, Variants, Vector
from peers_piper_recompute import (
    Stages,
    Steps,
    exact_steps,
    exactly_recomputing,
    recompute_steps,
    recomputing,
)

from dpart.partitioner.fewest import Bottleneck
from dpart.partitioner.options import UNLIMITED, Options


@dataclass(frozen=True)
class Setting:
    """What Piper's program is told.

    Attributes:
        num_devices: At most so many are used.
        num_microbatches: In a batch.
        memory_bytes: Of a device.
        bytes_per_second: Between devices.
        exact_recompute: Not by Piper's rule but by the best choice, where that can be found for all stages.
    """

    num_devices: int
    num_microbatches: int
    memory_bytes: float
    bytes_per_second: float
    exact_recompute: bool = False

    @property
    def max_replicas(self) -> int:
        """Of all stages together."""
        return min(self.num_microbatches, self.num_devices)

    def divisors(self) -> Integers:
        """Replicas that a stage may have."""
        counts = range(1, self.max_replicas + 1)
        return np.array([d for d in counts if self.num_microbatches % d == 0], np.int64)


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan: ids of its layers and of those that recompute, replicas, tensor-parallel degree."""

    layers: tuple[int, ...]
    recomputing: tuple[int, ...]
    replicas: int
    degree: int
    seconds: float


@dataclass(frozen=True)
class _Rows:
    """Stages at one degree.

    Attributes:
        stage: Of each row, ascending.
        reduce_seconds: All-reduce with infinitely many replicas.
        num_steps: In the two arrays that follow.
        in_flight: The most microbatches that fit.
        seconds: Compute and transfers on one replica.
    """

    stage: Integers
    reduce_seconds: Vector
    num_steps: Integers
    in_flight: Integers
    seconds: Vector


class PiperProblem:
    """Stages of a set of ideals, every degree, number of replicas and step of recomputing.

    A *row* is a stage at one degree, a *use* a row with a number of replicas.

    Attributes:
        num_devices: A plan may use.
        exact: Whether recomputing is by the best choice.
    """

    def __init__(self, graph: LayerGraph, setting: Setting, stages: Stages):
        """Derive every row's seconds and steps."""
        self.num_devices = setting.num_devices
        self._graph, self._setting, self._stages = graph, setting, stages
        memory_bytes = setting.memory_bytes
        best = [exact_steps(v, stages, memory_bytes) for v in graph.variants] if setting.exact_recompute else [None]
        steps = [some for some in best if some is not None]
        self.exact = len(steps) == len(graph.variants)
        if not self.exact:
            steps = [recompute_steps(v, graph.place, stages, memory_bytes) for v in graph.variants]
        parts = [self._rows(*pair) for pair in zip(graph.variants, steps, strict=True)]
        self._stage = np.concatenate([part.stage for part in parts])
        self._degree = np.repeat(np.arange(len(parts)), [len(part.stage) for part in parts])
        self._first = np.cumsum(np.concatenate([[0], *(part.num_steps for part in parts)]))
        self._in_flight = np.concatenate([part.in_flight for part in parts])
        self._step_seconds = np.concatenate([part.seconds for part in parts])
        divisors = setting.divisors()
        degrees = np.array(graph.degrees, np.int64)[self._degree]
        self._row, column = np.nonzero(degrees[:, None] * divisors[None, :] <= stages.room[self._stage][:, None])
        self._replicas = divisors[column]
        self._devices = degrees[self._row] * self._replicas
        self._most = stages.most[self._stage[self._row]]
        reduce = np.concatenate([part.reduce_seconds for part in parts])
        self._reduce = reduce[self._row] * (self._replicas - 1) / self._replicas

    def _rows(self, variants: Variants, steps: Steps) -> _Rows:
        setting = self._setting
        stage, counts = np.unique(steps.row, return_counts=True)
        some = self._stages.take(stage)
        seconds = some.total(variants.seconds)
        seconds += 2 * crossing_bytes(self._graph, variants, some) / setting.bytes_per_second
        reduce = 4 * some.total(variants.parameter_bytes) / setting.num_microbatches / setting.bytes_per_second
        return _Rows(stage, reduce, counts, steps.in_flight, np.repeat(seconds, counts) + steps.extra_seconds)

    def _seconds(self, step: Integers, use: Integers) -> Vector:
        return np.asarray(self._step_seconds[step] / self._replicas[use] + self._reduce[use], np.float64)

    def _steps_within(self, limit: float) -> tuple[Integers, Integers]:
        """Uses of which a step is within the limit, and the last such step, which has the most in flight."""
        use = np.flatnonzero(self._seconds(self._first[self._row], np.arange(len(self._row))) <= limit)
        low, high = self._first[self._row[use]], self._first[self._row[use] + 1] - 1
        while (unsure := np.flatnonzero(low < high)).size:
            middle = (low[unsure] + high[unsure] + 1) // 2
            within = self._seconds(middle, use[unsure]) <= limit
            low[unsure] = np.where(within, middle, low[unsure])
            high[unsure] = np.where(within, high[unsure], middle - 1)
        return use, low

    def options(self, limit_seconds: float) -> Options:
        """Per row the numbers of replicas of which each fits more replicas behind it than all smaller ones."""
        use, step = self._steps_within(limit_seconds)
        most, in_flight, row = self._setting.max_replicas, self._in_flight[step], self._row[use]
        unlimited = in_flight >= self._most[use]
        behind = np.where(unlimited, most, np.minimum(most, (in_flight - 1) * self._replicas[use]))
        key = row * (most + 1) + behind
        better = np.ones(len(use), np.bool_)
        better[1:] = (key[1:] > np.maximum.accumulate(key)[:-1]) | (row[1:] != row[:-1])
        use, step = use[better], step[better]
        stage = self._stage[self._row[use]]
        return Options(
            num_states=len(self._stages.member),
            start=self._stages.start[stage],
            stop=self._stages.stop[stage],
            replicas=self._replicas[use],
            devices=self._devices[use],
            max_in_flight=np.where(unlimited, UNLIMITED, in_flight)[better],
            busy_seconds=self._seconds(step, use),
            latency_seconds=np.zeros(len(use)),
            variant=self._degree[self._row[use]],
        )

    def busy_between(self, above: float, below: float) -> Vector:
        """Seconds of all steps of all uses strictly between."""
        use, last = self._steps_within(float(np.nextafter(below, 0)))
        begin = self._first[self._row[use]]
        lower, step = self._steps_within(above)
        begin[np.searchsorted(use, lower)] = step + 1
        counts = last - begin + 1
        steps = np.arange(counts.sum()) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
        return np.unique(self._seconds(steps, np.repeat(use, counts)))

    def stage_plans(self, found: Bottleneck) -> tuple[StagePlan, ...]:
        """What recomputes, given what is in flight, and what each stage takes."""
        plans: list[StagePlan] = []
        behind = 0
        for option in reversed(found.path.chosen):
            behind += int(found.options.replicas[option])
            plans.insert(0, self._stage_plan(found.options, option, behind))
        return tuple(plans)

    def _stage_plan(self, options: Options, option: int, replicas_and_behind: int) -> StagePlan:
        replicas, degree = int(options.replicas[option]), int(options.variant[option])
        variants, bandwidth = self._graph.variants[degree], self._setting.bytes_per_second
        ideals, none = self._stages.member, np.zeros(1, np.int64)
        stage = Stages(ideals, options.start[[option]], options.stop[[option]], none, none)
        layers = np.flatnonzero(stage.layers(none)[0])
        # The rule may be faster for more in flight than for less.
        counts = {-(-replicas_and_behind // replicas), int(options.max_in_flight[option])} - {UNLIMITED}
        recompute = min(
            (self._recomputing(variants, layers, count) for count in sorted(counts)),
            key=lambda some: float(variants.extra_seconds[some].sum()),
        )
        seconds = float(variants.seconds[layers].sum() + variants.extra_seconds[recompute].sum())
        seconds += 2 * float(crossing_bytes(self._graph, variants, stage)[0]) / bandwidth
        reduce = 4 * (replicas - 1) * float(variants.parameter_bytes[layers].sum())
        reduce /= replicas * self._setting.num_microbatches * bandwidth
        ids = np.array(self._graph.ids)
        names = tuple(ids[layers].tolist()), tuple(ids[recompute].tolist())
        return StagePlan(*names, replicas, self._graph.degrees[degree], seconds / replicas + reduce)

    def _recomputing(self, variants: Variants, layers: Integers, in_flight: int) -> Integers:
        if self.exact:
            return exactly_recomputing(variants, layers, self._setting.memory_bytes, in_flight)
        return recomputing(variants, self._graph.place, layers, self._setting.memory_bytes, in_flight)


def crossing_bytes(graph: LayerGraph, variants: Variants, stages: Stages) -> Vector:
    """[P]: bytes over edges that enter a stage, counted as its own, and over those that leave it."""
    starts, start = np.unique(stages.start, return_inverse=True)
    stops, stop = np.unique(stages.stop, return_inverse=True)
    tail, head = stages.member[:, graph.tail], stages.member[:, graph.head]
    head_in_stop = head[stops].astype(np.float64).T
    # Over edges whose tail is before the stage: their head in the stage, or (already counted as leaving) behind it.
    bytes_ = ((tail & ~head) @ variants.leaving_bytes)[stages.stop] - (head @ variants.entering_bytes)[stages.start]
    order = np.argsort(start, kind="stable")
    for begin in range(0, len(starts), 256):
        block = tail[starts[begin : begin + 256]].astype(np.float64)
        across = (block * (variants.entering_bytes + variants.leaving_bytes)) @ head_in_stop
        across -= (block @ variants.leaving_bytes)[:, None]
        some = order[slice(*np.searchsorted(start[order], [begin, begin + 256]))]
        bytes_[some] += across[start[some] - begin, stop[some]]
    return np.asarray(bytes_, np.float64)
