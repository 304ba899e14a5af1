"""How good a plan can be at all: a lower bound of the objective, interval by interval of the bottleneck.

The objective is ``max busy + sum latency`` under at most K devices. Take the plans whose bottleneck lies in
[floor, limit]: none is better than floor + L(limit), where L prices devices instead of counting them
(Lagrange)::

    L(limit) = max over multiplier of  min over plans with no stage above limit of
               sum latency + multiplier * (devices - K)

Unlike devices have a multiplier each (``multipliers.py``); a few are counted instead (``budgeted.py``). Intervals are
laid end to end from the smallest bottleneck that K devices can reach to where the floor alone is above the best plan
known. The least of their bounds holds for all plans; every plan met on the way that has no more than
K devices is a candidate. The interval with the weakest bound is split, until it is as good as the best plan.
"""

import heapq
import math
import time
from dataclasses import dataclass, field

import numpy as np

from dpart.partitioner.counted import Counted, Path
from dpart.partitioner.multipliers import best_multipliers, proof_of_too_few

_MAX_ITERATIONS = 40
_PROBED = 0.05
_MAX_REPAIRS, _DEARER = 24, 1.1


@dataclass(frozen=True, order=True)
class Interval:
    """A proved bound of all plans whose bottleneck is above the floor, or at it, and not above the limit.

    Attributes:
        bound_seconds: No such plan has a smaller objective.
        multipliers: Seconds per device of each pool: the prices at which the bound was found.
    """

    bound_seconds: float
    floor_seconds: float
    limit_seconds: float
    multipliers: tuple[float, ...]


@dataclass(frozen=True)
class Scan:
    """What a scan found.

    Attributes:
        paths: Plans within the devices, the best last.
        intervals: In the order of their floors; the last one has no upper end.
        bound_seconds: The least of their bounds.
        weights: Of a device of each pool, by which they were last proved too few; empty for none.
    """

    paths: tuple[Path, ...]
    intervals: tuple[Interval, ...]
    bound_seconds: float
    weights: tuple[float, ...] = ()


@dataclass
class _Search:
    """The state of one scan."""

    engine: Counted
    upper_seconds: float
    tolerance: float = 0.0
    hint: tuple[float, ...] = ()
    only_bounds: bool = False
    paths: list[Path] = field(default_factory=list)
    weights: tuple[float, ...] = ()

    def meet(self, path: Path | None) -> Path | None:
        """Keeps a plan that fits and is better than all so far."""
        if path is not None and all(q <= k for q, k in zip(path.by_pool, self.engine.budgets, strict=True)):
            if path.objective_seconds < self.upper_seconds or not self.paths:
                self.paths.append(path)
            if not self.only_bounds or np.isinf(self.upper_seconds):
                self.upper_seconds = min(self.upper_seconds, path.objective_seconds)
        return path

    def dual(self, limit_seconds: float, wanted_seconds: float) -> tuple[float, tuple[float, ...]]:
        """(bound of the latency, multipliers): the best, or the first ones whose bound is all that is wanted."""
        if self.engine.is_countable:
            path = self.meet(self.engine.fastest(limit_seconds))
            return (np.inf if path is None else path.latency_seconds), ()
        if len(self.engine.budgets) == 1:
            bound, multiplier = self._dual(limit_seconds, wanted_seconds, *self.hint)
            return bound, (multiplier,)
        bound, multipliers = best_multipliers(
            lambda weights, latency: self.meet(self.engine.solve(limit_seconds, weights, latency)),
            self.engine.budgets,
            self.hint,
            wanted_seconds=wanted_seconds,
            tolerance_seconds=self.tolerance / 4 * self.upper_seconds if np.isfinite(self.upper_seconds) else 0.0,
        )
        self.hint = multipliers
        return bound, multipliers

    def proves_too_few(self, limit_seconds: float) -> bool:
        """Whether the devices are proved too few for a limit; `weights` then are those that prove it."""
        if len(self.engine.budgets) == 1:
            few = self.meet(self.engine.solve(limit_seconds, 1.0, 0.0))
            return few is None or few.devices > self.engine.num_devices
        found = proof_of_too_few(
            lambda weights, latency: self.meet(self.engine.solve(limit_seconds, weights, latency)),
            self.engine.budgets,
            self.weights or self.engine.prices.speeds,
        )
        self.weights = found or self.weights
        return found is not None

    def _dual(self, limit_seconds: float, wanted_seconds: float, hint: float = 0.0) -> tuple[float, float]:
        """The same where all devices are alike.

        Two plans, one of too many devices and one of few enough, are two lines over the multiplier; the search is
        solved where they cross, which finds a plan below the crossing or proves that the bound is there. It starts at
        the last multiplier that was good.
        """
        k, engine = self.engine.num_devices, self.engine
        best, at = -np.inf, 0.0
        fast = few = None
        if hint > 0:
            found = self.meet(engine.solve(limit_seconds, hint, 1.0))
            if found is None:
                return np.inf, 0.0
            best, at = found.latency_seconds + hint * (found.devices - k), hint
            if best >= wanted_seconds:
                return best, at
            fast, few = (found, None) if found.devices > k else (None, found)
        fast = fast or self.meet(engine.solve(limit_seconds, 0.0, 1.0))
        if fast is None:
            return np.inf, 0.0
        if fast.devices <= k:
            return fast.latency_seconds, 0.0
        if few is None:
            few = self.meet(engine.solve(limit_seconds, 1.0, 0.0))
            assert few is not None
            if few.devices > k:
                return np.inf, np.inf
        for _ in range(_MAX_ITERATIONS):
            multiplier = (few.latency_seconds - fast.latency_seconds) / (fast.devices - few.devices)
            found = self.meet(engine.solve(limit_seconds, multiplier, 1.0))
            assert found is not None
            value = found.latency_seconds + multiplier * (found.devices - k)
            if value > best:
                best, at = value, multiplier
            crossing = few.latency_seconds + multiplier * (few.devices - k)
            if best >= wanted_seconds or value >= crossing - 1e-12 * abs(crossing):
                break
            if found.devices > k:
                fast = found
            else:
                few = found
        self.hint = (at,)
        return best, at


