"""The default search: candidates from the whole space of plans, and the certificate that bounds them all.

Plans with equal replicas come from ``dp.py``, with a proof. Where devices are few, ``uneven.py`` covers every plan,
and its optimum is the bound. Where levels of links are nested, the proof lets neighbouring stages exchange over the
fastest link that their sizes allow; candidates are searched under that and under the slowest as well. Unlike devices
are searched kind by kind first, each alone, then together.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dpart.partitioner import dp, uneven
from dpart.partitioner.baselines import baselines
from dpart.partitioner.candidates import Candidate, Space, Wanted, describe
from dpart.partitioner.evaluate import Evaluator, Shape
from dpart.partitioner.plan import Bound, Certificate
from dpart.partitioner.prices import Freedom, Prices
from dpart.partitioner.setting import Setting

_MOST_BYTES = 1 << 60
_FEW_DEVICES = 16
_MAX_PROPOSED = 5
_MANY_DEVICES, _MAX_PROPOSED_OF_MANY = 256, 3


@dataclass(frozen=True)
class Certified:
    """What the search gave.

    Attributes:
        lower_bound_seconds: No plan of the space has a smaller objective; infinite if the space has no plan.
        space: The plans that the bound is about, in words.
    """

    candidates: tuple[Candidate, ...]
    bounds: tuple[Bound, ...]
    lower_bound_seconds: float
    space: str
    notes: tuple[str, ...]

    def certificate(self, objective_seconds: float, best_objective_seconds: float) -> Certificate:
        """For the plan that was chosen."""
        # Search and evaluation add up the same numbers in different orders.
        lower = min(self.lower_bound_seconds, best_objective_seconds)
        return Certificate(
            space=self.space,
            objective_seconds=objective_seconds,
            best_objective_seconds=best_objective_seconds,
            lower_bound_seconds=lower,
            gap=best_objective_seconds / lower - 1 if lower else 0.0,
            bounds=self.bounds,
        )


def search(made: Setting, *, time_limit_seconds: float, tolerance: float) -> Certified:
    """Candidates and bounds; baselines among the candidates."""
    space, freedom, wanted, evaluator = made.space, made.freedom, made.wanted, made.evaluator
    deadline = time.perf_counter() + time_limit_seconds
    prices = space.prices(freedom)
    stages = _stage_counts(wanted)
    replicas = sorted(set(wanted.replicas)) if wanted.replicas is not None else None
    usual = baselines(prices, space.num_devices)
    known = best_known(usual, evaluator, wanted)
    equal = replicas is None or len(replicas) == 1

    def search_equal(of: Prices, num_devices: int = space.num_devices) -> dp.Outcome:
        return dp.search(
            of,
            num_devices,
            stages=stages,
            replicas=replicas,
            pins=wanted.pins,
            upper_seconds=known,
            tolerance=tolerance,
            deadline=deadline,
            progress=space.progress,
        )

    plans: list[tuple[Shape, float]] = []
    if equal and len(prices.pools) > 1:
        for own in prices.pools:
            space.progress(f"plans on {own.topology.num_devices} x {own.topology.device.name} alone")
            plans += search_equal(own, own.topology.num_devices).plans if own.degrees else ()
        known = min(known, best_known((Candidate("", shape) for shape, _ in plans), evaluator, wanted))
    outcome = search_equal(prices) if equal else None
    plans += outcome.plans if outcome else ()
    if outcome and space.is_guessed and not _is_settled(outcome, evaluator):
        plans += search_equal(space.prices(freedom, is_outermost=True)).plans
    bounds, lower = (outcome.bounds, outcome.lower_bound_seconds) if outcome else ((), 0.0)
    notes = ["The time limit stopped the search: the bound is weaker than it could be."] * bool(
        outcome and outcome.timed_out
    )
    covered = equal and wanted.replicas is not None
    if space.num_devices <= _FEW_DEVICES and wanted.replicas is None and not wanted.pins:
        space.progress("plans with different replicas")
        found = _uneven(space, freedom, wanted, plans)
        if found is not None:
            bounds, lower, covered = (Bound(None, 0.0, None, (), found, "exhausted"),), found, True
    if len(prices.pools) > 1:
        # Where stages of several kinds of devices really stand tells more than what a search took them to cost.
        plans = [(shape, best_known([Candidate("", shape)], evaluator, wanted)) for shape in dict(plans)]
    plans.sort(key=lambda plan: plan[1])
    most = _MAX_PROPOSED if space.num_devices <= _MANY_DEVICES else _MAX_PROPOSED_OF_MANY
    named = [
        Candidate(describe(shape), shape)
        for found_shape in _distinct(shape for shape, _ in plans)[:most]
        for shape in _distinct((_plainer(found_shape, freedom, evaluator), found_shape))
    ]
    proposed = [Candidate(describe(shape), shape) for shape in _distinct(outcome.proposed if outcome else ())]
    return Certified(
        candidates=(
            *usual,
            *named,
            *proposed,
        ),
        bounds=tuple(bounds),
        lower_bound_seconds=lower,
        space=in_words(prices, wanted, covered=covered),
        notes=tuple(notes),
    )


def _plainer(shape: Shape, freedom: Freedom, evaluator: Evaluator) -> Shape:
    """The plan without sharding, if it fits so: in a step of one microbatch a replica, sharding may cost nothing."""
    if 0 not in freedom.shardings or not any(stage.sharding for stage in shape) or not evaluator.packs(shape):
        return shape
    plain = tuple(replace(stage, sharding=0) for stage in shape)
    return shape if evaluator.evaluate(plain).short_bytes else plain


def best_known(usual: Iterable[Candidate], evaluator: Evaluator, wanted: Wanted) -> float:
    """The smallest objective of plans that fit and are wanted; a hair more, so that they are found again."""
    best = np.inf
    for candidate in usual:
        if wanted.allows(candidate.shape) and evaluator.packs(candidate.shape):
            evaluation = evaluator.evaluate(candidate.shape)
            if not evaluation.short_bytes:
                best = min(best, evaluation.objective_seconds * (1 + 1e-9))
    return best


def _is_settled(outcome: dp.Outcome, evaluator: Evaluator) -> bool:
    """Whether the best plan costs, where its stages really stand, what the search took it to cost."""
    if not outcome.plans or not evaluator.packs(outcome.plans[0][0]):
        return not outcome.plans
    shape, objective = outcome.plans[0]
    return evaluator.evaluate(shape).objective_seconds <= objective * (1 + 1e-9)


def least_memory(space: Space, freedom: Freedom, wanted: Wanted) -> int:
    """The least limit in bytes under which some plan fits; for few devices, by halving."""
    low, high = space.terms.memory_limit_bytes, space.terms.memory_limit_bytes
    while not _some_plan(space, freedom, wanted, high):
        low, high = high, 2 * high
        if high > _MOST_BYTES:
            return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _some_plan(space, freedom, wanted, middle) else (middle, high)
    return high


def _some_plan(space: Space, freedom: Freedom, wanted: Wanted, limit: int) -> bool:
    """Whether any plan fits into this limit."""
    prices = replace(space, terms=replace(space.terms, memory_limit_bytes=limit, pool_limits_bytes=())).prices(freedom)
    replicas = sorted(set(wanted.replicas)) if wanted.replicas is not None else None
    stages = {"num_stages": wanted.num_stages, "max_stages": wanted.max_stages}
    if replicas is None:
        return uneven.fits(prices, space.num_devices, **stages)
    return bool(dp.search(prices, space.num_devices, replicas=replicas, stages=_stage_counts(wanted)).plans)


def _uneven(space: Space, freedom: Freedom, wanted: Wanted, plans: list[tuple[Shape, float]]) -> float | None:
    """Adds the best plan of all to `plans`; the proved least objective, or None where the search was cut short."""
    value: float | None = None
    for is_outermost in (False, True) if space.is_guessed else (False,):
        known = min((objective for _, objective in plans), default=np.inf) if not is_outermost else np.inf
        found = uneven.search(
            space.prices(freedom, is_outermost=is_outermost),
            space.num_devices,
            upper_seconds=known * (1 + 1e-12),
            num_stages=wanted.num_stages,
            max_stages=wanted.max_stages,
        )
        if found.plan is not None:
            plans.append(found.plan)
        if not is_outermost and found.complete:
            value = min(known, found.plan[1] if found.plan is not None else np.inf)
    return value


def _stage_counts(wanted: Wanted) -> range | None:
    exactly = len(wanted.replicas) if wanted.replicas is not None else wanted.num_stages
    if exactly is not None:
        return range(exactly, exactly + 1)
    return range(1, wanted.max_stages + 1) if wanted.max_stages is not None else None


def _distinct(shapes: Iterable[Shape]) -> list[Shape]:
    return list(dict.fromkeys(shapes))


def in_words(prices: Prices, wanted: Wanted, *, covered: bool) -> str:
    """The plans that a bound is about."""
    cuts, freedom = prices.contraction, prices.allowed
    where = f"{cuts.num_cuts} of {cuts.num_places} cuts" if not cuts.complete else f"all {cuts.num_cuts} cuts"
    if cuts.one_order:
        where += " of one order of the layers"
    parts = [where]
    if wanted.replicas is not None:
        parts.append("the replicas asked for")
    else:
        parts.append("any replicas" if covered else "equal replicas in all stages")
    if wanted.num_stages or wanted.max_stages:
        parts.append("the stages asked for")
    if wanted.pins:
        parts.append("the pins asked for")
    if len(prices.pools) > 1:
        parts.append("each stage on one kind of device")
    parts.append(f"tensor-parallel degrees {', '.join(map(str, freedom.degrees))}")
    parts.append("recomputation of any units" if freedom.recompute else "no recomputation")
    sharded = [f"ZeRO-{z}" for z in freedom.shardings if z]
    parts.append(f"{', '.join(sharded)} or no sharding" if sharded else "no sharding")
    return f"{prices.terms.schedule}, {prices.terms.num_microbatches} microbatches: " + "; ".join(parts)
