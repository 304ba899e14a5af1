"""One plan, exactly: its stages on their devices, its schedule played through, its bytes item by item.

The searchers compare plans by a bottleneck; here a plan that was found, or that a person asked for, gets the
numbers it is ranked and reported by. Devices are given out in order: stage 0 has the first ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dpart.compiler.graph import ModelGraph
from dpart.partitioner.cost import Terms, all_reduce_seconds, memory, transfer_seconds
from dpart.partitioner.plan import Stage, StageMemory
from dpart.partitioner.quantities import Quantities, chains, measure
from dpart.partitioner.simulate import Flow, Link, StageTime, Timeline, simulate
from dpart.partitioner.topology import Topology
from dpart.profiler.profile import Profile
from dpart.runtime.schedule import SCHEDULES, Replica, Schedule


@dataclass(frozen=True)
class StageShape:
    """Which layers a stage has, in execution order, and on how many devices it runs."""

    layers: tuple[str, ...]
    num_replicas: int


Shape = tuple[StageShape, ...]


@dataclass(frozen=True)
class Evaluation:
    """A plan's numbers.

    Attributes:
        stage_seconds: Of each stage per microbatch; the largest is the bottleneck.
        short_bytes: By how much the fullest device exceeds its memory; 0 where all fit.
        busy_seconds: The most a device computes in a step: no schedule is faster.
    """

    stages: tuple[Stage, ...]
    flows: tuple[Flow, ...]
    stage_seconds: tuple[float, ...]
    short_bytes: int
    busy_seconds: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(stage.num_replicas for stage in self.stages)

    @property
    def num_devices(self) -> int:
        """Devices the plan uses."""
        return sum(self.replicas)

    @property
    def bottleneck_seconds(self) -> float:
        """The largest stage time, seconds per microbatch."""
        return max(self.stage_seconds)


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

    def schedule(self, shape: Shape) -> Schedule:
        """The schedule that the plan's workers follow."""
        return SCHEDULES[self.terms.schedule]([stage.num_replicas for stage in shape], self.terms.num_microbatches)

    def evaluate(self, shape: Shape) -> Evaluation:
        """Everything but the time of the step.

        Args:
            shape: Covers every layer exactly once, stages in an order in which they can run.
        """
        check_coverage(self.profile.graph, shape)
        quantities = self._quantities(shape)
        schedule, devices = self.schedule(shape), _give_out(shape)
        in_flight = np.array([schedule.peak_in_flight(Replica(s, 0)) for s in range(len(shape))])
        parts = memory(quantities, self.terms, in_flight)
        flows = self._flows(shape)
        stages = tuple(
            Stage(
                layers=stage.layers,
                num_replicas=stage.num_replicas,
                devices=devices[s],
                forward_seconds=float(quantities.forward_seconds[s]),
                backward_seconds=float(quantities.backward_seconds[s]),
                receive_seconds=self._receive_seconds(s, flows, devices),
                all_reduce_seconds=self._all_reduce_seconds(quantities, s, devices[s]),
                in_flight=int(in_flight[s]),
                memory=StageMemory(
                    parameter_bytes=int(parts.parameter_bytes[s]),
                    gradient_bytes=int(parts.gradient_bytes[s]),
                    optimizer_bytes=int(parts.optimizer_bytes[s]),
                    stash_bytes=int(parts.stash_bytes[s]),
                    workspace_bytes=int(parts.workspace_bytes[s]),
                    channel_bytes=int(parts.channel_bytes[s]),
                ),
            )
            for s, stage in enumerate(shape)
        )
        fullest = max(stage.memory.total_bytes for stage in stages)
        return Evaluation(
            stages=stages,
            flows=flows,
            stage_seconds=tuple(self._stage_seconds(s, stages, flows) for s in range(len(shape))),
            short_bytes=max(0, fullest - self.terms.memory_limit_bytes),
            busy_seconds=max(self._busy_seconds(stage) for stage in stages),
        )

    def play(self, evaluation: Evaluation) -> Timeline:
        """The step of an evaluated plan, action by action."""
        shape = tuple(StageShape(stage.layers, stage.num_replicas) for stage in evaluation.stages)

        def link(source: Replica, target: Replica) -> Link:
            ends = (evaluation.stages[r.stage].devices[r.index] for r in (source, target))
            level = self.topology.level_of(ends)
            return Link(level.latency_seconds, level.bandwidth_bytes_per_second)

        times = [StageTime(s.forward_seconds, s.backward_seconds, s.all_reduce_seconds) for s in evaluation.stages]
        return simulate(self.schedule(shape), times, evaluation.flows, link, last_microbatch=self.last_microbatch)

    def _quantities(self, shape: Shape) -> Quantities:
        column = {layer.name: i for i, layer in enumerate(self.profile.graph.layers)}
        member = np.zeros((len(shape) + 1, len(column)), dtype=np.bool_)
        for s, stage in enumerate(shape):
            member[s + 1 :, [column[name] for name in stage.layers]] = True
        return measure(self.profile, member).consecutive()

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

    def _all_reduce_seconds(self, quantities: Quantities, s: int, devices: tuple[int, ...]) -> float:
        size = quantities.trainable_bytes[s : s + 1]
        return float(all_reduce_seconds(size, self.topology.levels, self.topology.ring_sizes(devices))[0])

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
        by_level: dict[int, list[Flow]] = {}
        for flow in flows:
            level = self.topology.level_of(stages[flow.source].devices + stages[flow.target].devices)
            by_level.setdefault(self.topology.levels.index(level), []).append(flow)
        total = 0.0
        for index, sharing in by_level.items():
            forward = np.array([sum(flow.forward_bytes or 0 for flow in sharing)], dtype=np.float64)
            backward = np.array([sum(flow.backward_bytes or 0 for flow in sharing)], dtype=np.float64)
            total += float(transfer_seconds(forward, backward, self.topology.levels[index])[0])
        return total

    def _busy_seconds(self, stage: Stage) -> float:
        """Of replica 0, which has as many microbatches as any; the last one counts by its rows if it is its."""
        compute = stage.forward_seconds + stage.backward_seconds
        m, r = self.terms.num_microbatches, stage.num_replicas
        last = self.last_microbatch if (m - 1) % r == 0 else 1.0
        return (math.ceil(m / r) - 1 + last) * compute + stage.all_reduce_seconds


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


def _give_out(shape: Shape) -> tuple[tuple[int, ...], ...]:
    devices, given = [], 0
    for stage in shape:
        devices.append(tuple(range(given, given + stage.num_replicas)))
        given += stage.num_replicas
    return tuple(devices)
