"""The cheapest plan whose stages all have the same number of replicas, no stage taking more than a limit.

Stages are counted from the end. With equal replicas everywhere the count of a stage is also the number of
microbatches it has in flight, so what it must recompute is known, and one table over (state, count) holds the
answer (PLANNER's "fewest devices for a bottleneck", weighted)::

    least(i, n) = min over stages (i, j) that fit n microbatches of  cost(i, j, n) + least(j, n - 1)

A plan's cost is its devices and its latency, each with a weight: devices alone tell whether a limit can be met, and
with a price on devices the same pass gives the dual bound of `dual.py`. The work does not depend on the number of
devices: a pass looks at each stage within the limit once for every count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

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
    """

    stages: tuple[CountedStage, ...]
    busy_seconds: float
    latency_seconds: float
    devices: int

    @property
    def objective_seconds(self) -> float:
        """What the search minimises."""
        return self.busy_seconds + self.latency_seconds


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
    ) -> None:
        """
        Args:
            num_devices: A plan may use.
            stages: The counts of stages a plan may have; None for any.
            degrees: Tensor-parallel degrees; None for all of the prices.
            pins: Stages of some layers, counted from the front; each count of stages is then searched by itself.
            limit_seconds: No stage keeps a device busy for longer.
        """
        self.limit_seconds = limit_seconds
        self.pinned = pinned_stages(prices, pins) if pins else None
        self.prices, self.num_replicas, self.num_devices = prices, num_replicas, num_devices
        deepest = min(prices.num_states - 1, num_devices // num_replicas)
        self.counts = range(1, deepest + 1) if stages is None else range(stages.start, min(stages.stop, deepest + 1))
        depth = max(self.counts, default=1)
        count = prices.within(limit_seconds, num_replicas)
        self.priced = [
            prices.price(degree, sharding, num_replicas, depth, count)
            for degree in degrees or prices.freedom.degrees
            if degree * num_replicas <= num_devices
            for sharding in prices.shardings(num_replicas)
        ]
        # Signatures stand in the order of the least that they keep a device busy: within a limit is a prefix.
        everything = [np.stack([getattr(p, f) for p in self.priced]) for f in ("latency_seconds", "busy_seconds")]
        least = everything[1][:, 0, :].min(axis=0)
        self._order = np.argsort(least, kind="stable")
        self._least_busy = least[self._order]
        rank = np.full(prices.num_signatures, prices.num_signatures)
        rank[self._order] = np.arange(len(self._order))
        self._signature = rank[prices.signature]
        self._slots = _undominated(self.priced, *(values[:, :, self._order] for values in everything))

    @cached_property
    def busy_values(self) -> Floats:
        """Every value that a plan's bottleneck can have, ascending."""
        return np.unique(np.concatenate([slot.busy[np.isfinite(slot.busy)] for slot in self._slots] or [np.zeros(0)]))

    def solve(self, limit_seconds: float, device_weight: float, latency_weight: float) -> Path | None:
        """The path of least weight with no stage above the limit; None if there is none."""
        # What does not fit has infinite busy seconds, which no limit allows.
        limit_seconds = min(limit_seconds, self.limit_seconds, float(np.finfo(np.float64).max))
        within = int(np.searchsorted(self._least_busy, limit_seconds, side="right"))
        if not self.counts or not within or not self._slots:
            return None
        weights = []
        for slot in self._slots:
            devices = float(slot.degree * self.num_replicas)
            latency, busy = slot.latency[:, :within], slot.busy[:, :within]
            # What does not fit has finite latency and infinite busy seconds.
            weights.append(np.where(busy <= limit_seconds, latency_weight * latency + device_weight * devices, np.inf))
        cheap = np.minimum.reduce(weights)
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
        for segment, n in table.follow(count):
            g = int(self._signature[segment])
            best = min(range(len(weights)), key=lambda v: float(weights[v][n - 1, g]))
            stages.append((CountedStage(segment, n, int(self._slots[best].priced[n - 1, g])), best, g))
        return self._path(stages)

    def segments(self, within: int) -> npt.NDArray[np.intp]:
        """Indices of the segments whose signature is one of the first so many."""
        return np.flatnonzero(self._signature < within)

    def signatures(self, segments: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Places of segments' signatures in the order of the tables."""
        return self._signature[segments]

    def _path(self, found: list[tuple[CountedStage, int, int]]) -> Path:
        where = [(self._slots[slot], (stage.in_flight - 1, g)) for stage, slot, g in found]
        return Path(
            tuple(stage for stage, _, _ in found),
            busy_seconds=max(float(slot.busy[at]) for slot, at in where),
            latency_seconds=sum(float(slot.latency[at]) for slot, at in where),
            devices=sum(slot.degree for slot, _ in where) * self.num_replicas,
        )


@dataclass(frozen=True)
class _Slot:
    """One tensor-parallel degree with the sharding that is best there: [N, G].

    Attributes:
        priced: Which of the ways to run a stage it is.
    """

    degree: int
    latency: Floats
    busy: Floats
    priced: npt.NDArray[np.intp]


def _undominated(priced: list[Priced], latency: Floats, busy: Floats) -> list[_Slot]:
    """Ways of one degree take the same devices: where one is no slower in both respects, others are left out."""
    slots = []
    for degree in dict.fromkeys(p.degree for p in priced):
        ways = np.array([v for v, p in enumerate(priced) if p.degree == degree])
        own_latency, own_busy = latency[ways], busy[ways].copy()
        while np.isfinite(own_busy).any():
            best = own_busy.argmin(axis=0)[None]
            least_latency = np.take_along_axis(own_latency, best, axis=0)
            least_busy = np.take_along_axis(own_busy, best, axis=0)
            finite = np.where(np.isfinite(least_busy), least_latency, 0.0)
            slots.append(_Slot(degree, finite[0], least_busy[0], ways[best[0]]))
            own_busy[(own_latency >= least_latency) | ~np.isfinite(own_busy)] = np.inf
    return slots


class _Table:
    """least[n][i]: the least weight of n stages from state i to the end; infinite where there are none."""

    def __init__(self, engine: Counted, cheap: Floats, within: int, num_stages: int | None = None) -> None:
        """
        Args:
            num_stages: Of the plan, where stages have to be told apart from the front.
            cheap: [N, G]: of a segment by its count from the end and its signature.
            within: Signatures beyond have no stage within the limit.
        """
        prices = engine.prices
        # Holding more microbatches never gets cheaper, so what is not to be had for one is not to be had.
        segments = engine.segments(within)
        self._segments = segments[np.isfinite(cheap[0])[engine.signatures(segments)]]
        self._start, self._stop = prices.start[self._segments], prices.stop[self._segments]
        self._cheap = cheap[:, engine.signatures(self._segments)]
        if num_stages is not None:
            assert engine.pinned is not None
            self._cheap = only_pinned(self._cheap[:num_stages], engine.pinned[self._segments], num_stages)
        first = np.flatnonzero(np.diff(self._start, prepend=-1))
        begin = self._start[first]
        self.least: list[Floats] = [np.full(prices.num_states, np.inf)]
        self.least[0][-1] = 0.0
        for n in range(1, len(self._cheap) + 1):
            value = np.full(prices.num_states, np.inf)
            if len(first):
                value[begin] = np.minimum.reduceat(self._through(n, slice(None)), first)
            if not np.isfinite(value).any():
                break
            self.least.append(value)

    def follow(self, count: int) -> list[tuple[int, int]]:
        """(segment, count from the end) of the stages of the best path with so many."""
        found, state = [], 0
        for n in range(count, 0, -1):
            here = slice(*np.searchsorted(self._start, [state, state + 1]))
            best = here.start + int(self._through(n, here).argmin())
            found.append((int(self._segments[best]), n))
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