def scan(
    engine: Counted,
    *,
    upper_seconds: float = np.inf,
    only_bounds: bool = False,
    tolerance: float = 1e-4,
    deadline: float = np.inf,
    multipliers: tuple[float, ...] = (),
    weights: tuple[float, ...] = (),
) -> Scan:
    """Bounds all plans of an engine, and finds good ones.

    Args:
        upper_seconds: An objective that some plan is known to reach.
        tolerance: Relative distance of the bound from the best plan that is close enough.
        deadline: A value of ``time.perf_counter()`` past which intervals are no longer split.
        multipliers: To begin with: what was good for another number of replicas; empty for none.
        weights: The same.
        only_bounds: The engine's plans need not fit: they are of no use but as bounds.
    """
    search = _Search(engine, upper_seconds, tolerance, multipliers, weights=weights, only_bounds=only_bounds)
    free = (0.0,) * len(engine.budgets)
    # Beyond the engine's limit there are only plans that are no better, for whatever a microbatch's way takes.
    beyond = [Interval(upper_seconds, engine.limit_seconds, np.inf, free)] if np.isfinite(engine.limit_seconds) else []
    fastest = search.meet(engine.solve(np.inf, 0.0, 1.0))
    if fastest is None:
        nothing = [Interval(upper_seconds, 0.0, engine.limit_seconds, free)] * (len(free) > 1 and bool(beyond))
        return Scan((), (*nothing, *beyond), upper_seconds if beyond else np.inf, weights)
    least_latency = fastest.latency_seconds
    left = search.upper_seconds - least_latency
    if search.proves_too_few(left) or not len(engine.busy_values):
        # Nothing as good as what is known can be had: a plan needs a larger bottleneck than is left for one.
        intervals = [Interval(left + least_latency, left, engine.limit_seconds, free), *beyond]
    else:
        values = engine.busy_values
        low = _smallest_limit(search, values, left)
        top = max(low, int(np.searchsorted(values, left)) - 1)
        limit = float(values[top]) if top + 1 < len(values) else engine.limit_seconds
        intervals = [_interval(search, float(values[low]), limit), *beyond]
        if top + 1 < len(values):
            floor = float(values[top])
            intervals.append(Interval(floor + least_latency, floor, engine.limit_seconds, free))
        intervals = _refine(search, intervals, tolerance, deadline)
        if len(free) > 1:
            _repair(search, min(intervals))
    # An unbounded part has no plan at all: too few devices for its limit, and so for any smaller one.
    intervals = sorted((i for i in intervals if np.isfinite(i.bound_seconds)), key=lambda i: i.floor_seconds)
    if len(free) > 1 and intervals and intervals[0].floor_seconds > 0:
        intervals.insert(0, _none_below(search, intervals[0].floor_seconds, least_latency))
    bound = min((i.bound_seconds for i in intervals), default=np.inf)
    return Scan(tuple(search.paths), tuple(intervals), bound, search.weights)


