"""What can be done with a plan and the profile it was made from: check its certificate, play its step."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

from dpart.partitioner.certify import Check, check
from dpart.partitioner.evaluate import shape_of
from dpart.partitioner.plan import Plan
from dpart.partitioner.setting import setting_of
from dpart.partitioner.simulate import Timeline
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError


def digest(profile: Profile) -> str:
    """SHA-256 of everything that a profile says."""
    return hashlib.sha256(repr(profile).encode()).hexdigest()


def with_profile(plan: Plan, profile: str) -> Plan:
    """The plan that says in which file its profile stands, as seen from its own folder."""
    assert plan.question is not None
    return replace(plan, question=replace(plan.question, profile=profile))


def check_plan(plan: Plan, profile: Profile, progress: Callable[[str], None] | None = None) -> list[Check]:
    """Recomputes everything that a plan's certificate claims.

    Raises:
        UserError: The plan has no certificate, or was made from another profile.
    """
    _check_profile(plan, profile)
    if plan.certificate is None:
        raise UserError(f"The plan has no certificate: method {plan.method!r} proves its bottleneck only.")
    made = setting_of(plan, profile, progress)
    return check(plan, made.space.prices(made.freedom), made.evaluator, made.space.num_devices, progress)


def play(plan: Plan, profile: Profile) -> Timeline:
    """The predicted step, action by action.

    Raises:
        UserError: The plan was made from another profile.
    """
    _check_profile(plan, profile)
    evaluator = setting_of(plan, profile).evaluator
    return evaluator.play(evaluator.evaluate(shape_of(plan.stages)))


def _check_profile(plan: Plan, profile: Profile) -> None:
    if plan.question is None:
        raise UserError("The plan does not say what was asked: make it again.")
    if plan.question.profile_digest != digest(profile):
        raise UserError(
            f"The plan was made from another profile (SHA-256 {plan.question.profile_digest[:12]}..., "
            f"this one has {digest(profile)[:12]}...): name the right one, or partition again."
        )
