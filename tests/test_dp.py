"""The default search against every plan there is: its optimum, its bounds, and what it keeps of what was asked."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from dpart.partitioner import dp
from dpart.partitioner.certificates import check_plan
from dpart.partitioner.contraction import contract
from dpart.partitioner.evaluate import check_coverage, shape_of
from dpart.partitioner.partition import NoPlanError, partition
from dpart.partitioner.prices import Prices
from dpart.partitioner.topology import Device, Level, Topology
from dpart.profiler.profile import Profile
from full_cases import ASKED, GiB, Case, draw_case, one_level, two_levels

MiB = 2**20
Maker = Callable[..., Profile]

BLOCKS, PER_BLOCK = 40, 25
EXACT = ("nothing", "num_stages", "max_stages", "together")
"""What may be asked where devices are few, and the search is still over every plan."""


def few_devices(rng: random.Random) -> Topology:
    return one_level(rng, rng.choice([2, 3, 4, 4]))


def close(value: float, wanted: float) -> bool:
    """Equal but for the order in which the same numbers are added up."""
    return math.isclose(value, wanted, rel_tol=1e-9)


@pytest.mark.parametrize("topology", [few_devices, lambda rng: two_levels(rng, 2)], ids=["one level", "two levels"])
def test_the_full_space_costs_what_the_cost_model_says(topology: object, split_profile: Maker) -> None:
    """Plans drawn at random: every degree, sharding and recomputation."""
    drawn = 0
    for seed in range(30):
        case = draw_case(seed, split_profile, topology)  # type: ignore[arg-type]
        evaluator, rng = case.evaluator, random.Random(seed)
        for _ in range(10):
            shape = case.space.sample(rng)
            found, (objective, peak) = evaluator.evaluate(shape), case.space.objective_and_peak(shape)
            assert found.objective_seconds == pytest.approx(objective, rel=1e-12)
            assert max(stage.memory.total_bytes for stage in found.stages) == peak
            drawn += any(stage.recompute and stage.degree > 1 for stage in shape)
    assert drawn > 10


def check_against_all(case: Case, *, is_exact: bool, is_checked: bool = True) -> None:
    """What the plan of a case claims, held against every plan there is."""
    best = case.best()
    try:
        plan = partition(case.profile, case.topology, **case.keywords)
    except NoPlanError:
        assert best.shape is None
        return
    certificate = plan.certificate
    assert certificate is not None
    assert case.keeps(plan)
    check_coverage(case.profile.graph, shape_of(plan.stages))
    objective, peak = case.space.objective_and_peak(shape_of(plan.stages))
    assert close(certificate.objective_seconds, objective)
    assert peak <= case.terms.memory_limit_bytes
    assert certificate.best_objective_seconds >= best.objective * (1 - 1e-9)
    assert certificate.lower_bound_seconds <= best.objective * (1 + 1e-9)
    if is_exact:
        assert close(certificate.best_objective_seconds, best.objective)
        assert close(certificate.lower_bound_seconds, best.objective)
    if is_checked:
        assert all(check.holds for check in check_plan(plan, case.profile))


@pytest.mark.parametrize("block", range(BLOCKS))
def test_it_finds_the_best_of_all_plans_and_proves_it(block: int, split_profile: Maker) -> None:
    """On few devices with links of one speed, 1,000 questions in all."""
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        case = draw_case(seed, split_profile, few_devices, max_layers=4 + seed % 2, asked=EXACT)
        check_against_all(case, is_exact=True, is_checked=seed % 5 == 0)


def test_the_questions_are_not_easy_ones(split_profile: Maker) -> None:
    """Of the 1,000, one in ten: memory binds, and every freedom is made use of."""
    seen = dict.fromkeys(("binding", "recompute", "sharding", "degree", "uneven", "stages"), 0)
    for seed in range(0, BLOCKS * PER_BLOCK, 10):
        case = draw_case(seed, split_profile, few_devices, max_layers=4 + seed % 2, asked=EXACT)
        free = replace(case, terms=replace(case.terms, memory_limit_bytes=2**50)).best()
        shape = case.best().shape or ()
        seen["binding"] += case.best().objective > free.objective * (1 + 1e-9)
        seen["recompute"] += any(stage.recompute for stage in shape)
        seen["sharding"] += any(stage.sharding for stage in shape)
        seen["degree"] += any(stage.degree > 1 for stage in shape)
        seen["uneven"] += len({stage.num_replicas for stage in shape}) > 1
        seen["stages"] += len(shape) > 1
    assert seen["binding"] > 40
    assert min(seen.values()) > 5, seen


@pytest.mark.parametrize("block", range(8))
def test_what_is_asked_for_is_kept_and_bounded(block: int, split_profile: Maker) -> None:
    """Replicas and pins; those are proved to the tolerance of the search, pins among plans with equal replicas."""
    for seed in range(2000 + 5 * block, 2005 + 5 * block):
        case = draw_case(seed, split_profile, few_devices, max_layers=4, asked=("replicas",))
        check_against_all(case, is_exact=False)


@pytest.mark.parametrize("host", [2, 3, 4])
@pytest.mark.parametrize("block", range(3))
def test_on_nested_links_the_best_of_all_plans_is_not_below_the_bound(
    block: int, host: int, split_profile: Maker
) -> None:
    for seed in range(3000 + 10 * block, 3010 + 10 * block):
        case = draw_case(seed, split_profile, lambda rng: two_levels(rng, host), max_layers=4, asked=EXACT)
        check_against_all(case, is_exact=False)


def equal_replicas(case: Case) -> tuple[float, float, float]:
    """(lower bound, best of all plans with equal replicas, best plan found), each in seconds."""
    prices = Prices(case.profile, contract(case.profile), case.topology, case.terms, case.freedom)
    outcome = dp.search(prices, case.topology.num_devices)
    evaluator = case.evaluator
    found = [evaluator.evaluate(shape) for shape, _ in outcome.plans if evaluator.packs(shape)]
    if len(case.topology.levels) == 1:
        for evaluation, (_, objective) in zip(found, outcome.plans, strict=True):
            assert close(evaluation.objective_seconds, objective)
            assert not evaluation.short_bytes
    least = min((e.objective_seconds for e in found if not e.short_bytes), default=math.inf)
    return outcome.lower_bound_seconds, case.best(equal=True).objective, least


@pytest.mark.parametrize(
    ("topology", "least_exact"),
    [(lambda rng: one_level(rng, rng.randint(5, 9)), 0.6), (lambda rng: two_levels(rng, 2), 0.3)],
    ids=["one level", "two levels"],
)
def test_with_equal_replicas_the_best_plan_lies_between_the_bounds(
    topology: object, least_exact: float, split_profile: Maker
) -> None:
    """For the search that the number of devices does not slow down. Sharding is left out: see the next test."""
    exact, seeds = 0, range(4000, 4060)
    for seed in seeds:
        case = draw_case(seed, split_profile, topology, max_layers=4, max_microbatches=12, shardings=((0,),))  # type: ignore[arg-type]
        lower, best, found = equal_replicas(case)
        assert lower <= best * (1 + 1e-9)
        assert found >= best * (1 - 1e-9)
        exact += close(found, best)
    assert exact >= least_exact * len(seeds)
