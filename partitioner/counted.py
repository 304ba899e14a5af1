"""The cheapest plan whose stages all have the same number of replicas, no stage taking more than a limit.

Stages are counted from the end. With equal replicas everywhere the count of a stage is also the number of
microbatches it has in flight, so what it must recompute is known, and one table over (state, count) holds the
answer (PLANNER's "fewest devices for a bottleneck", weighted)::

    least(i, n) = min over stages (i, j) that fit n microbatches of  cost(i, j, n) + least(j, n - 1)

A plan's cost is its devices and its latency, each with a weight: devices alone tell whether a limit can be met, and
with a price on devices the same pass gives the dual bound of `dual.py`. The work does not depend on the number of
devices: a pass looks at each stage within the limit once for every count. Unlike devices have a weight each, and i
and j are nodes that know where the stage before them stands (``crossings.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dpart.partitioner.budgeted import Budgeted
from dpart.partitioner.options import Floats
from dpart.partitioner.plan import Pin
from dpart.partitioner.prices import Priced, Prices


@dataclass(frozen=True)
class CountedStage:
    """A stage of a path.

    Attributes:
        segment: Index into the prices' segments.
        in_flight: Its count from the end.
        priced: Index into the table's ways to run a stage.
    """

    segment: int
    in_flight: int
    priced: int


@dataclass(frozen=True)
class Path:
    """A plan as the search sees it.

    Attributes:
        busy_seconds: The largest of its stages.
        latency_seconds: The sum over its stages.
        devices: The sum over its stages.
        by_pool: The devices of each pool.
    """

    stages: tuple[CountedStage, ...]
    busy_seconds: float
    latency_seconds: float
    devices: int
    by_pool: tuple[int, ...]

    @property
    def objective_seconds(self) -> float:
        """What the search minimises."""
        return self.busy_seconds + self.latency_seconds


COUNTED = 24
"""Devices for one copy of the pipeline, up to which they are counted and not priced."""


class Counted:
    """All plans with `num_replicas` replicas of every stage."""

    def __init__(
        self,
        prices: Prices,
        num_replicas: int,
        num_devices: int,
        *,
        stages: range | None = None,
        degrees: tuple[int, ...] | None = None,
        pins: Sequence[Pin] = (),
        limit_seconds: float = np.inf,
        sharers: int | None = None,
    ) -> None:
        """
        Args:
            num_devices: A plan may use.
            stages: The counts of stages a plan may have; None for any.
            degrees: Tensor-parallel degrees; None for all of the prices.
            pins: Stages of some layers, counted from the front; each count of stages is then searched by itself.
            limit_seconds: No stage keeps a device busy for longer.
            sharers: Replicas that share state out; None for all there are.
        """
        self.limit_seconds = limit_seconds
        self.pinned = pinned_stages(prices, pins) if pins else None
        self.prices, self.num_replicas, self._edges = prices, num_replicas, prices.edges
        # Devices that are no whole copy of a stage are of no use.
        self.budgets = tuple(most // num_replicas * num_replicas for most in prices.budgets(num_devices))
        self.num_devices = sum(self.budgets)
        deepest = min(prices.num_states - 1, sum(most // num_replicas for most in self.budgets))
        self.counts = range(1, deepest + 1) if stages is None else range(stages.start, min(stages.stop, deepest + 1))
        depth = max(self.counts, default=1)
        self.priced = prices.ways(
            num_replicas, depth, num_devices, degrees=degrees, limit_seconds=limit_seconds, sharers=sharers
        )
        signature, of_pool = prices.joint
        kept, of_pool, known = _within(self.priced, of_pool)
        # Signatures stand in the order of the least that they keep a device busy: within a limit is a prefix.
        everything = [_stacked(self.priced, f, of_pool, depth) for f in ("latency_seconds", "busy_seconds")]
        least = everything[1][:, 0, :].min(axis=0, initial=np.inf)
        order = np.argsort(least, kind="stable")
        self._least_busy = least[order]
        rank = np.full(known, known)
        rank[kept[order]] = np.arange(len(order))
        self._signature = rank[signature][self._edges.segment]
        self._slots = _undominated(self.priced, prices.pool, *(values[:, :, order] for values in everything))

    @cached_property
    def busy_values(self) -> Floats:
        """Every value that a plan's bottleneck can have, ascending; of unlike devices only those that may be needed."""
        if len(self.budgets) == 1:
            return np.unique(
                np.concatenate([slot.busy[np.isfinite(slot.busy)] for slot in self._slots] or [np.zeros(0)])
            )
        own = self.prices.terms.own_microbatches(self.num_replicas) - 1
        power = sum(speed * most for speed, most in zip(self.prices.speeds, self.budgets, strict=True))
        mean = own * self.prices.work.device_seconds * self.num_replicas / power
        low, high = mean * (1 - 1e-9), min(self.limit_seconds, float(np.finfo(np.float64).max))
        kept = [slot.busy[(slot.busy >= low) & (slot.busy <= high)] for slot in self._slots]
        return np.unique(np.concatenate([*kept, np.zeros(0)]))

    def solve(self, limit_seconds: float, device_weight: float | Sequence[float], latency_weight: float) -> Path | None:
        """The path of least weight with no stage above the limit; None if there is none.

        Args:
            device_weight: Of a device, or of one of each pool.
        """
        of_pool = [device_weight] * len(self.budgets) if isinstance(device_weight, (int, float)) else device_weight
        # What does not fit has infinite busy seconds, which no limit allows.
        limit_seconds = min(limit_seconds, self.limit_seconds, float(np.finfo(np.float64).max))
        within = int(np.searchsorted(self._least_busy, limit_seconds, side="right"))
        if not self.counts or not within or not self._slots:
            return None
        weights = []
        for slot in self._slots:
            devices = of_pool[slot.pool] * (slot.degree * self.num_replicas)
            latency, busy = slot.latency[:, :within], slot.busy[:, :within]
            # What does not fit has finite latency and infinite busy seconds.
            weights.append(np.where(busy <= limit_seconds, latency_weight * latency + devices, np.inf))
        cheap = self._cheapest(weights, within)
        if self.pinned is None:
            table = _Table(self, cheap, within)
            ends = [(table.least[n][0], n, table) for n in self.counts if n < len(table.least)]
        else:
            tables = [(n, _Table(self, cheap, within, n)) for n in self.counts]
            ends = [(found.least[n][0], n, found) for n, found in tables if n < len(found.least)]
        if not ends:
            return None
        value, count, table = min(ends, key=lambda end: end[:2])
        if not np.isfinite(value):
            return None
        stages = []
        for edge, n in table.follow(count):
            g, way = int(self._signature[edge]), int(self._edges.way[edge])
            best = min(self._slots_of[way], key=lambda v: float(weights[v][n - 1, g]))
            segment, slot = int(self._edges.segment[edge]), self._slots[best]
            stages.append((CountedStage(segment, n, int(slot.priced[n - 1, g])), best, g))
        return self._path(stages)

    @property
    def is_countable(self) -> bool:
        """Whether devices can be counted to the unit, instead of being priced."""
        return len(self.budgets) == 1 and self.pinned is None and self.num_devices <= COUNTED * self.num_replicas

    def fastest(self, limit_seconds: float) -> Path | None:
        """The path of least latency within the devices and with no stage above the limit, exact; None if none fits."""
        limit_seconds = min(limit_seconds, self.limit_seconds, float(np.finfo(np.float64).max))
        within = int(np.searchsorted(self._least_busy, limit_seconds, side="right"))
        if not self.counts or not within or not self._slots:
            return None
        chosen = self.edges(within)
        g = self._signature[chosen]
        latency: dict[int, Floats] = {}
        for slot in self._slots:
            allowed = np.where(slot.busy[:, g] <= limit_seconds, slot.latency[:, g], np.inf)
            latency[slot.degree] = np.minimum(latency.get(slot.degree, np.inf), allowed)
        units = self.num_devices // self.num_replicas
        table = Budgeted(self._edges.start[chosen], self._edges.stop[chosen], self._edges.num_nodes, latency, units)
        value, count = table.best(self.counts)
        if not np.isfinite(value):
            return None
        stages = []
        for stage, n, degree in table.follow(count):
            where = (n - 1, int(g[stage]))
            best = min(
                (v for v, s in enumerate(self._slots) if s.degree == degree and s.busy[where] <= limit_seconds),
                key=lambda v: float(self._slots[v].latency[where]),
            )
            segment = int(self._edges.segment[chosen[stage]])
            stages.append((CountedStage(segment, n, int(self._slots[best].priced[where])), best, where[1]))
        return self._path(stages)

    def edges(self, within: int) -> npt.NDArray[np.intp]:
        """Indices of the edges whose signature is one of the first so many."""
        return np.flatnonzero(self._signature < within)

    def of_edges(self, of_ways: npt.NDArray[Any], chosen: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """[N, X] of [N, W * G]: what holds of some edges, by their count from the end."""
        column = self._signature[chosen]
        if len(self.budgets) > 1:
            column = column + self._edges.way[chosen] * (of_ways.shape[1] // len(self._slots_of))
        found: npt.NDArray[Any] = of_ways[:, column]
        return found

    @cached_property
    def _slots_of(self) -> list[list[int]]:
        """The slots of every way of `Edges`."""
        ways = 1 if len(self.budgets) == 1 else 2 * len(self.budgets)
        return [[v for v, slot in enumerate(self._slots) if slot.way == way] for way in range(ways)]

    def _cheapest(self, weights: list[Floats], within: int) -> Floats:
        """[N, W * G]: the least weight of every way of `Edges`, side by side."""
        if len(self.budgets) == 1:
            least: Floats = np.minimum.reduce(weights)
            return least
        none = np.full((len(weights[0]), within), np.inf)
        return np.hstack([np.minimum.reduce([none, *(weights[v] for v in slots)]) for slots in self._slots_of])

    def _path(self, found: list[tuple[CountedStage, int, int]]) -> Path:
        where = [(self._slots[slot], (stage.in_flight - 1, g)) for stage, slot, g in found]
        return Path(
            tuple(stage for stage, _, _ in found),
            busy_seconds=max(float(slot.busy[at]) for slot, at in where),
            latency_seconds=sum(float(slot.latency[at]) for slot, at in where),
            devices=sum(slot.degree for slot, _ in where) * self.num_replicas,
            by_pool=tuple(
                sum(slot.degree for slot, _ in where if slot.pool == p) * self.num_replicas
                for p in range(len(self.budgets))
            ),
        )


@dataclass(frozen=True)
class _Slot:
    """One tensor-parallel degree in one pool, with the sharding that is best there: [N, G].

    Attributes:
        pool: Its place among the pools that are searched.
        crossing: Whether what the stage receives comes from another pool.
        priced: Which of the ways to run a stage it is.
    """

    pool: int
    crossing: bool
    degree: int
    latency: Floats
    busy: Floats
    priced: npt.NDArray[np.intp]

    @property
    def way(self) -> int:
        """As edges have it."""
        return 2 * self.pool + self.crossing


def _within(
    priced: list[Priced], of_pool: list[npt.NDArray[np.intp]]
) -> tuple[npt.NDArray[np.intp], list[npt.NDArray[np.intp]], int]:
    """The joint signatures that are priced in some pool, for each pool its own ones of those, and how many there are.

    Args:
        of_pool: For each pool its own signature of every joint one.
    """
    if len(of_pool) == 1:
        return np.arange(len(of_pool[0])), of_pool, len(of_pool[0])
    widths = [max((p.choice.shape[1] for p in priced if p.pool == pool), default=0) for pool in range(len(of_pool))]
    kept = np.flatnonzero(np.any([own < width for own, width in zip(of_pool, widths, strict=True)], axis=0))
    return kept, [own[kept] for own in of_pool], len(of_pool[0])


def _stacked(priced: list[Priced], name: str, of_pool: list[npt.NDArray[np.intp]], depth: int) -> Floats:
    """[V, N, G]: of every way to run a stage; infinite for signatures that were left out."""
    if len(of_pool) == 1 and priced:
        return np.stack([getattr(p, name) for p in priced])
    values = np.full((len(priced), depth, len(of_pool[0])), np.inf)
    for own, p in zip(values, priced, strict=True):
        table: Floats = getattr(p, name)
        known = of_pool[p.pool] < table.shape[1]
        own[:, known] = table[:, of_pool[p.pool][known]]
    return values


def _undominated(priced: list[Priced], first_pool: int, latency: Floats, busy: Floats) -> list[_Slot]:
    """Ways of one degree take the same devices: where one is no slower in both respects, others are left out."""
    slots = []
    for pool, degree in dict.fromkeys((p.pool, p.degree) for p in priced):
        ways, crossing = (
            np.array([v for v, p in enumerate(priced) if (p.pool, p.degree, p.crossing) == (pool, degree, crosses)])
            for crosses in (False, True)
        )
        own_latency, own_busy = latency[ways], busy[ways].copy()
        while np.isfinite(own_busy).any():
            best = own_busy.argmin(axis=0)[None]
            least_latency = np.take_along_axis(own_latency, best, axis=0)
            least_busy = np.take_along_axis(own_busy, best, axis=0)
            finite = np.where(np.isfinite(least_busy), least_latency, 0.0)
            slots.append(_Slot(pool - first_pool, False, degree, finite[0], least_busy[0], ways[best[0]]))
            if len(crossing):
                # What crosses takes as much longer whatever the sharding.
                chosen = crossing[best[0]]
                there = [np.take_along_axis(values, chosen[None], axis=0)[0] for values in (latency, busy)]
                finite = np.where(np.isfinite(there[1]), there[0], 0.0)[None]
                slots.append(_Slot(pool - first_pool, True, degree, finite[0], there[1], chosen))
            own_busy[(own_latency >= least_latency) | ~np.isfinite(own_busy)] = np.inf
    return slots


class _Table:
    """least[n][i]: the least weight of n stages from state i to the end; infinite where there are none."""

    def __init__(self, engine: Counted, cheap: Floats, within: int, num_stages: int | None = None) -> None:
        """
        Args:
            num_stages: Of the plan, where stages have to be told apart from the front.
            cheap: [N, W * G]: by the count from the end, of every way and signature.
            within: Signatures beyond have no stage within the limit.
        """
        edges = engine.prices.edges
        # Holding more microbatches never gets cheaper, so what is not to be had for one is not to be had.
        chosen = engine.edges(within)
        self._edges = chosen[engine.of_edges(np.isfinite(cheap[:1]), chosen)[0]]
        self._start, self._stop = edges.start[self._edges], edges.stop[self._edges]
        self._cheap: Floats = engine.of_edges(cheap, self._edges)
        if num_stages is not None:
            assert engine.pinned is not None
            self._cheap = only_pinned(self._cheap[:num_stages], engine.pinned[edges.segment[self._edges]], num_stages)
        first = np.flatnonzero(np.diff(self._start, prepend=-1))
        begin = self._start[first]
        self.least: list[Floats] = [np.full(edges.num_nodes, np.inf)]
        self.least[0][-1] = 0.0
        for n in range(1, len(self._cheap) + 1):
            value = np.full(edges.num_nodes, np.inf)
            if len(first):
                value[begin] = np.minimum.reduceat(self._through(n, slice(None)), first)
            if not np.isfinite(value).any():
                break
            self.least.append(value)

    def follow(self, count: int) -> list[tuple[int, int]]:
        """(edge, count from the end) of the stages of the best path with so many."""
        found, state = [], 0
        for n in range(count, 0, -1):
            here = slice(*np.searchsorted(self._start, [state, state + 1]))
            best = here.start + int(self._through(n, here).argmin())
            found.append((int(self._edges[best]), n))
            state = int(self._stop[best])
        return found

    def _through(self, n: int, which: slice) -> Floats:
        weights: Floats = self._cheap[n - 1, which] + self.least[n - 1][self._stop[which]]
        return weights


def pinned_stages(prices: Prices, pins: Sequence[Pin]) -> npt.NDArray[np.int64]:
    """[E]: the stage that a segment has to be, -1 for any, -2 for none: its layers are pinned to several."""
    column = {layer.name: i for i, layer in enumerate(prices.profile.graph.layers)}
    member, stage = prices.contraction.member, np.full(len(prices.start), -1)
    for pin in pins:
        inside = member[:, column[pin.layer]]
        has = inside[prices.stop] & ~inside[prices.start]
        stage[has] = np.where((stage[has] == -1) | (stage[has] == pin.stage), pin.stage, -2)
    return stage


def only_pinned(weights: Floats, stage: npt.NDArray[np.int64], num_stages: int) -> Floats:
    """[N, E]: infinite where a segment, as the n-th from the end of so many stages, is not the stage it has to be."""
    index = num_stages - np.arange(1, len(weights) + 1)[:, None]
    kept: Floats = np.where((stage[None, :] == -1) | (stage[None, :] == index), weights, np.inf)
    return kept
