"""Checks a plan's certificate: every number of it is computed again, from the profile, by other means.

The plan is evaluated afresh; each interval's bound is solved again at its recorded price by a plain table over pairs of
states, without signatures, without leaving out segments, and from the first state to the last, where the search goes
the other way. Then the parts must cover all plans: for every number of replicas, from the smallest bottleneck that the
devices allow to the top, end to end.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpart.partitioner import uneven
from dpart.partitioner.counted import pinned_stages
from dpart.partitioner.crossings import chained
from dpart.partitioner.dp import larger_counts, replica_counts, work_bound
from dpart.partitioner.evaluate import Evaluator, shape_of
from dpart.partitioner.options import Floats
from dpart.partitioner.plan import Bound, Pin, Plan
from dpart.partitioner.prices import Prices

_CLOSE = 1e-9


@dataclass(frozen=True)
class Check:
    """One thing that was checked.

    Attributes:
        what: In words.
        stated: By the plan.
        found: By the check.
        holds: Whether they agree.
    """

    what: str
    stated: str
    found: str
    holds: bool


def check(
    plan: Plan, prices: Prices, evaluator: Evaluator, num_devices: int, progress: Callable[[str], None] | None = None
) -> list[Check]:
    """All checks of a plan that has a certificate; it is proved if all of them hold.

    Args:
        prices: Of the plan's question, made from the profile.
        evaluator: Of the same.
    """
    certificate, question = plan.certificate, plan.question
    assert certificate is not None and question is not None
    say = progress or (lambda text: None)
    evaluation = evaluator.evaluate(shape_of(plan.stages))
    step = evaluator.step_seconds(evaluator.play(evaluation))
    limits = ", ".join(map(str, plan.pool_limits_bytes or (plan.memory_limit_bytes,)))
    checks = [
        _number("step of the plan", plan.step_seconds, step),
        _number("objective of the plan", certificate.objective_seconds, evaluation.objective_seconds),
        Check("memory", f"at most {limits} B", f"{evaluation.short_bytes} B too much", evaluation.short_bytes == 0),
    ]
    least = min((b.bound_seconds for b in certificate.bounds), default=0.0)
    lower = min(least, certificate.best_objective_seconds)
    checks.append(_number("lower bound, from its parts", certificate.lower_bound_seconds, lower))
    checks.append(_number("gap", certificate.gap, certificate.best_objective_seconds / lower - 1 if lower else 0.0))
    by_count: dict[int | None, list[Bound]] = defaultdict(list)
    for bound in certificate.bounds:
        by_count[bound.num_replicas].append(bound)
    if None in by_count:
        say("all plans")
        return [*checks, _exhausted(by_count[None], prices, num_devices, plan)]
    widest = max(prices.budgets(num_devices))
    wanted = list(question.replicas[:1]) if question.replicas else replica_counts(plan.num_microbatches, widest)
    sharers = {own.start: own.stop - 1 for own in larger_counts(prices, widest)} if not question.replicas else {}
    wanted += sharers
    missing = [count for count in wanted if count not in by_count]
    checks.append(Check("numbers of replicas covered", f"{len(by_count)}", f"{len(missing)} missing", not missing))
    stages = _stage_counts(plan, prices)
    for count, bounds in sorted((c, b) for c, b in by_count.items() if c is not None):
        say(f"{count} replicas")
        table = _Plain(prices, count, num_devices, stages, question.pins, sharers.get(count))
        checks += _of_count(count, bounds, table, work_bound(prices, count, num_devices))
    return checks


def _of_count(count: int, bounds: list[Bound], table: "_Plain", by_work: float) -> list[Check]:
    if [b.proof for b in bounds] == ["work"]:
        return [_at_least(f"{count} replicas, by work", bounds[0].bound_seconds, by_work)]
    prices, num_devices = table.prices, table.num_devices
    checks, reached = [], None
    for bound in sorted(bounds, key=lambda b: (b.floor_seconds, b.limit_seconds or np.inf)):
        limit = np.inf if bound.limit_seconds is None else bound.limit_seconds
        least = table.counted(limit) if bound.proof == "counted" else table.bound(limit, bound.multiplier_seconds)
        value = least + bound.floor_seconds
        name = f"{count} replicas, bottleneck {bound.floor_seconds:.6g} to {limit:.6g} s"
        checks.append(_at_least(name, bound.bound_seconds, value))
        if reached is None and bound.floor_seconds <= 0:
            pass
        elif reached is None:
            below = np.nextafter(bound.floor_seconds, 0)
            fewest = table.fewest(below)
            # Of unlike devices every count has to be proved, by prices.
            ok = fewest > num_devices and (len(prices.pools) == 1 or fewest == np.inf)
            checks.append(Check(f"{count} replicas, bottleneck below", f"more than {num_devices} devices",
                                f"{fewest:g} devices", ok))  # fmt: skip
        else:
            gap = table.has_between(reached, bound.floor_seconds)
            checks.append(Check(f"{name}: follows on the last", "no bottleneck between", str(gap), not gap))
        reached = limit if reached is None else max(reached, limit)
    if reached != np.inf:
        gap = table.has_between(reached or 0.0, np.inf)
        checks.append(Check(f"{count} replicas: up to the largest bottleneck", "none above", str(gap), not gap))
    return checks


def _exhausted(bounds: list[Bound], prices: Prices, num_devices: int, plan: Plan) -> Check:
    question = plan.question
    assert question is not None
    stated = bounds[0].bound_seconds
    found = uneven.search(
        prices,
        num_devices,
        upper_seconds=stated * (1 - _CLOSE),
        num_stages=question.num_stages,
        max_stages=question.max_stages,
    )
    holds = found.complete and found.plan is None
    return Check("every plan, with any replicas", f"none below {stated:.9g} s", "one" if found.plan else "none", holds)


def _stage_counts(plan: Plan, prices: Prices) -> range:
    question = plan.question
    assert question is not None
    exactly = len(question.replicas) if question.replicas else question.num_stages
    if exactly is not None:
        return range(exactly, exactly + 1)
    return range(1, (question.max_stages or prices.num_states) + 1)


def _number(what: str, stated: float, found: float) -> Check:
    return Check(what, f"{stated:.9g}", f"{found:.9g}", abs(stated - found) <= _CLOSE * max(abs(stated), 1e-12) + 1e-12)


def _at_least(what: str, stated: float, found: float) -> Check:
    return Check(what, f"at least {stated:.9g} s", f"{found:.9g} s", found >= stated * (1 - _CLOSE))


class _Plain:
    """The same minimum by the plainest programme: all pairs of states, from the first state on, and all of pools."""

    def __init__(
        self,
        prices: Prices,
        num_replicas: int,
        num_devices: int,
        stages: range,
        pins: Sequence[Pin],
        sharers: int | None,
    ) -> None:
        self._pinned = pinned_stages(prices, pins) if pins else None
        self.prices, self._num_replicas, self.num_devices = prices, num_replicas, num_devices
        self._budgets = tuple(most // num_replicas * num_replicas for most in prices.budgets(num_devices))
        most = min(prices.num_states - 1, sum(most // num_replicas for most in self._budgets))
        self._counts = [n for n in stages if n <= most]
        self._priced = prices.ways(num_replicas, max(self._counts, default=1), num_devices, sharers=sharers)
        self._chained = np.zeros(0, np.bool_)
        if len(self._budgets) > 1:
            member = prices.contraction.member
            self._chained = chained(prices.profile.graph, member, prices.start, prices.stop)

    def bound(self, limit: float, multipliers: Sequence[float]) -> float:
        """The least of latency and priced devices, less the price of all the devices there are."""
        if len(multipliers) != len(self._budgets) or min(multipliers) < 0:
            return -np.inf
        paid = sum(price * most for price, most in zip(multipliers, self._budgets, strict=True))
        return self._least(limit, multipliers, 1.0) - paid

    def counted(self, limit: float) -> float:
        """The least latency within the devices, each counted: from the first state on, by devices used so far."""
        if len(self._budgets) > 1 or self._pinned is not None or not self._counts:
            return -np.inf
        prices, units = self.prices, self._budgets[0] // self._num_replicas
        order = np.argsort(prices.stop, kind="stable")
        start, stop, signature = prices.start[order], prices.stop[order], prices.signature[order]
        ahead = np.full((units + 1, prices.num_states), np.inf)
        for n in range(max(self._counts), 0, -1):
            into = ahead.copy()
            if n in self._counts:
                into[0, 0] = 0.0
            ahead = np.full_like(into, np.inf)
            for priced in self._priced:
                latency, busy = priced.latency_seconds[n - 1], priced.busy_seconds[n - 1]
                weight = np.where(np.isfinite(busy) & (busy <= limit), latency, np.inf)[signature]
                here = np.flatnonzero(np.isfinite(weight))
                if len(here) and priced.degree <= units:
                    through = into[: units + 1 - priced.degree, start[here]] + weight[here]
                    first = np.flatnonzero(np.diff(stop[here], prepend=-1))
                    best = np.minimum.reduceat(through, first, axis=1)
                    ends = stop[here][first]
                    ahead[priced.degree :, ends] = np.minimum(ahead[priced.degree :, ends], best)
        return float(ahead[:, -1].min())

    def fewest(self, limit: float) -> float:
        """Devices that a plan within the limit needs."""
        return self._least(limit, (1.0,) * len(self._budgets), 0.0)

    def has_between(self, above: float, below: float) -> bool:
        """Whether a stage can have a busy time strictly between."""
        for priced in self._priced:
            busy = priced.busy_seconds
            if ((busy > above) & (busy < below) & np.isfinite(busy)).any():
                return True
        return False

    def _least(self, limit: float, device_weights: Sequence[float], latency_weight: float) -> float:
        """Of all counts of stages; where layers are pinned, count by count, as stages are then told apart."""
        if not self._counts:
            return np.inf
        weights = {n: self._weights(n, limit, device_weights, latency_weight) for n in range(1, max(self._counts) + 1)}
        if self._pinned is None:
            return self._from_front(weights, self._counts, None)
        return min(self._from_front(weights, [n], n) for n in self._counts)

    def _from_front(self, weights: "dict[int, _Weights]", counts: list[int], num_stages: int | None) -> float:
        """A plan may begin with any of the counts behind its first stage; then one less with every stage."""
        prices, pools = self.prices, range(len(self._budgets))
        ahead = np.full((len(pools), prices.num_states), np.inf)
        for n in range(max(counts), 0, -1):
            into = ahead.copy()
            if n in counts:
                into[:, 0] = np.minimum(into[:, 0], 0.0)
            ahead = np.full_like(into, np.inf)
            for (pool, crossing), allowed in weights[n].items():
                if num_stages is not None:
                    assert self._pinned is not None
                    stage = num_stages - n
                    allowed = np.where((self._pinned == -1) | (self._pinned == stage), allowed, np.inf)
                weight = np.full((prices.num_states, prices.num_states), np.inf)
                weight[prices.start, prices.stop] = allowed
                before = [q for q in pools if (q != pool) == crossing]
                found = (into[before].min(axis=0)[:, None] + weight).min(axis=0)
                ahead[pool] = np.minimum(ahead[pool], found)
        return float(ahead[:, -1].min())

    def _weights(
        self, in_flight: int, limit: float, device_weights: Sequence[float], latency_weight: float
    ) -> "_Weights":
        """[E] by pool and crossing: the least weight of each segment with so many microbatches in flight."""
        found: _Weights = {}
        for priced in self._priced:
            latency, busy = priced.latency_seconds[in_flight - 1], priced.busy_seconds[in_flight - 1]
            allowed = np.isfinite(busy) & (busy <= limit)
            price = device_weights[priced.pool - self.prices.pool] * priced.degree * priced.num_replicas
            weighed = latency_weight * np.where(allowed, latency, 0.0) + price
            own = self.prices.pools[priced.pool - self.prices.pool]
            weight = np.where(allowed, weighed, np.inf)[own.signature]
            key = (priced.pool - self.prices.pool, priced.crossing)
            found[key] = np.minimum(found.get(key, np.inf), weight)
        for pool, crossing in list(found):
            if crossing:
                # What may come from its own pool's stages alone is taken to.
                found[pool, True] = np.where(self._chained, found[pool, True], found[pool, False])
        return found


_Weights = dict[tuple[int, bool], Floats]
