"""Plans worth evaluating: the baselines everyone asks about, and what the searchers find.

A search minimises the bottleneck, and a plan is chosen by the time of its step, so the best of every count of
devices and of stages are looked at. Where levels of links are nested, the paper's search solves them inside out;
beside it a flat search takes every link for the slowest, and another, with every link as the fastest and without
latency, bounds from below what any plan can reach.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dpart.partitioner import pipedream
from dpart.partitioner.contraction import Contraction, contract
from dpart.partitioner.cost import StageCosts, Terms, memory
from dpart.partitioner.evaluate import Shape, StageShape
from dpart.partitioner.plan import Pin, Stage
from dpart.partitioner.prices import Freedom, Prices
from dpart.partitioner.quantities import Quantities, measure
from dpart.partitioner.search import FoundStage
from dpart.partitioner.shapes import ShapeFound, Value, best_of_each_shape, best_of_replicas
from dpart.partitioner.states import States, list_states
from dpart.partitioner.topology import Level, Topology
from dpart.profiler.profile import Profile

_MAX_STATES = 2000
_MAX_NESTED_STATES = 400
_MAX_PROPOSED = 100
_MAX_REPORTED = 8
_MAX_STEPS = 1e9
"""Elementary steps of a search, a few seconds' worth."""


@dataclass(frozen=True)
class Wanted:
    """What the user asked of a plan; None where nothing."""

    num_stages: int | None = None
    max_stages: int | None = None
    replicas: tuple[int, ...] | None = None
    pins: tuple[Pin, ...] = ()
    freedom: Freedom | None = None

    @property
    def is_any(self) -> bool:
        """Whether any shape will do."""
        return replace(self, freedom=None) == Wanted()

    def allows(self, stages: Sequence[StageShape | Stage]) -> bool:
        """Whether a plan with these stages is one."""
        replicas = tuple(stage.num_replicas for stage in stages)
        return (
            self.allows_replicas(replicas)
            and all(pin.stage < len(stages) and pin.layer in stages[pin.stage].layers for pin in self.pins)
            and all(self._allows_way(stage) for stage in stages)
        )

    def _allows_way(self, stage: StageShape | Stage) -> bool:
        """Whether a stage may run so; one replica has nothing to share out."""
        if self.freedom is None:
            return True
        if isinstance(stage, StageShape):
            degree, sharding = stage.degree, stage.sharding
        else:
            degree, sharding = stage.tensor_parallel_degree, stage.optimizer_sharding
        return degree in self.freedom.degrees and (stage.num_replicas == 1 or sharding in self.freedom.shardings)

    def allows_replicas(self, replicas: Sequence[int]) -> bool:
        """Whether a plan may have these replicas."""
        return (
            (self.num_stages is None or len(replicas) == self.num_stages)
            and (self.max_stages is None or len(replicas) <= self.max_stages)
            and (self.replicas is None or tuple(replicas) == self.replicas)
        )


@dataclass(frozen=True)
class Candidate:
    """A plan to evaluate, and where it comes from.

    Attributes:
        baseline: Whether it is one of the plans everyone asks about.
        reported: Whether its step is wanted even where it cannot be the fastest.
    """

    name: str
    shape: Shape
    baseline: bool = False
    reported: bool = False


