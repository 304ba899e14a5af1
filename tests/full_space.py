"""Every plan of a small model, one after the other: what the default search and its certificates are held against.

The cost model is written down once more, from its definitions, over sets of layers and in plain numbers; tests hold
it to `Evaluator` on plans drawn at random. A plan is a row of nested ideals, and for every stage its replicas, its
tensor-parallel degree, a stage of ZeRO and the set of units that it recomputes::

    rows    {} < {a} < {a, b, c}       ways    (replicas, degree) of each stage, within the devices
                                               x  (sharding, recomputed units) of each, of those that fit

Of what one stage can do in one place only what no other choice beats in both busy and latency seconds is combined
with the other stages: the objective grows with either.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from dpart.partitioner.cost import Terms
from dpart.partitioner.evaluate import Shape, StageShape
from dpart.partitioner.placement import give_out
from dpart.partitioner.prices import Freedom
from dpart.partitioner.topology import Level, Topology
from dpart.profiler.profile import LayerCost, Profile, SplitCost

Layers = frozenset[int]
Row = tuple[Layers, ...]
Ways = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Facts:
    """What a stage is made of, for one rank."""

    forward: float
    backward: float
    forward_reduce: tuple[float, float]
    backward_reduce: tuple[float, float]
    parameters: float
    trainable: float
    largest_parameters: float
    stash: float
    workspace: float
    received: float
    returned: float
    sent: float
    accepted: float


@dataclass(frozen=True)
class Spot:
    """The links of a stage: rings by level, and the level over which it receives."""

    tensor_rings: tuple[int, ...]
    replica_rings: tuple[int, ...]
    incoming: int


@dataclass(frozen=True)
class Choice:
    """One way to run one stage in one place."""

    latency: float
    busy: float
    peak: float
    sharding: int
    recompute: tuple[Layers, ...]


@dataclass(frozen=True)
class Best:
    """The best plan, and how many rows and ways were combined to find it."""

    objective: float
    shape: Shape | None
    num_tried: int


class FullSpace:
    """All plans of one profile on one topology."""

    def __init__(
        self,
        profile: Profile,
        topology: Topology,
        terms: Terms,
        freedom: Freedom,
        together: Sequence[Sequence[str]] = (),
    ) -> None:
        self.profile, self.topology, self.terms, self.freedom = profile, topology, terms, freedom
        self.names = [layer.name for layer in profile.graph.layers]
        self._column = {name: i for i, name in enumerate(self.names)}
        self._together = [frozenset(self._column[name] for name in names) for names in together]
        self._facts = cache(self._measure)
        self._regions = cache(self._subsets)
        self._choices = cache(self._price)
        self._placed = cache(self._place)

    @cached_property
    def ideals(self) -> list[Layers]:
        """All sets of layers that no layer outside has to run before, smallest first."""
        graph, n = self.profile.graph, len(self.names)
        before = [{self._column[p] for p in graph.digraph.predecessors(name)} for name in self.names]
        sets = (frozenset(c) for k in range(n + 1) for c in itertools.combinations(range(n), k))
        closed = [s for s in sets if all(before[layer] <= s for layer in s)]
        return [s for s in closed if all(not names & s or names <= s for names in self._together)]

    @cached_property
    def units(self) -> list[Layers]:
        """Layers that no two ideals tell apart."""
        groups: dict[tuple[bool, ...], set[int]] = {}
        for layer in range(len(self.names)):
            groups.setdefault(tuple(layer in ideal for ideal in self.ideals), set()).add(layer)
        return [frozenset(group) for group in groups.values()]

    def rows(self, num_stages: int) -> list[Row]:
        """All rows of stages: differences of nested ideals."""
        found: list[Row] = []
        for inner in itertools.combinations(self.ideals[1:-1], num_stages - 1):
            row = (self.ideals[0], *inner, self.ideals[-1])
            if all(a < b for a, b in itertools.pairwise(row)):
                found.append(row)
        return found

    def ways(self, num_stages: int, replicas: Callable[[tuple[int, ...]], bool] = lambda _: True) -> list[Ways]:
        """(replicas, degree) of every stage, all that the devices and the microbatches allow."""
        devices, most = self.topology.num_devices, self.terms.num_microbatches
        each = [(r, t) for t in self.freedom.degrees for r in range(1, min(most, devices // t) + 1)]

        def grown(stages: int, left: int) -> Iterator[Ways]:
            if not stages:
                yield ()
                return
            for r, t in each:
                if r * t <= left - (stages - 1):
                    for rest in grown(stages - 1, left - r * t):
                        yield ((r, t), *rest)

        return [ways for ways in grown(num_stages, devices) if replicas(tuple(r for r, _ in ways))]

    def best(
        self,
        stages: Sequence[int] | None = None,
        *,
        replicas: Callable[[tuple[int, ...]], bool] = lambda _: True,
        pins: Callable[[Row], bool] = lambda _: True,
    ) -> Best:
        """The plan of least objective that fits.

        Args:
            stages: The counts of stages to look at.
            replicas: Which rows of replicas count.
            pins: Which rows of ideals count.
        """
        least, shape, tried = math.inf, None, 0
        for row, ways, spots in self._plans(stages, replicas, pins):
            tried += 1
            lists = [self._choices(*stage) for stage in self._stages(row, ways, spots)]
            if sum(choices[0].latency for choices in lists if choices) >= least:
                continue
            for chosen in itertools.product(*lists):
                objective = max(c.busy for c in chosen) + sum(c.latency for c in chosen)
                if objective < least:
                    least, shape = objective, self.shape(row, ways, chosen)
        return Best(least, shape, tried)

    def choices(self, before: Layers, upto: Layers, replicas: int, degree: int, held: int) -> list[Choice]:
        """What a stage can do on a straight place with so many microbatches in flight, by latency; none if empty."""
        return self._choices(before, upto, replicas, degree, held, self._straight(replicas, degree))

    def least_bytes(
        self,
        stages: Sequence[int] | None = None,
        *,
        replicas: Callable[[tuple[int, ...]], bool] = lambda _: True,
    ) -> int:
        """The smallest limit under which some plan fits."""
        least = math.inf
        for row, ways, _ in self._plans(stages, replicas, lambda _: True):
            peak = 0.0
            for s, (r, t) in enumerate(ways):
                held = self.in_flight(r, sum(q for q, _ in ways[s + 1 :]))
                facts, regions = self._facts(row[s], row[s + 1], t), self._regions(row[s], row[s + 1], t)
                shardings = self.freedom.shardings
                peak = max(peak, min(self.peak(facts, r, z, held, *x[1:3]) for z in shardings for x in regions))
            least = min(least, peak)
        return int(least)

    def sample(self, rng: random.Random) -> Shape:
        """Any plan, whether it fits or not."""
        while True:
            stages = rng.randint(1, min(self.topology.num_devices, len(self.units)))
            rows, ways = self.rows(stages), self.ways(stages)
            if not rows or not ways:
                continue
            row, way = rng.choice(rows), rng.choice(ways)
            if self._placed(way) is None:
                continue
            chosen = []
            for s in range(stages):
                inside = [unit for unit in self.units if unit <= row[s + 1] - row[s]]
                taken = [unit for unit in inside if self.freedom.recompute and rng.random() < 0.5]
                chosen.append(Choice(0.0, 0.0, 0.0, rng.choice(self.freedom.shardings), tuple(taken)))
            return self.shape(row, way, chosen)

    def objective_and_peak(self, shape: Shape) -> tuple[float, int]:
        """Of one plan."""
        row: Row = (frozenset(),)
        for stage in shape:
            row = (*row, row[-1] | {self._column[name] for name in stage.layers})
        ways = tuple((stage.num_replicas, stage.degree) for stage in shape)
        placed = self._placed(ways)
        assert placed is not None
        stages = zip(shape, self._stages(row, ways, self._spots(row, ways, placed)), strict=True)
        found = [self.one_stage(before, upto, stage, held, spot) for stage, (before, upto, _, _, held, spot) in stages]
        return max(f[1] for f in found) + sum(f[0] for f in found), int(max(f[2] for f in found))

    def one_stage(
        self, before: Layers, upto: Layers, stage: StageShape, held: int, spot: Spot | None = None
    ) -> tuple[float, float, float]:
        """(latency, busy, peak bytes) of a stage, on a straight place if none is given."""
        facts, r = self._facts(before, upto, stage.degree), stage.num_replicas
        again = saved = room = 0.0
        for region in stage.recompute:
            seconds, less, needs = self._region(frozenset(self._column[name] for name in region), stage.degree)
            again, saved, room = again + seconds, saved + less, max(room, needs)
        latency, busy = self.seconds(facts, r, stage.sharding, again, spot or self._straight(r, stage.degree))
        return latency, busy, self.peak(facts, r, stage.sharding, held, saved, room)

    def shape(self, row: Row, ways: Ways, chosen: Sequence[Choice]) -> Shape:
        """By the names of the layers."""
        return tuple(
            StageShape(
                tuple(self.names[i] for i in sorted(upto - before)),
                r,
                t,
                choice.sharding,
                tuple(tuple(self.names[i] for i in sorted(region)) for region in sorted(choice.recompute, key=min)),
            )
            for (before, upto), (r, t), choice in zip(itertools.pairwise(row), ways, chosen, strict=True)
        )

    def in_flight(self, replicas: int, behind: int) -> int:
        """Microbatches that a replica holds, so many replicas standing behind its stage."""
        own = math.ceil(self.terms.num_microbatches / replicas)
        return own if self.terms.schedule == "gpipe" else min(math.ceil((replicas + behind) / replicas), own)

    def seconds(self, facts: Facts, replicas: int, sharding: int, again: float, spot: Spot) -> tuple[float, float]:
        """(latency, busy) of a stage, which takes no less than it does where it stands straight."""
        spots = (spot, self._straight(replicas, math.prod(spot.tensor_rings)))
        parts = [self._parts(facts, replicas, sharding, again, each) for each in dict.fromkeys(spots)]
        *on_the_way, exposed = (max(values) for values in zip(*parts, strict=True))
        latency = sum(on_the_way)
        return latency, (math.ceil(self.terms.num_microbatches / replicas) - 1) * latency + exposed

    def _straight(self, replicas: int, degree: int) -> Spot:
        """From the beginning of a group on, and beside what it receives from."""
        levels, size = self.topology.levels, replicas * degree
        groups = list(itertools.accumulate((level.count for level in levels), int.__mul__))
        incoming = next((i for i, group in enumerate(groups) if group > size), len(levels) - 1)
        return Spot(_rings(range(degree), levels), _rings(range(0, size, degree), levels), incoming)

    def _parts(
        self, facts: Facts, replicas: int, sharding: int, again: float, spot: Spot
    ) -> tuple[float, float, float, float]:
        """(forward, backward, receiving, what is exposed of its all-reduce) of a stage in one spot."""
        device, terms = self.topology.device, self.terms
        forward = facts.forward / device.speed + self._ring(facts.forward_reduce, spot.tensor_rings, None)
        backward = facts.backward / device.speed + again
        backward += self._ring(facts.backward_reduce, spot.tensor_rings, None)
        degree_ranks = math.prod(spot.tensor_rings)
        reduce = self._ring((facts.trainable, float(facts.trainable > 0)), spot.replica_rings, degree_ranks)
        if replicas > 1 and sharding >= 2:
            backward += reduce / 2
            reduce /= 2
        if replicas > 1 and sharding == 3:
            gather = self._ring((facts.parameters, float(facts.parameters > 0)), spot.replica_rings, degree_ranks) / 2
            forward, backward, reduce = forward + gather, backward + gather, 0.0
        level = self.topology.levels[spot.incoming]
        messages = (facts.received > 0) + (facts.returned > 0)
        moved = (facts.received + facts.returned) / level.bandwidth_bytes_per_second
        n = terms.reduce_buckets
        exposed = max(reduce / n, reduce - (1 - 1 / n) * backward)
        return forward, backward, messages * level.latency_seconds + moved, exposed

    def peak(self, facts: Facts, replicas: int, sharding: int, held: int, saved: float, room: float) -> float:
        """Bytes on a device of a stage, each item a whole number."""
        shares = [1 / replicas if sharding >= stage else 1.0 for stage in (1, 2, 3)]
        gathered = facts.largest_parameters if sharding == 3 and replicas > 1 else 0.0
        items = (
            shares[2] * facts.parameters + gathered,
            shares[1] * facts.trainable,
            shares[0] * {"sgd": 0, "adam": 2}[self.terms.optimizer] * facts.trainable,
            held * (facts.stash + facts.received - saved),
            facts.workspace + room,
            facts.received + facts.returned + facts.sent + facts.accepted,
            self.terms.context_bytes,
        )
        return sum(math.ceil(item - 0.5) for item in items)

    def _plans(
        self,
        stages: Sequence[int] | None,
        replicas: Callable[[tuple[int, ...]], bool],
        pins: Callable[[Row], bool],
    ) -> Iterator[tuple[Row, Ways, tuple[Spot, ...]]]:
        deepest = min(self.topology.num_devices, len(self.units))
        for count in range(1, deepest + 1) if stages is None else [s for s in stages if s <= deepest]:
            rows = [row for row in self.rows(count) if pins(row)]
            for ways in self.ways(count, replicas):
                placed = self._placed(ways)
                if placed is not None:
                    for row in rows:
                        yield row, ways, self._spots(row, ways, placed)

    def _stages(
        self, row: Row, ways: Ways, spots: Sequence[Spot]
    ) -> Iterator[tuple[Layers, Layers, int, int, int, Spot]]:
        behind = sum(r for r, _ in ways)
        for s, (r, t) in enumerate(ways):
            behind -= r
            yield row[s], row[s + 1], r, t, self.in_flight(r, behind), spots[s]

    def _price(self, before: Layers, upto: Layers, replicas: int, degree: int, held: int, spot: Spot) -> list[Choice]:
        """What fits and nothing beats, by latency."""
        facts, found = self._facts(before, upto, degree), []
        for sharding in self.freedom.shardings:
            for again, saved, room, recompute in self._regions(before, upto, degree):
                peak = self.peak(facts, replicas, sharding, held, saved, room)
                if peak <= self.terms.memory_limit_bytes:
                    latency, busy = self.seconds(facts, replicas, sharding, again, spot)
                    found.append(Choice(latency, busy, peak, sharding, recompute))
        found.sort(key=lambda c: (c.latency, c.busy))
        kept: list[Choice] = []
        for choice in found:
            if not kept or choice.busy < kept[-1].busy:
                kept.append(choice)
        return kept

    def _subsets(
        self, before: Layers, upto: Layers, degree: int
    ) -> list[tuple[float, float, float, tuple[Layers, ...]]]:
        """(seconds again, saved bytes, room, units) of every set of the stage's units."""
        inside = [unit for unit in self.units if unit <= upto - before]
        each = [self._region(unit, degree) for unit in inside]
        found = []
        for size in range(len(inside) + 1 if self.freedom.recompute else 1):
            for taken in itertools.combinations(range(len(inside)), size):
                again, saved = (sum(each[i][k] for i in taken) for k in (0, 1))
                room = max((each[i][2] for i in taken), default=0.0)
                found.append((again, saved, room, tuple(inside[i] for i in taken)))
        return found

    def _region(self, layers: Layers, degree: int) -> tuple[float, float, float]:
        """(forward seconds, saved bytes, room) of a set of layers that is recomputed."""
        graph = self.profile.graph
        costs = [self._cost(layer, degree) for layer in layers]
        reduce = (float(sum(c.forward_reduce_bytes for c in costs)), float(sum(c.forward_reduces for c in costs)))
        rings = _rings(range(degree), self.topology.levels)
        seconds = sum(c.forward_seconds for c in costs) / self.topology.device.speed + self._ring(reduce, rings, None)
        kept = sum(
            value.size_bytes
            for value in graph.values
            if value.producer is not None
            and self._column[value.producer] not in layers
            and any(self._column[consumer] in layers for consumer in value.consumers)
        )
        stash = sum(c.stash_bytes for c in costs)
        return seconds, max(stash - kept, 0.0), stash

    def _measure(self, before: Layers, upto: Layers, degree: int) -> Facts:
        graph, stage = self.profile.graph, upto - before
        costs = [self._cost(layer, degree) for layer in stage]
        parameters = trainable = received = returned = sent = accepted = 0.0
        for parameter in graph.parameters:
            users = [i for i, layer in enumerate(graph.layers) if parameter.name in layer.parameters]
            if stage & set(users):
                whole = self.profile.costs[users[0]].parameter_bytes
                size = parameter.size_bytes * (self._cost(users[0], degree).parameter_bytes / whole if whole else 1.0)
                parameters += size
                trainable += size * parameter.trainable
        for holders, forward, backward in self._chains:
            if holders & stage:
                received += forward * bool(holders & before)
                returned += backward * bool(holders & before)
                sent += forward * bool(holders - upto)
                accepted += backward * bool(holders - upto)
        return Facts(
            forward=sum(c.forward_seconds for c in costs),
            backward=sum(c.backward_seconds for c in costs),
            forward_reduce=(sum(c.forward_reduce_bytes for c in costs), sum(c.forward_reduces for c in costs)),
            backward_reduce=(sum(c.backward_reduce_bytes for c in costs), sum(c.backward_reduces for c in costs)),
            parameters=parameters,
            trainable=trainable,
            largest_parameters=max(c.parameter_bytes for c in costs),
            stash=sum(c.stash_bytes for c in costs),
            workspace=max(c.workspace_bytes for c in costs),
            received=received,
            returned=returned,
            sent=sent,
            accepted=accepted,
        )

    @cached_property
    def _chains(self) -> list[tuple[Layers, float, float]]:
        """(holders, bytes forward, bytes backward) of all that travels."""
        graph = self.profile.graph
        found = []
        for value in graph.values:
            if value.producer is not None and value.consumers:
                holders = frozenset(self._column[name] for name in (value.producer, *value.consumers))
                found.append((holders, float(value.size_bytes), float(value.size_bytes * value.differentiable)))
        for p in graph.parameters:
            users = frozenset(i for i, layer in enumerate(graph.layers) if p.name in layer.parameters)
            if p.trainable and len(users) > 1:
                found.append((users, 0.0, float(p.size_bytes)))
        return found

    def _cost(self, layer: int, degree: int) -> SplitCost:
        cost: LayerCost = self.profile.costs[layer]
        if degree == 1:
            return SplitCost(1, "", cost.forward_seconds, cost.backward_seconds, 0.0, cost.parameter_bytes,
                             cost.trainable_bytes, cost.stash_bytes, cost.workspace_bytes, 0, 0, 0, 0)  # fmt: skip
        (split,) = (split for split in cost.splits if split.degree == degree)
        return split

    def _ring(self, reduce: tuple[float, float], rings: Sequence[int], degree: int | None) -> float:
        """All-reduces of (bytes, how many); with a degree, those of so many ranks side by side."""
        total, below = 0.0, 1
        size, count = reduce
        for level, n in zip(self.topology.levels, rings, strict=True):
            shared = 1 if degree is None else min(degree, below)
            if n > 1:
                total += 2 * (n - 1) * (shared * size / n / level.bandwidth_bytes_per_second)
                total += 2 * (n - 1) * count * level.latency_seconds
            below *= level.count
        return total

    def _place(self, ways: Ways) -> tuple[tuple[int, ...], ...] | None:
        return give_out(ways, self.topology)

    def _spots(self, row: Row, ways: Ways, placed: Sequence[tuple[int, ...]]) -> tuple[Spot, ...]:
        levels = self.topology.levels
        if len(levels) == 1:
            return tuple(Spot((t,), (r,), 0) for r, t in ways)
        sources: list[set[int]] = [set() for _ in ways]
        for holders, forward, backward in self._chains:
            if forward or backward:
                at = [s for s in range(len(ways)) if holders & (row[s + 1] - row[s])]
                for source, target in itertools.pairwise(at):
                    sources[target].add(source)
        return tuple(
            Spot(
                _rings(placed[s][:t], levels),
                _rings(placed[s][::t], levels),
                _common([d for stage in (s, *sources[s]) for d in placed[stage]], levels),
            )
            for s, (_, t) in enumerate(ways)
        )


def _rings(devices: Sequence[int], levels: Sequence[Level]) -> tuple[int, ...]:
    """Per level, the most members of one group among these devices."""
    members, sizes = set(devices), []
    for level in levels:
        sizes.append(max(sum(m // level.count == g for m in members) for g in {m // level.count for m in members}))
        members = {m // level.count for m in members}
    return tuple(sizes)


def _common(devices: Sequence[int], levels: Sequence[Level]) -> int:
    """The innermost level that has all these devices in one group."""
    size = 1
    for number, level in enumerate(levels):
        size *= level.count
        if len({device // size for device in devices}) == 1:
            return number
    raise AssertionError("the outermost level has all devices")
