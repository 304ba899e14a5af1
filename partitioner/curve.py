"""The curve of devices against step time, and the fewest devices that reach a step time.

A plan may use fewer devices than it is given, so a plan for a smaller number counts for every larger one, and the
curve never rises::

    step  *
          |  *
          |     *  *                  target - - - -
          |           *     *         fewest: halve between the last point above it and the first one below
          +-----------------------
            1  2  3  4  5     8  devices
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dpart.partitioner.answers import Curve, CurvePoint
from dpart.partitioner.case import Case
from dpart.partitioner.plan import Plan
from dpart.partitioner.plan_words import in_words
from dpart.partitioner.topology import Topology
from dpart.runtime.errors import UserError

_ALL, _HALVES = 8, 64
"""Up to so many devices the curve has all counts; up to so many, those between the powers of two."""


def device_curve(
    case: Case,
    counts: Sequence[int] | None,
    target_step_seconds: float | None,
    progress: Callable[[str], None],
    plan: Plan | None = None,
) -> Curve:
    """The curve of a case.

    Args:
        counts: Numbers of devices; None for `default_counts`.
        plan: The one for all devices of the case, if it was made.

    Raises:
        UserError: A count is impossible, or no number of devices has a plan that fits.
    """
    most = case.topology.num_devices
    chosen = sorted(set(default_counts(most) if counts is None else counts))
    if not chosen or chosen[0] < 1 or chosen[-1] > most:
        raise UserError(f"device counts {', '.join(map(str, chosen)) or 'none'}: expected counts from 1 to {most}.")
    if target_step_seconds is not None and not target_step_seconds > 0:
        raise UserError(f"target step time {target_step_seconds:g} s: expected a time above zero.")
    asked = _Asked(case, progress, {most: plan} if plan is not None else {})
    for count in chosen:
        asked.at(count)
    if all(asked.fault.get(count) for count in chosen):
        raise UserError(asked.fault[chosen[-1]])
    fewest = _fewest(asked, chosen, target_step_seconds) if target_step_seconds is not None else None
    points = tuple(asked.point(count) for count in sorted({*chosen, *([fewest] if fewest else [])}))
    return Curve(
        batch_size=asked.batch_size,
        points=points,
        target_step_seconds=target_step_seconds,
        fewest=asked.point(fewest) if fewest is not None else None,
    )


def default_counts(most: int) -> list[int]:
    """All counts where there are few; else the powers of two, of not too many those halfway between, and all."""
    if most <= _ALL:
        return list(range(1, most + 1))
    powers = [2**i for i in range(most.bit_length())]
    between = [3 * power // 2 for power in powers[1:]] if most <= _HALVES else []
    return sorted({count for count in [*powers, *between] if count < most} | {most})


def _fewest(asked: "_Asked", chosen: Sequence[int], target: float) -> int | None:
    """The smallest number of devices whose plan reaches the target, as far as halving sees."""
    reached = [asked.used(count) for count in chosen if asked.reaches(count, target)]
    if not reached:
        return None
    high = min(reached)
    low = max((count for count in asked.plan if count < high and not asked.reaches(count, target)), default=0)
    while high - low > 1:
        middle = (low + high) // 2
        if asked.reaches(middle, target):
            high = min(asked.used(middle), high)
        else:
            low = middle
    asked.at(high)
    return high


@dataclass
class _Asked:
    """Plans by number of devices, each made once.

    Attributes:
        plan: None where none fits.
        fault: Why.
    """

    case: Case
    progress: Callable[[str], None]
    plan: dict[int, Plan | None]
    fault: dict[int, str] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return self.case.options.get("batch_size") or self.case.profile.batch_size

    def at(self, count: int) -> Plan | None:
        """The plan that is made for so many devices."""
        if count not in self.plan:
            self.progress(f"a plan on {count} devices")
            try:
                self.plan[count] = self.case.plan(topology=self.case.topology.first(count))
            except UserError as error:
                self.plan[count], self.fault[count] = None, str(error)
        return self.plan[count]

    def best(self, count: int) -> tuple[int, Plan] | None:
        """The fastest plan made for so many devices or fewer, and for how many; of equal ones for the fewest."""
        self.at(count)
        found = [(plan.step_seconds, n, plan) for n, plan in self.plan.items() if n <= count and plan is not None]
        if not found:
            return None
        _, n, plan = min(found, key=lambda each: each[:2])
        return n, plan

    def reaches(self, count: int, target: float) -> bool:
        best = self.best(count)
        return best is not None and best[1].step_seconds <= target

    def used(self, count: int) -> int:
        best = self.best(count)
        assert best is not None
        return _num_used(best[1])

    def point(self, count: int) -> CurvePoint:
        best, own = self.best(count), self.at(count)
        if best is None:
            return CurvePoint(count, 0, "", None, None, None, None, self.fault[count])
        made_for, plan = best
        certificate = own.certificate if own is not None else None
        objective = plan.certificate.objective_seconds if plan.certificate is not None else None
        return CurvePoint(
            num_devices=count,
            used_devices=_num_used(plan),
            stages=in_words(plan.stages),
            step_seconds=plan.step_seconds,
            objective_seconds=objective,
            lower_bound_seconds=certificate.lower_bound_seconds if certificate is not None else None,
            dollars_per_sample=_dollars(plan, self.case.topology, self.batch_size),
            note="" if made_for == count else f"that for {made_for} devices is the fastest found",
        )


def _num_used(plan: Plan) -> int:
    return sum(len(stage.devices) for stage in plan.stages)


def _dollars(plan: Plan, topology: Topology, batch_size: int) -> float | None:
    """A sample's part of what the plan's devices cost during a step."""
    prices = [topology.device_of(d).price_dollars_per_hour for stage in plan.stages for d in stage.devices]
    return sum(prices) / 3600 * plan.step_seconds / batch_size if all(prices) else None