@dataclass(frozen=True)
class Searched:
    """What the searches gave.

    Attributes:
        lower_bound_seconds: No plan of the wanted shape has a smaller bottleneck; 0 if nothing is proved.
    """

    candidates: tuple[Candidate, ...]
    lower_bound_seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """All plans of one model on one topology under one set of terms.

    Attributes:
        together: Sets of layers that no cut may separate.
    """

    profile: Profile
    topology: Topology
    terms: Terms
    progress: Callable[[str], None] = field(default=lambda text: None)
    together: tuple[tuple[str, ...], ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices of the topology."""
        return self.topology.num_devices

    @cached_property
    def states(self) -> States:
        """The ideals of the layer graph."""
        graph = self.profile.graph
        index = {layer.name: i for i, layer in enumerate(graph.layers)}
        before = [sorted(index[p] for p in graph.digraph.predecessors(layer.name)) for layer in graph.layers]
        states = list_states(before, _MAX_NESTED_STATES if self.is_nested else _MAX_STATES)
        self.progress(f"{len(states.member)} states of {len(graph.layers)} layers")
        return states

    @cached_property
    def quantities(self) -> Quantities:
        """Of all pairs of states."""
        return measure(self.profile, self.states.member)

    @property
    def is_nested(self) -> bool:
        """Whether there are links of several speeds."""
        return len(self.topology.nested_levels) > 1

    @property
    def is_guessed(self) -> bool:
        """Whether the default search takes what stages exchange to cross other links than it may in truth."""
        return self.is_nested or bool(self.topology.others)

    @cached_property
    def contraction(self) -> Contraction:
        """The cuts of the default search."""
        found = contract(self.profile, together=self.together)
        self.progress(f"{found.num_cuts} cuts of {len(self.profile.graph.layers)} layers")
        return found

    def prices(self, freedom: Freedom, *, is_outermost: bool = False) -> Prices:
        """What every stage costs, for the default search."""
        return Prices(self.profile, self.contraction, self.topology, self.terms, freedom, is_outermost=is_outermost)

    def nested(self) -> StageCosts:
        """The problem on the topology as it is."""
        return StageCosts(self.states, self.quantities, self.topology.nested_levels, self.terms)

    @cached_property
    def slowest(self) -> StageCosts:
        """The problem with every link the slowest."""
        levels = self.topology.all_levels
        bandwidth = min(level.bandwidth_bytes_per_second for level in levels)
        return self._flat(bandwidth, max(level.latency_seconds for level in levels))

    @cached_property
    def fastest(self) -> StageCosts:
        """The problem with every link the fastest: no plan is better in truth. A single level is as it is."""
        if not self.is_nested:
            return self.slowest
        return self._flat(max(level.bandwidth_bytes_per_second for level in self.topology.all_levels), 0.0)

    @cached_property
    def max_stages(self) -> int:
        """The deepest pipelines that the search of every shape can afford."""
        steps = len(self.states.member) ** 2 * self.num_devices**2 / 2
        return min(self.num_devices, len(self.profile.graph.layers), max(2, int(_MAX_STEPS / steps)))

    def shape(self, stages: Iterable[FoundStage]) -> Shape:
        """The layers of found stages."""
        names = np.array([layer.name for layer in self.profile.graph.layers], dtype=object)
        member = self.states.member
        return tuple(StageShape(tuple(names[member[s.stop] & ~member[s.start]]), s.num_replicas) for s in stages)

    def _flat(self, bandwidth: float, latency: float) -> StageCosts:
        level = Level("all", self.num_devices, bandwidth, latency)
        return StageCosts(self.states, self.quantities, [level], self.terms)


def baselines(space: Space) -> list[Candidate]:
    """One device, data parallelism and the straight pipeline on all devices, whether they fit or not."""
    everything = tuple(layer.name for layer in space.profile.graph.layers)
    found = [Candidate("one device", (StageShape(everything, 1),), baseline=True, reported=True)]
    copies = min(space.num_devices, space.terms.num_microbatches)
    if copies > 1:
        found.append(Candidate("data parallel", (StageShape(everything, copies),), baseline=True, reported=True))
    depth = min(space.num_devices, len(everything))
    if depth > 1:
        unlimited = replace(space.terms, memory_limit_bytes=np.iinfo(np.int64).max)
        costs = StageCosts(space.states, space.quantities, space.slowest.levels, unlimited)
        straight = best_of_replicas(_seconds(space.slowest), (1,) * depth) or best_of_replicas(
            _seconds(costs), (1,) * depth
        )
        assert straight is not None, "a graph of n layers has a chain of n + 1 states"
        found.append(Candidate("straight pipeline", space.shape(straight.stages), baseline=True, reported=True))
    return found


def search(space: Space, wanted: Wanted) -> Searched:
    """Candidates of the wanted shape, with a proof of how small their bottleneck can be."""
    candidates: list[Candidate] = []
    bounds: list[float] = []
    notes: list[str] = []
    if not wanted.is_any:
        for costs in dict.fromkeys([space.slowest, space.fastest]):
            found = _shapes(costs, wanted, space.num_devices, space.max_stages)
            bounds = [f.value for f in found]
            candidates += _proposals(space, found)
        return Searched(tuple(candidates), _bound(space, bounds), tuple(notes))
    candidates, bounds = _by_pipedream(space, notes)
    for costs in dict.fromkeys([space.slowest, space.fastest]):
        candidates += _proposals(space, _shapes(costs, wanted, space.num_devices, space.max_stages))
    return Searched(tuple(candidates), _bound(space, bounds), tuple(notes))


def least_memory(space: Space, wanted: Wanted) -> tuple[int, tuple[int, ...]]:
    """The least bytes that some wanted plan needs on its fullest device, and that plan's replicas."""
    found = _shapes(space.slowest, wanted, space.num_devices, space.max_stages, space.slowest.peak_bytes)
    best = min(found, key=lambda f: f.value)
    return int(best.value), tuple(stage.num_replicas for stage in best.stages)


def largest_layer(space: Space, freedom: Freedom) -> tuple[str, int]:
    """The layer that needs most bytes in whatever stage it stands: one microbatch in flight, all else as allowed."""
    layers = space.profile.graph.layers
    alone = np.vstack([np.zeros((1, len(layers)), dtype=np.bool_), np.eye(len(layers), dtype=np.bool_)])
    replicas = min(space.num_devices, space.terms.num_microbatches)
    each = []
    for degree in freedom.degrees:
        quantities = measure(space.profile, alone, degree)
        # Sharing parameters out takes room to gather them in; a replica alone shares nothing.
        for sharding, shared in ((0, 1), *((z, replicas) for z in freedom.shardings)):
            parts = memory(quantities, space.terms, 1, num_replicas=shared, sharding=sharding)
            # Channels are left out: with its neighbours in the same stage it has none.
            each.append((parts.total_bytes - parts.channel_bytes)[0, 1:])
    needed = np.min(each, axis=0)
    most = int(needed.argmax())
    return layers[most].name, int(needed[most])


def _by_pipedream(space: Space, notes: list[str]) -> tuple[list[Candidate], list[float]]:
    candidates, bounds = [], []
    for costs in dict.fromkeys([space.slowest, space.fastest]):
        space.progress("searching the best plan for every count of devices")
        found = pipedream.search_each(costs)
        bounds = [f.bottleneck_seconds for f in found.values()]
        for n, best in sorted(found.items(), key=lambda item: item[1].bottleneck_seconds)[:_MAX_PROPOSED]:
            name, reported = f"pipedream on {_devices(n)}", _is_reported(n, space.num_devices)
            candidates.append(Candidate(name, space.shape(best.stages), reported=reported))
    if space.is_nested:
        levels = space.topology.nested_levels
        pairs = sum(level.count**2 / 2 for level in levels[:-1])
        if len(space.states.member) ** 3 / 6 * pairs > 5 * _MAX_STEPS:
            notes.append("The model is too large for the search by levels: every link was taken for the slowest.")
            return candidates, bounds
        space.progress("searching level by level")
        for n, best in pipedream.search_each(space.nested()).items():
            devices = n * math.prod(level.count for level in levels[:-1])
            name = f"pipedream by levels on {_devices(devices)}"
            candidates.append(Candidate(name, space.shape(best.stages)))
    return candidates, bounds


def _shapes(
    costs: StageCosts,
    wanted: Wanted,
    num_devices: int,
    max_stages: int,
    value: Value | None = None,
) -> list[ShapeFound]:
    """The best plan of every wanted shape, by its seconds unless another value is given."""
    value = value or _seconds(costs)
    if wanted.replicas is not None:
        found = best_of_replicas(value, wanted.replicas)
        return [found] if found is not None else []
    deepest = wanted.num_stages or wanted.max_stages or max_stages
    each = best_of_each_shape(value, num_devices, deepest)
    return [f for f in each.values() if wanted.allows_replicas([s.num_replicas for s in f.stages])]


def _seconds(costs: StageCosts) -> Value:
    compute = costs.compute_seconds()
    return lambda num_replicas, after: costs.stage_seconds(0, num_replicas, after, compute)


def _proposals(space: Space, found: Sequence[ShapeFound]) -> list[Candidate]:
    """Those with the smallest bottlenecks, and the best of every small count of stages."""
    proposals, depths = [], set()
    for place, best in enumerate(sorted(found, key=lambda f: f.value)):
        stages, devices = len(best.stages), sum(stage.num_replicas for stage in best.stages)
        reported = stages not in depths and stages <= _MAX_REPORTED
        depths.add(stages)
        if place < _MAX_PROPOSED or reported:
            name = f"{stages} stage{'s' if stages > 1 else ''} on {_devices(devices)}"
            proposals.append(Candidate(name, space.shape(best.stages), reported=reported))
    return proposals


def _is_reported(devices: int, given: int) -> bool:
    """Of few devices every count, of many those that halve."""
    return given <= _MAX_REPORTED or devices in [given >> i for i in range(given.bit_length())]


def describe(shape: Shape) -> str:
    """A name for people: stages and devices, and what else was decided."""
    n, degrees = len(shape), sorted({stage.degree for stage in shape})
    parts = [f"{n} stage{'s' if n > 1 else ''} on {_devices(sum(stage.num_devices for stage in shape))}"]
    if degrees != [1]:
        parts.append("tensor parallel " + "/".join(map(str, degrees)))
    if any(stage.recompute for stage in shape):
        parts.append("recomputing")
    return ", ".join(parts)


def _devices(n: int) -> str:
    return f"{n} device{'s' if n > 1 else ''}"


def _bound(space: Space, bounds: Sequence[float]) -> float:
    return min(bounds) if bounds and space.states.complete else 0.0
