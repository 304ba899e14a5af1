"""One plan, exactly: its stages on their devices, its schedule played through, its bytes item by item.

The searchers compare plans by a bottleneck; here a plan that was found, or that a person asked for, gets the
numbers it is ranked and reported by.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise

import numpy as np

from dpart.compiler.graph import ModelGraph
from dpart.partitioner.cost import (
    Memory,
    Place,
    StageSeconds,
    Terms,
    best_place,
    forward_seconds,
    memory,
    sharing,
    stage_seconds,
    transfer_seconds,
)
from dpart.partitioner.placement import give_out
from dpart.partitioner.plan import LayerSplit, Stage, StageMemory
from dpart.partitioner.quantities import LayerCosts, Quantities, chains, measure, on_rank
from dpart.partitioner.search import Matrix
from dpart.partitioner.simulate import Flow, Link, StageTime, Timeline, simulate
from dpart.partitioner.topology import Level, Topology
from dpart.profiler.profile import Profile, SplitCost
from dpart.runtime.schedule import Replica, Schedule


@dataclass(frozen=True)
class StageShape:
    """Which layers a stage has, in execution order, on how many devices it runs, and how.

    Attributes:
        recompute: Sets of layers, each of which keeps only what enters it.
        pool: The kind of devices it stands on: their number among the topology's pools.
    """

    layers: tuple[str, ...]
    num_replicas: int
    degree: int = 1
    sharding: int = 0
    recompute: tuple[tuple[str, ...], ...] = ()
    pool: int = 0

    @property
    def num_devices(self) -> int:
        """Devices of the stage."""
        return self.num_replicas * self.degree


Shape = tuple[StageShape, ...]


def shape_of(stages: Sequence[Stage]) -> Shape:
    """What was decided of a plan's stages, without what it comes to."""
    return tuple(
        StageShape(s.layers, s.num_replicas, s.tensor_parallel_degree, s.optimizer_sharding, s.recompute, s.pool)
        for s in stages
    )


@dataclass(frozen=True)
class Evaluation:
    """A plan's numbers.

    Attributes:
        stage_seconds: Of each stage per microbatch; the largest is the bottleneck.
        objective_seconds: What the default search minimises.
        short_bytes: By how much the fullest device exceeds its memory; 0 where all fit.
        busy_seconds: The most a device is busy in a step, at least: no schedule is faster.
    """

    stages: tuple[Stage, ...]
    flows: tuple[Flow, ...]
    stage_seconds: tuple[float, ...]
    objective_seconds: float
    short_bytes: int
    busy_seconds: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(stage.num_replicas for stage in self.stages)

    @property
    def num_devices(self) -> int:
        """Devices the plan uses."""
        return sum(len(stage.devices) for stage in self.stages)

    @property
    def bottleneck_seconds(self) -> float:
        """The largest stage time, seconds per microbatch."""
        return max(self.stage_seconds)


@dataclass(frozen=True)
class _Again:
    """What a stage computes again: seconds and saved bytes per microbatch, and the room its largest region takes."""

    seconds: float
    saved_bytes: float
    room_bytes: float


