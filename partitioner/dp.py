"""`method="dp"`: the whole space of plans, with a certificate.

Outer choices are the numbers of replicas; for each, `counted.py` and `dual.py` search cuts, tensor-parallel degrees,
recomputation and sharding at once. Of the numbers of replicas only those matter that share the microbatches out
differently: 3 and 4 replicas both leave 3 of 9 microbatches to the busiest, and 3 take fewer devices. Only where
replicas share out state, 4 may fit where 3 do not: all the larger numbers of one share are searched as one, with the
time of the smallest and the memory of the largest of them, which bounds them all. Numbers are
tried in the order of a bound that needs no search, and left out where that is above the best plan found so far::

    replicas     16       32        8       64   ...
    work bound   6.1 s    6.2 s     6.9 s   7.4 s          best plan so far: 6.4 s, so the last two are left out
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpart.partitioner.counted import Counted, Path
from dpart.partitioner.dual import Scan, probe, scan
from dpart.partitioner.evaluate import Shape
from dpart.partitioner.plan import Bound, Pin
from dpart.partitioner.prices import Prices, stage_shape

_KEPT_PER_COUNT, _KEPT, _KEPT_LARGER = 6, 12, 3
"""Plans of each number of replicas, and in all, that are kept for the simulator to rank."""


@dataclass(frozen=True)
class Outcome:
    """What the search found.

    Attributes:
        plans: Shapes with the objective that the search counted, the best first.
        bounds: The parts of the proof.
        lower_bound_seconds: No plan with equal replicas over these cuts has a smaller objective.
        timed_out: Whether the time limit stopped it.
        proposed: Shapes that may fit, and may be good.
    """

    plans: tuple[tuple[Shape, float], ...]
    bounds: tuple[Bound, ...]
    lower_bound_seconds: float
    timed_out: bool
    proposed: tuple[Shape, ...] = ()


def search(
    prices: Prices,
    num_devices: int,
    *,
    stages: range | None = None,
    replicas: Sequence[int] | None = None,
    pins: Sequence[Pin] = (),
    upper_seconds: float = np.inf,
    tolerance: float = 1e-4,
    deadline: float = np.inf,
    progress: Callable[[str], None] | None = None,
) -> Outcome:
    """The best plans with equal replicas, and how good a plan can be.

    Args:
        stages: Counts of stages that are allowed; None for any.
        replicas: Numbers of replicas to look at; None for all that differ.
        pins: Stages of some layers.
        upper_seconds: An objective that some plan is known to reach.
        deadline: A value of ``time.perf_counter()``; past it the bounds are as they are.
    """
    say = progress or (lambda text: None)
    widest = max(prices.budgets(num_devices))
    counts = replica_counts(prices.terms.num_microbatches, widest) if replicas is None else list(replicas)
    bounds: list[Bound] = []
    found: list[tuple[float, Counted, Path]] = []
    upper, timed_out = upper_seconds, False
    multipliers: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    probed = _probe(prices, num_devices, counts, stages, pins, upper)
    upper = min([upper, *probed.values()])
    rest = sorted((d for d in counts if d not in probed), key=lambda d: work_bound(prices, d, num_devices))
    # What looks best comes first, then all others.
    first = sorted(probed, key=lambda d: probed[d])
    for count in (*first, *rest):
        bound = work_bound(prices, count, num_devices)
        timed_out |= time.perf_counter() > deadline
        if bound >= upper or timed_out:
            bounds.append(Bound(count, 0.0, None, (), bound, "work"))
            continue
        limit = upper - prices.work.path_seconds
        engine = Counted(prices, count, num_devices, stages=stages, pins=pins, limit_seconds=limit)
        say(f"{count} replicas, best {upper:.4g} s" if np.isfinite(upper) else f"{count} replicas")
        scanned = scan(
            engine,
            upper_seconds=upper,
            tolerance=tolerance,
            deadline=deadline,
            multipliers=multipliers,
            weights=weights,
        )
        multipliers, weights = _hint(scanned, multipliers), scanned.weights
        bounds += _bounds(count, scanned)
        paths = sorted(scanned.paths, key=lambda path: path.objective_seconds)[:_KEPT_PER_COUNT]
        found += [(path.objective_seconds, engine, path) for path in paths]
        found = sorted(found, key=lambda item: item[0])[:_KEPT]
        upper = min([upper, *(path.objective_seconds for path in paths)])
    maybe: list[tuple[float, range, Shape]] = []
    larger = larger_counts(prices, widest) if replicas is None else []
    for own in larger:
        bound = work_bound(prices, own.start, num_devices)
        timed_out |= time.perf_counter() > deadline
        if bound >= upper or timed_out:
            bounds.append(Bound(own.start, 0.0, None, (), bound, "work"))
            continue
        limit = upper - prices.work.path_seconds
        engine = Counted(
            prices, own.start, num_devices, stages=stages, pins=pins, limit_seconds=limit, sharers=own.stop - 1
        )
        say(f"{own.start} to {own.stop - 1} replicas")
        scanned = scan(
            engine,
            upper_seconds=upper,
            only_bounds=True,
            tolerance=tolerance,
            deadline=deadline,
            multipliers=multipliers,
            weights=weights,
        )
        bounds += _bounds(own.start, scanned)
        best = min(scanned.paths, key=lambda path: path.objective_seconds, default=None)
        if best is not None and best.objective_seconds < upper:
            maybe.append((best.objective_seconds, own, shape(engine, best)))
    maybe.sort(key=lambda item: item[0])
    proposed = tuple(
        tuple(replace(stage, num_replicas=count) for stage in stages_of)
        for _, own, stages_of in maybe[:_KEPT_LARGER]
        for count in sorted({own.start, own[len(own) // 2], own.stop - 1})
    )
    counts = [*counts, *(own.start for own in larger)]
    if np.isfinite(upper):
        # What has no plan at all has none as good as the best.
        none = [count for count in counts if count not in {b.num_replicas for b in bounds}]
        bounds += [Bound(count, 0.0, None, (0.0,) * len(prices.pools), upper, "dual") for count in none]
    lower = min((b.bound_seconds for b in bounds), default=np.inf)
    plans = tuple((shape(engine, path), value) for value, engine, path in found)
    return Outcome(plans, tuple(bounds), lower, timed_out, proposed)


def _probe(
    prices: Prices, num_devices: int, counts: Sequence[int], stages: range | None, pins: Sequence[Pin], upper: float
) -> dict[int, float]:
    """For numbers of replicas that are powers of two, the middle ones first: an objective that can be had."""
    powers = [d for d in counts if d & (d - 1) == 0]
    found = {}
    for count in sorted(powers, key=lambda d: abs(powers.index(d) - len(powers) / 3)):
        if work_bound(prices, count, num_devices) < upper:
            limit = upper - prices.work.path_seconds
            path = probe(Counted(prices, count, num_devices, stages=stages, pins=pins, limit_seconds=limit))
            if path is not None:
                # A hair more, so that it is found again.
                found[count] = path.objective_seconds * (1 + 1e-9)
                upper = min(upper, found[count])
    return found


def replica_counts(num_microbatches: int, num_devices: int) -> list[int]:
    """The smallest number of replicas for each count of microbatches that the busiest one may have."""
    shares: dict[int, int] = {}
    for count in range(min(num_microbatches, num_devices), 0, -1):
        shares[-(-num_microbatches // count)] = count
    return sorted(shares.values())


def larger_counts(prices: Prices, num_devices: int) -> list[range]:
    """Of each count of microbatches that the busiest replica may have, all numbers of replicas but the smallest.

    None where replicas share nothing out.
    """
    if not max(prices.freedom.shardings):
        return []
    smallest = replica_counts(prices.terms.num_microbatches, num_devices)
    ends = [*smallest[1:], min(prices.terms.num_microbatches, num_devices) + 1]
    return [range(first + 1, end) for first, end in zip(smallest, ends, strict=True) if end > first + 1]


def work_bound(prices: Prices, num_replicas: int, num_devices: int) -> float:
    """A lower bound of the objective from computation alone.

    The stages of one replica each share ``num_devices / num_replicas`` devices, and the busiest does no less than
    the mean; nor less than the largest layer. A microbatch passes every layer. Unlike devices count by their speed.
    """
    own, work = prices.terms.own_microbatches(num_replicas), prices.work
    mean = work.device_seconds * num_replicas / prices.power(num_devices)
    return (own - 1) * max(mean, work.largest_seconds) + work.path_seconds


def shape(engine: Counted, path: Path) -> Shape:
    """The stages of a path by the names of their layers."""
    return tuple(
        stage_shape(engine.prices, stage.segment, engine.priced[stage.priced], stage.in_flight) for stage in path.stages
    )


def _hint(scanned: Scan, known: tuple[float, ...]) -> tuple[float, ...]:
    """Multipliers to begin with for the next number of replicas: the highest; of several pools those that bind."""
    good = [i for i in scanned.intervals if i.multipliers and np.isfinite(i.multipliers).all()]
    if good and len(good[0].multipliers) > 1:
        return min(good).multipliers
    return (max([*known, *(i.multipliers[0] for i in good)]),) if good else known


def _bounds(count: int, scanned: Scan) -> list[Bound]:
    return [
        Bound(
            count,
            i.floor_seconds,
            i.limit_seconds if np.isfinite(i.limit_seconds) else None,
            tuple(m if np.isfinite(m) else 0.0 for m in i.multipliers),
            i.bound_seconds,
            "dual" if i.multipliers else "counted",
        )
        for i in scanned.intervals
    ]
