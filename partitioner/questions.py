"""Questions about plans: the curve of devices against step time, shadow prices, sensitivity; or all in one.

Each function takes a profile, a topology and the options of `partition`, and answers by planning again with one
thing changed::

    curve(profile, topology, target_step_seconds=1.2).fewest      # the fewest devices for a step of 1.2 s
    shadow_prices(profile, topology, optimizer="sgd").prices      # what one more device would save
    sensitivity(profile, topology).bandwidths                     # the same plan from 18 to 60 GB/s
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from dpart.partitioner.answers import Curve, Explanation, Sensitivity, ShadowPrices
from dpart.partitioner.case import Case, case_of, case_of_plan
from dpart.partitioner.curve import device_curve
from dpart.partitioner.plan import Plan
from dpart.partitioner.plan_words import in_words
from dpart.partitioner.sensitivity import bandwidth_ranges, robustness
from dpart.partitioner.shadow import prices
from dpart.partitioner.topology import Topology
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError

Answer = Literal["curve", "prices", "sensitivity"]
ANSWERS: tuple[Answer, ...] = ("curve", "prices", "sensitivity")

Progress = Callable[[str], None]

_GiB = 2**30


def curve(
    profile: Profile,
    topology: Topology | None = None,
    device_counts: Sequence[int] | None = None,
    *,
    target_step_seconds: float | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Curve:
    """The step time on every number of devices, its bound, and what a sample costs.

    Args:
        topology: None for the machine the profile was measured on.
        device_counts: None for all where there are few devices, and else powers of two and the full number.
        target_step_seconds: Also finds the fewest devices that reach this step time.
        options: Of `partition`; `num_devices` is the largest number.

    Raises:
        UserError: A count is impossible, or no plan fits on any number of devices.
    """
    return device_curve(case_of(profile, topology, options), device_counts, target_step_seconds, progress or _silent)


def shadow_prices(
    profile: Profile,
    topology: Topology | None = None,
    *,
    memory_bytes: int = _GiB,
    bandwidth_share: float = 0.1,
    progress: Progress | None = None,
    **options: Any,
) -> ShadowPrices:
    """What binds, and the seconds saved by one more device, more memory, and more bandwidth of each level.

    A device that cannot be added alone, as every host is full, comes with a whole host.

    Args:
        topology: None for the machine the profile was measured on.
        memory_bytes: How much more memory on each device.
        bandwidth_share: How much more bandwidth.
        options: Of `partition`.

    Raises:
        UserError: No plan fits, or an option is impossible.
    """
    case = case_of(profile, topology, options)
    return prices(case, case.plan(), memory_bytes, bandwidth_share, progress or _silent)


def sensitivity(
    profile: Profile,
    topology: Topology | None = None,
    *,
    precision: float = 0.1,
    relative_error: float = 0.1,
    draws: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> Sensitivity:
    """Over which bandwidths of each level, and under how wrong a profile, the plan stays the best.

    Args:
        topology: None for the machine the profile was measured on.
        precision: Relative, of the ends of a range of bandwidths.
        relative_error: Of the times of layers, in random wrong profiles.
        draws: How many of those.
        seed: Of the draws.
        options: Of `partition`.

    Raises:
        UserError: No plan fits, or an option is impossible.
    """
    case, tell = case_of(profile, topology, options), progress or _silent
    return _sensitivity(case, case.plan(), precision, relative_error, draws, seed, tell)


def explain(
    profile: Profile,
    topology: Topology | None = None,
    *,
    what: Collection[Answer] = ANSWERS,
    plan: Plan | None = None,
    device_counts: Sequence[int] | None = None,
    target_step_seconds: float | None = None,
    memory_bytes: int = _GiB,
    bandwidth_share: float = 0.1,
    precision: float = 0.1,
    relative_error: float = 0.1,
    draws: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> Explanation:
    """The answers to several questions about one plan.

    Args:
        what: Which answers.
        plan: A plan made from the profile: the questions are asked under its constraints. It then says topology and
            options; time limit and tolerance may still be given.
        options: Of `partition`.

    Raises:
        UserError: No plan fits, an option is impossible, or there is no such answer.
    """
    if unknown := [name for name in what if name not in ANSWERS]:
        raise UserError(f"what {unknown[0]!r}: expected some of {', '.join(ANSWERS)}.")
    tell = progress or _silent
    case = case_of(profile, topology, options) if plan is None else _of_plan(plan, profile, options)
    tell("the plan itself")
    made = case.plan() if plan is None else plan
    return Explanation(
        format="dpart.explanation",
        version=1,
        model=profile.graph.model,
        fingerprint=profile.graph.fingerprint,
        topology=str(case.topology),
        stages=in_words(made.stages),
        step_seconds=made.step_seconds,
        curve=device_curve(case, device_counts, target_step_seconds, tell, made) if "curve" in what else None,
        prices=prices(case, made, memory_bytes, bandwidth_share, tell) if "prices" in what else None,
        sensitivity=_sensitivity(case, made, precision, relative_error, draws, seed, tell)
        if "sensitivity" in what
        else None,
    )


def _of_plan(plan: Plan, profile: Profile, options: dict[str, Any]) -> Case:
    case = case_of_plan(plan, profile)
    return Case(profile, case.topology, case.whole, dict(case.options) | options)


def _sensitivity(
    case: Case, plan: Plan, precision: float, relative_error: float, draws: int, seed: int, progress: Progress
) -> Sensitivity:
    return Sensitivity(
        bandwidth_ranges(case, plan, precision, progress),
        robustness(case, plan, relative_error, draws, seed, progress),
    )


def _silent(text: str) -> None:
    """No progress is shown."""
