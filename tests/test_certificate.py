"""Certificates: true ones are accepted, whatever the question was; a false one is not, whatever part of it is false."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from full_cases import ASKED, Case, draw_case, one_level, two_levels

from dpart.partitioner.certificates import check_plan
from dpart.partitioner.partition import NoPlanError, partition
from dpart.partitioner.plan import Bound, Certificate, Plan
from dpart.partitioner.topology import Topology
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, write_file

Maker = Callable[..., Profile]


def many_devices(rng: random.Random) -> Topology:
    """Too many for the search of every plan, so that the proof is by prices."""
    return one_level(rng, rng.choice([17, 20]))


def certificate_of(plan: Plan) -> Certificate:
    assert plan.certificate is not None
    return plan.certificate


def holds(plan: Plan, profile: Profile, certificate: Certificate | None = None) -> bool:
    """Whether every check of the plan holds; or would, with that certificate."""
    changed = plan if certificate is None else replace(plan, certificate=certificate)
    return all(check.holds for check in check_plan(changed, profile))


def planned(case: Case) -> Plan | None:
    try:
        return partition(case.profile, case.topology, **case.keywords)
    except NoPlanError:
        return None


def proved(make: Maker, seeds: Sequence[int]) -> list[tuple[Case, Plan]]:
    """Plans on many devices; their certificates have several parts."""
    cases = [draw_case(seed, make, many_devices, max_layers=3, max_microbatches=9) for seed in seeds]
    found = [(case, plan) for case in cases if (plan := planned(case)) is not None]
    assert len(found) > len(seeds) / 2
    return found


@pytest.mark.parametrize(
    "topology",
    [lambda rng: one_level(rng, 4), lambda rng: two_levels(rng, 2), many_devices],
    ids=["few devices", "two levels", "many devices"],
)
def test_every_plan_passes(topology: Callable[[random.Random], Topology], split_profile: Maker, tmp_path: Path) -> None:
    """Also after it was written and read."""
    passed, proofs = 0, set()
    for seed in range(30):
        case = draw_case(seed, split_profile, topology, max_layers=3, max_microbatches=9, asked=ASKED)
        plan = planned(case)
        if plan is not None:
            write_file(plan, tmp_path / f"{seed}.json")
            read = read_file(Plan, tmp_path / f"{seed}.json")
            assert read == plan
            assert holds(read, case.profile)
            passed += 1
            proofs |= {bound.proof for bound in certificate_of(plan).bounds}
    assert passed > 15
    assert len(proofs) > 1


def test_no_number_of_a_certificate_can_be_raised(split_profile: Maker) -> None:
    names = ("objective_seconds", "best_objective_seconds", "lower_bound_seconds", "gap")
    for case, plan in proved(split_profile, range(20)):
        certificate = certificate_of(plan)
        for name in names:
            value = getattr(certificate, name)
            for more in (value * (1 + 1e-6) + 1e-8, 2 * value + 1):
                assert not holds(plan, case.profile, replace(certificate, **{name: more})), name
        assert not holds(replace(plan, step_seconds=1.001 * plan.step_seconds), case.profile)


def with_bounds(certificate: Certificate, bounds: Sequence[Bound], best: float | None = None) -> Certificate:
    """A certificate whose totals are those of its parts."""
    best = certificate.best_objective_seconds if best is None else best
    lower = min(best, min((b.bound_seconds for b in bounds), default=0.0))
    return replace(
        certificate,
        bounds=tuple(bounds),
        best_objective_seconds=best,
        lower_bound_seconds=lower,
        gap=best / lower - 1 if lower else 0.0,
    )


def tampered(bounds: Sequence[Bound]) -> Iterator[tuple[str, list[Bound]]]:
    """What somebody might change about one part, each in a list of its own; more is claimed than was proved."""
    for i, bound in enumerate(bounds):
        others = list(bounds[:i]), list(bounds[i + 1 :])
        for factor in (1.001, 2.0):
            raised = replace(bound, bound_seconds=factor * bound.bound_seconds)
            yield "bound", [*others[0], raised, *others[1]]
            more = (factor - 1) * (bound.floor_seconds + 1e-3)
            floor = replace(bound, floor_seconds=bound.floor_seconds + more, bound_seconds=bound.bound_seconds + more)
            yield "floor", [*others[0], floor, *others[1]]
            if bound.limit_seconds is not None:
                limit = replace(bound, limit_seconds=bound.limit_seconds / factor, bound_seconds=raised.bound_seconds)
                yield "limit", [*others[0], limit, *others[1]]
        if bound.multiplier_seconds:
            dear = replace(bound, multiplier_seconds=tuple(2 * m + 1.0 for m in bound.multiplier_seconds))
            yield "multiplier", [*others[0], dear, *others[1]]
        yield "proof", [*others[0], replace(raised, proof="work"), *others[1]]
        yield "left out", [*others[0], *others[1]]


def test_no_part_can_be_changed_to_prove_what_is_false(split_profile: Maker) -> None:
    """The totals changed with it. What still passes is true: no plan is better, all of them tried."""
    refused: dict[str, int] = {}
    for case, plan in proved(split_profile, range(100, 110)):
        best, certificate = case.best(equal=True).objective, certificate_of(plan)
        for what, bounds in tampered(certificate.bounds):
            # As good as nothing was found: so the bound is that of the parts.
            claimed = with_bounds(certificate, bounds, best=2 * certificate.best_objective_seconds)
            if holds(plan, case.profile, claimed):
                assert claimed.lower_bound_seconds <= best * (1 + 1e-9), what
            else:
                refused[what] = refused.get(what, 0) + 1
    assert min(refused.get(what, 0) for what in ("bound", "floor", "limit", "multiplier", "proof", "left out")) > 2


def test_all_parts_together_cannot_be_raised_above_the_best_plan(split_profile: Maker) -> None:
    for case, plan in proved(split_profile, range(200, 220)):
        best, certificate = case.best(equal=True).objective, certificate_of(plan)
        bounds = [replace(b, bound_seconds=max(b.bound_seconds, 1.001 * best + 1e-6)) for b in certificate.bounds]
        assert not holds(plan, case.profile, with_bounds(certificate, bounds, best=1.001 * best + 1e-6))
        assert not holds(plan, case.profile, with_bounds(certificate, ()))


def test_a_bound_that_was_exhausted_cannot_be_raised(split_profile: Maker) -> None:
    for seed in range(300, 320):
        case = draw_case(seed, split_profile, lambda rng: one_level(rng, 4), max_layers=3)
        plan = planned(case)
        if plan is not None:
            certificate = certificate_of(plan)
            (bound,) = certificate.bounds
            assert bound.proof == "exhausted"
            raised = replace(bound, bound_seconds=1.001 * bound.bound_seconds + 1e-6)
            claimed = with_bounds(certificate, [raised], best=2 * certificate.best_objective_seconds + 1)
            assert not holds(plan, case.profile, claimed)


def test_a_plan_that_does_not_fit_is_found_out(split_profile: Maker) -> None:
    """Its memory limit lowered by a byte more than it leaves free."""
    for case, plan in proved(split_profile, range(400, 410)):
        fullest = max(stage.memory.total_bytes for stage in plan.stages)
        assert not holds(replace(plan, memory_limit_bytes=fullest - 1), case.profile)


def test_a_certificate_is_about_one_profile(split_profile: Maker) -> None:
    case = draw_case(0, split_profile, lambda rng: one_level(rng, 4))
    plan = planned(case)
    assert plan is not None
    first, *rest = case.profile.costs
    slower = replace(case.profile, costs=(replace(first, forward_seconds=first.forward_seconds + 1e-6), *rest))
    with pytest.raises(UserError, match="made from another profile"):
        check_plan(plan, slower)
    with pytest.raises(UserError, match="no certificate"):
        check_plan(replace(plan, certificate=None, method="pipedream"), case.profile)