class Evaluator:
    """Evaluates plans of one model on one topology under one set of terms."""

    def __init__(self, profile: Profile, topology: Topology, terms: Terms, last_microbatch: float) -> None:
        """
        Args:
            last_microbatch: Rows of the last microbatch as a share of a full one.
        """
        self.profile, self.topology, self.terms = profile, topology, terms
        self.last_microbatch = last_microbatch
        self._chains = chains(profile.graph)
        self._pools = [topology.alone(p) for p in range(len(topology.pools))]

    def schedule(self, shape: Shape) -> Schedule:
        """The schedule that the plan's workers follow."""
        return self.terms.schedule_of([stage.num_replicas for stage in shape], self.terms.num_microbatches)

    def packs(self, shape: Shape) -> bool:
        """Whether the devices have room for the tensor-parallel groups of all stages."""
        return self._devices(shape) is not None

    def evaluate(self, shape: Shape) -> Evaluation:
        """Everything but the time of the step.

        Args:
            shape: Covers every layer exactly once, stages in an order in which they can run.
        """
        check_coverage(self.profile.graph, shape)
        devices = self._devices(shape)
        if devices is None:
            raise ValueError("The tensor-parallel groups of these stages do not pack into the hosts.")
        in_flight = self._in_flight(shape)
        flows = self._flows(shape)
        quantities = {t: self._quantities(shape, t) for t in {stage.degree for stage in shape}}
        costs = [
            self._stage(shape[s], _one(quantities[shape[s].degree], s), self._place(s, shape, flows, devices), held)
            for s, held in enumerate(in_flight)
        ]
        stages = tuple(
            Stage(
                layers=stage.layers,
                num_replicas=stage.num_replicas,
                devices=devices[s],
                forward_seconds=float(seconds.forward_seconds[0]),
                backward_seconds=float(seconds.backward_seconds[0]),
                weight_backward_seconds=float(seconds.weight_backward_seconds[0]),
                receive_seconds=self._receive_seconds(s, flows, devices),
                all_reduce_seconds=float(seconds.all_reduce_seconds[0]),
                in_flight=in_flight[s],
                memory=StageMemory(**{f.name: math.ceil(_first(getattr(parts, f.name)) - 0.5) for f in fields(parts)}),
                tensor_parallel_degree=stage.degree,
                splits=self._splits(stage),
                recompute=stage.recompute,
                optimizer_sharding=stage.sharding,
                pool=stage.pool,
            )
            for s, (stage, (seconds, parts)) in enumerate(zip(shape, costs, strict=True))
        )
        busy = [
            float(seconds.busy_seconds(self.terms, stage.num_replicas)[0])
            for stage, (seconds, _) in zip(shape, costs, strict=True)
        ]
        limits = [self.terms.of_pool(stage.pool).memory_limit_bytes for stage in stages]
        short = max(stage.memory.total_bytes - limit for stage, limit in zip(stages, limits, strict=True))
        return Evaluation(
            stages=stages,
            flows=flows,
            stage_seconds=tuple(self._stage_seconds(s, stages, flows) for s in range(len(shape))),
            objective_seconds=max(busy) + sum(float(seconds.path_seconds(self.terms)[0]) for seconds, _ in costs),
            short_bytes=max(0, short),
            busy_seconds=max(self._busy_seconds(stage) for stage in stages),
        )

    def play(self, evaluation: Evaluation) -> Timeline:
        """The step of an evaluated plan, action by action.

        Where all stages have as many replicas, those of one round are alike, and one of each stage is played: the
        one that has as many microbatches as any.
        """
        replicas, m, last = evaluation.replicas, self.terms.num_microbatches, self.last_microbatch
        if len(set(replicas)) == 1:
            last = last if (m - 1) % replicas[0] == 0 else 1.0
            m, replicas = self.terms.own_microbatches(replicas[0]), (1,) * len(replicas)
        schedule = self.terms.schedule_of(replicas, m)

        @cache
        def between(source: int, target: int) -> Link:
            level = self.topology.level_of((source, target))
            return Link(level.latency_seconds, level.bandwidth_bytes_per_second)

        def link(source: Replica, target: Replica) -> Link:
            return between(*(_first_device(evaluation.stages[r.stage], r.index) for r in (source, target)))

        times = [
            StageTime(s.forward_seconds, s.backward_seconds, s.all_reduce_seconds, s.weight_backward_seconds)
            for s in evaluation.stages
        ]
        return simulate(
            schedule, times, evaluation.flows, link, last_microbatch=last, num_buckets=self.terms.reduce_buckets
        )

    def step_seconds(self, timeline: Timeline) -> float:
        """Of a played step; without a flush, of as many microbatches once the pipeline is full."""
        if self.terms.is_synchronous:
            return timeline.step_seconds
        last = max(action.microbatch for row in timeline.schedule.rows.values() for action in row)
        return (last + 1) * timeline.period_seconds

    def _stage(
        self, stage: StageShape, quantities: Quantities, place: Place, in_flight: int
    ) -> tuple[StageSeconds, Memory]:
        again = self._again(stage, place)
        # A crooked place may spread a ring more evenly over hosts. It is charged no less than a straight one, which
        # is what searches count with: so what they prove holds for every placement.
        straight = best_place(self._pools[stage.pool], stage.degree, stage.num_replicas)
        if self.topology.between is not None:
            straight = replace(straight, incoming=place.incoming)
        here, there = (
            stage_seconds(
                quantities,
                self.terms,
                self._pools[stage.pool].levels,
                each,
                num_replicas=stage.num_replicas,
                sharding=stage.sharding,
                device=self._pools[stage.pool].device,
                again_seconds=again.seconds,
            )
            for each in (place, straight)
        )
        seconds = StageSeconds(*(np.maximum(getattr(here, f.name), getattr(there, f.name)) for f in fields(here)))
        parts = memory(
            quantities,
            self.terms,
            in_flight,
            num_replicas=stage.num_replicas,
            sharding=stage.sharding,
            saved_bytes=again.saved_bytes,
            again_bytes=again.room_bytes,
        )
        return seconds, parts

    def _again(self, stage: StageShape, place: Place) -> "_Again":
        """What recomputation costs and saves: its regions' forwards, collectives included, and their stash."""
        if not stage.recompute:
            return _Again(0.0, 0.0, 0.0)
        graph = self.profile.graph
        seconds = saved = room = 0.0
        for region in stage.recompute:
            inside = set(region)
            costs = [on_rank(self.profile.cost[name], stage.degree) for name in region]
            read = dict.fromkeys(value for name in region for value in graph.layer[name].inputs)
            entering = (graph.value[value] for value in read)
            kept = sum(v.size_bytes for v in entering if v.producer is not None and v.producer not in inside)
            stash = float(sum(cost.stash_bytes for cost in costs))
            seconds += self._forward_seconds(costs, place, self._pools[stage.pool])
            saved += max(stash - kept, 0.0)
            room = max(room, stash)
        return _Again(seconds, saved, room)

    def _forward_seconds(self, costs: Sequence[SplitCost], place: Place, pool: Topology) -> float:
        columns = (np.array([float(getattr(c, f.name)) for c in costs]) for f in fields(LayerCosts))
        return float(forward_seconds(LayerCosts(*columns), pool.levels, place, pool.device).sum())

    def _devices(self, shape: Shape) -> tuple[tuple[int, ...], ...] | None:
        sizes = [(stage.num_replicas, stage.degree) for stage in shape]
        return give_out(sizes, self.topology, [stage.pool for stage in shape])

    def _in_flight(self, shape: Shape) -> list[int]:
        replicas = [stage.num_replicas for stage in shape]
        if self.terms.schedule == "zb-h1":
            schedule = self.schedule(shape)
            return [schedule.peak_in_flight(Replica(s, 0)) for s in range(len(shape))]
        return [self.terms.in_flight(r, sum(replicas[s + 1 :])) for s, r in enumerate(replicas)]

    def _place(self, s: int, shape: Shape, flows: Sequence[Flow], devices: Sequence[tuple[int, ...]]) -> Place:
        """Where a stage stands: what it receives comes over the slowest link to one of its sources."""
        degree, pool = shape[s].degree, self._pools[shape[s].pool]
        own = [device - self.topology.ranges[shape[s].pool].start for device in devices[s]]
        sources = [f.source for f in flows if f.target == s and (f.forward_bytes or f.backward_bytes)]
        ends = [d for stage in (s, *sources) for d in (min(devices[stage]), max(devices[stage]))]
        return Place(
            incoming=self.topology.level_of(ends),
            tensor_rings=pool.ring_sizes(own[:degree]),
            replica_rings=pool.ring_sizes(own[::degree]),
            sharing=sharing(pool, degree),
        )

    def _splits(self, stage: StageShape) -> tuple[LayerSplit, ...]:
        if stage.degree == 1:
            return ()
        return tuple(LayerSplit(name, on_rank(self.profile.cost[name], stage.degree).split) for name in stage.layers)

    def _quantities(self, shape: Shape, degree: int) -> Quantities:
        column = {layer.name: i for i, layer in enumerate(self.profile.graph.layers)}
        member = np.zeros((len(shape) + 1, len(column)), dtype=np.bool_)
        for s, stage in enumerate(shape):
            member[s + 1 :, [column[name] for name in stage.layers]] = True
        return measure(self.profile, member, degree).consecutive()

    def _flows(self, shape: Shape) -> tuple[Flow, ...]:
        """What each pair of stages exchanges: every chain goes from holder to holder, in stage order."""
        stage_of = {name: s for s, stage in enumerate(shape) for name in stage.layers}
        totals: dict[tuple[int, int], list[int]] = {}
        for chain in self._chains:
            row = sorted({stage_of[name] for name in chain.holders})
            for pair in pairwise(row):
                total = totals.setdefault(pair, [0, 0, 0])
                total[0] += chain.forward_bytes
                total[1] += chain.backward_bytes
                total[2] += chain.closing_bytes
        return tuple(Flow(*pair, *(size if size else None for size in total)) for pair, total in sorted(totals.items()))

    def _receive_seconds(self, s: int, flows: Sequence[Flow], devices: Sequence[tuple[int, ...]]) -> float:
        total = 0.0
        for flow in flows:
            if flow.target == s and flow.forward_bytes is not None:
                level = self.topology.level_of(devices[flow.source] + devices[s])
                total += level.latency_seconds + flow.forward_bytes / level.bandwidth_bytes_per_second
        return total

    def _stage_seconds(self, s: int, stages: Sequence[Stage], flows: Sequence[Flow]) -> float:
        """The stage formula of the cost model; stages exchange at the speed of the level that holds both."""
        stage, share = stages[s], self.terms.share(stages[s].num_replicas)
        compute = stage.forward_seconds + stage.backward_seconds
        seconds = share * compute + stage.all_reduce_seconds / self.terms.num_microbatches
        for here in ([f for f in flows if f.target == s], [f for f in flows if f.source == s]):
            seconds = max(seconds, share * self._transfer_seconds(here, stages))
        return seconds

    def _transfer_seconds(self, flows: Sequence[Flow], stages: Sequence[Stage]) -> float:
        """Per level all flows together, as messages to different stages share the worker's port."""
        by_level: dict[Level, list[Flow]] = {}
        for flow in flows:
            level = self.topology.level_of(stages[flow.source].devices + stages[flow.target].devices)
            by_level.setdefault(level, []).append(flow)
        total = 0.0
        for level, together in by_level.items():
            forward = np.array([sum(flow.forward_bytes or 0 for flow in together)], dtype=np.float64)
            backward = np.array([sum(flow.backward_bytes or 0 for flow in together)], dtype=np.float64)
            total += float(transfer_seconds(forward, backward, level)[0])
        return total

    def _busy_seconds(self, stage: Stage) -> float:
        """Of replica 0, which has as many microbatches as any; the last one counts by its rows if it is its."""
        compute = stage.forward_seconds + stage.backward_seconds
        m, r = self.terms.num_microbatches, stage.num_replicas
        last = self.last_microbatch if (m - 1) % r == 0 else 1.0
        exposed = stage.all_reduce_seconds if self.terms.is_synchronous and self.terms.reduce_buckets == 1 else 0.0
        return (math.ceil(m / r) - 1 + last) * compute + exposed


def check_coverage(graph: ModelGraph, shape: Shape) -> None:
    """Asserts that every layer stands in exactly one stage, and behind all the layers it reads from."""
    stage_of: dict[str, int] = {}
    for s, stage in enumerate(shape):
        assert stage.layers, f"stage {s} has no layers"
        for name in stage.layers:
            assert name not in stage_of, f"layer {name} stands in stages {stage_of[name]} and {s}"
            stage_of[name] = s
    lost = [layer.name for layer in graph.layers if layer.name not in stage_of]
    assert not lost, f"layers in no stage: {lost}"
    assert len(stage_of) == len(graph.layers), "a stage names a layer that the model has not"
    for value in graph.values:
        if value.producer is not None:
            for consumer in value.consumers:
                assert stage_of[value.producer] <= stage_of[consumer], f"{consumer} stands before {value.producer}"


def _one(quantities: Quantities, s: int) -> Quantities:
    return Quantities(*(getattr(quantities, f.name)[s : s + 1] for f in fields(quantities)))


def _first(value: "int | Matrix") -> float:
    return float(np.ravel(value)[0])


def _first_device(stage: Stage, replica: int) -> int:
    return stage.devices[replica * stage.tensor_parallel_degree]