def _interval(search: _Search, floor: float, limit: float) -> Interval:
    latency, multipliers = search.dual(limit, search.upper_seconds * (1 - search.tolerance) - floor)
    return Interval(floor + latency, floor, limit, multipliers)


def _repair(search: _Search, weakest: Interval) -> None:
    """Looks for a plan within unlike devices near the prices of a bound, at higher ones of what it has too many of."""
    prices = np.maximum(weakest.multipliers, 1e-3 * weakest.bound_seconds / np.maximum(search.engine.budgets, 1))
    for _ in range(_MAX_REPAIRS):
        found = search.meet(search.engine.solve(weakest.limit_seconds, prices.tolist(), 1.0))
        excess = np.zeros(0) if found is None else np.array(found.by_pool) - search.engine.budgets
        if not (excess > 0).any():
            break
        prices = np.where(excess > 0, prices * _DEARER, prices)


def _none_below(search: _Search, floor: float, latency: float) -> Interval:
    """Below what is proved too little for unlike devices: prices so high that no plan is as good as what is known.

    Args:
        latency: Of some plan.
    """
    limit, engine = float(np.nextafter(floor, 0.0)), search.engine
    enough = search.upper_seconds if np.isfinite(search.upper_seconds) else 1e3 * (floor + latency)
    for weights in (search.weights, engine.prices.speeds):
        few = engine.solve(limit, weights, 0.0) if weights else None
        if not weights or few is None:
            continue
        short = float(np.array(weights) @ (np.array(few.by_pool) - engine.budgets))
        if short > 1e-9 * float(np.array(weights) @ np.array(engine.budgets)):
            prices = np.array(weights) * (enough / short)
            found = engine.solve(limit, prices.tolist(), 1.0)
            assert found is not None, "there is a plan at other prices"
            bound = found.latency_seconds + float(prices @ (np.array(found.by_pool) - engine.budgets))
            return Interval(bound, 0.0, limit, tuple(prices.tolist()))
    bound, multipliers = search.dual(limit, enough)
    return Interval(min(bound, enough), 0.0, limit, multipliers)


def _smallest_limit(search: _Search, values: np.ndarray, left: float) -> int:
    """Index of a value, the smallest that a plan can have as its bottleneck or little less: none before it can be."""
    low, high = 0, min(len(values) - 1, int(np.searchsorted(values, left)))
    while low < high and values[high] > values[low] * (1 + _PROBED):
        between = math.sqrt(values[low] * values[high]) if values[low] > 0 else values[high] / 2
        middle = min(max(int(np.searchsorted(values, between)), low), high - 1)
        if search.proves_too_few(values[middle]):
            low = middle + 1
        else:
            high = middle
    return low


def _refine(search: _Search, intervals: list[Interval], tolerance: float, deadline: float) -> list[Interval]:
    """Splits the weakest interval until the bound is close enough, or no interval can be split."""
    values, done = search.engine.busy_values, []
    heap = list(intervals)
    heapq.heapify(heap)
    while heap and heap[0].bound_seconds < search.upper_seconds * (1 - tolerance):
        weakest = heapq.heappop(heap)
        first = int(np.searchsorted(values, weakest.floor_seconds))
        last = min(int(np.searchsorted(values, weakest.limit_seconds, side="right")), len(values)) - 1
        # An interval this narrow loses nothing to speak of by its width: what is missing is the price's (duality) gap.
        if (
            last <= first + 1
            or values[last] <= weakest.floor_seconds * (1 + tolerance / 4)
            or time.perf_counter() > deadline
        ):
            done.append(weakest)
            # Of many devices alike the gap is small, and better plans are met on the way: go on.
            if time.perf_counter() > deadline or len(search.engine.budgets) > 1:
                break
            continue
        between = math.sqrt(weakest.floor_seconds * float(values[last]))
        middle = min(max(int(np.searchsorted(values, between, side="right")) - 1, first + 1), last - 1)
        heapq.heappush(heap, _interval(search, weakest.floor_seconds, float(values[middle])))
        upper = (float(values[middle]), weakest.limit_seconds)
        heapq.heappush(heap, _interval(search, *upper))
    return [*heap, *done]


def probe(engine: Counted) -> Path | None:
    """A plan with the smallest bottleneck that the devices allow: quickly found, and often among the best."""
    search = _Search(engine, np.inf)
    if search.proves_too_few(np.inf) or not search.paths:
        return None
    low, high = 0.0, search.paths[-1].busy_seconds
    while high - low > _PROBED * high:
        middle = (low + high) / 2
        if search.proves_too_few(middle):
            low = middle
        else:
            high = middle
    search.meet(engine.solve(high, 1.0, 1e-9))
    return search.paths[-1]
