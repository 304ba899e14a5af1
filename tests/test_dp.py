"""The default search against every plan there is: its optimum, its bounds, and what it keeps of what was asked."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from full_cases import Case, GiB, draw_case, one_level, two_levels

from dpart.partitioner import dp
from dpart.partitioner.certificates import check_plan
from dpart.partitioner.contraction import contract
from dpart.partitioner.evaluate import check_coverage, shape_of
from dpart.partitioner.partition import NoPlanError, partition
from dpart.partitioner.prices import Prices
from dpart.partitioner.topology import Device, Level, Topology
from dpart.profiler.profile import Profile

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


@pytest.mark.parametrize(
    "topology", [lambda rng: one_level(rng, rng.randint(6, 9)), lambda rng: two_levels(rng, 3)], ids=["one", "two"]
)
def test_bounds_hold_where_only_more_replicas_fit(topology: object, split_profile: Maker) -> None:
    """State that is shared out gets smaller with every replica, also where none of them has less to compute.

    The limit is what the most frugal plan with equal replicas needs.
    """
    needed = 0
    for seed in range(4100, 4180):
        case = draw_case(seed, split_profile, topology, max_layers=3, shardings=((0, 1, 2, 3), (0, 3)))  # type: ignore[arg-type]
        least = case.space.least_bytes(replicas=lambda replicas: len(set(replicas)) == 1)
        case = replace(case, terms=replace(case.terms, memory_limit_bytes=least))
        lower, best, found = equal_replicas(case)
        assert lower <= best * (1 + 1e-9)
        assert found >= best * (1 - 1e-9)
        shape, m = case.best(equal=True).shape or (), case.terms.num_microbatches
        needed += any(-(-m // (s.num_replicas - 1)) == -(-m // s.num_replicas) for s in shape if s.num_replicas > 1)
    assert needed > 4


def test_pins_are_kept_and_bounded_among_equal_replicas(split_profile: Maker) -> None:
    kept = 0
    for seed in range(5000, 5050):
        case = draw_case(seed, split_profile, few_devices, max_layers=4, asked=("pins",))
        best = case.best(equal=True)
        try:
            plan = partition(case.profile, case.topology, **case.keywords)
        except NoPlanError:
            assert best.shape is None
            continue
        assert plan.certificate is not None
        assert case.keeps(plan)
        assert plan.certificate.lower_bound_seconds <= best.objective * (1 + 1e-9)
        assert all(check.holds for check in check_plan(plan, case.profile))
        kept += 1
    assert kept > 25


def machine(devices: int, *, bandwidth: float = 2e9, latency: float = 1e-4) -> Topology:
    return Topology(Device("cpu", GiB), (Level("machine", devices, bandwidth, latency),))


def test_shares_of_bytes_are_rounded_the_same_way_by_all(chain_profile: Maker) -> None:
    """A third of 2^20 parameters and of their gradients on each of three replicas: a limit to the byte is met."""
    profile = chain_profile([1e-3], parameter_bytes=MiB)
    options = {"optimizer": "sgd", "sharding": (3,), "replicas": (3,), "batch_size": 12}
    plan = partition(profile, machine(3), **options)  # type: ignore[arg-type]
    peak = plan.stages[0].memory.total_bytes
    exact = partition(profile, machine(3), memory_limit_bytes=peak, **options)  # type: ignore[arg-type]
    assert exact.stages == plan.stages
    with pytest.raises(NoPlanError, match="1 bytes too much"):
        partition(profile, machine(3), memory_limit_bytes=peak - 1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_only_what_is_allowed_is_decided(seed: int, split_profile: Maker) -> None:
    """Baselines are shown, but do not win, where their degree or sharding is not among those asked for."""
    profile = split_profile(seed, 4)
    for degrees, shardings in (((2,), (0,)), ((4,), (0,)), ((1, 2), (1,)), ((1,), (2, 3))):
        plan = partition(profile, machine(4), tensor_parallel=degrees, sharding=shardings, batch_size=16)
        assert {stage.tensor_parallel_degree for stage in plan.stages} <= set(degrees)
        assert {s.optimizer_sharding for s in plan.stages if s.num_replicas > 1} <= set(shardings)


def test_the_only_plan_is_found_again_after_it_was_probed(chain_profile: Maker) -> None:
    """One stage on one device is as good as the work there is: nothing is left out for being no better than that."""
    plan = partition(chain_profile([1e-3] * 3), machine(20), replicas=(1,), recompute=False)
    assert plan.certificate is not None
    assert plan.certificate.gap < 1e-8
    assert all(check.holds for check in check_plan(plan, chain_profile([1e-3] * 3)))


@pytest.mark.parametrize(("layers", "stages"), [(10, 3), (30, 4), (38, 8), (42, 16), (61, 8)])
def test_layers_that_do_not_divide_by_stages_are_all_there_once(layers: int, stages: int, chain_profile: Maker) -> None:
    profile = chain_profile([1e-3] * layers)
    for devices in (stages, 24):
        plan = partition(profile, machine(devices), num_stages=stages)
        assert len(plan.stages) == stages
        assert [n for stage in plan.stages for n in stage.layers] == [layer.name for layer in profile.graph.layers]


@pytest.mark.parametrize("devices", [8, 24])
def test_devices_that_are_of_no_use_stay_idle_and_are_reported(devices: int, chain_profile: Maker) -> None:
    """Two layers and two microbatches cannot keep more than four devices busy."""
    plan = partition(chain_profile([1e-2] * 2), machine(devices), batch_size=8)
    used = sum(len(stage.devices) for stage in plan.stages)
    assert used <= 4
    assert any(f"{devices - used} of {devices} devices stay idle" in note for note in plan.notes)


@pytest.mark.parametrize("devices", [4, 24])
def test_one_stage_that_wins_is_explained_and_shown_beside_two(devices: int, chain_profile: Maker) -> None:
    """A small model and a slow link."""
    plan = partition(chain_profile([1e-5] * 6), machine(devices, bandwidth=1e8))
    assert len(plan.stages) == 1
    assert any("One stage wins" in note for note in plan.notes)
    assert any(len(other.replicas) > 1 and other.step_seconds is not None for other in plan.alternatives)
    forced = partition(chain_profile([1e-5] * 6), machine(devices, bandwidth=1e8), num_stages=2)
    assert forced.step_seconds > plan.step_seconds


@pytest.mark.parametrize("devices", [4, 24])
@pytest.mark.parametrize("latency", [0.0, 1e-4])
def test_layers_that_take_no_time_make_no_stages_of_their_own(
    devices: int, latency: float, chain_profile: Maker
) -> None:
    """Two of three layers, as in GNMT and NASNet; and a model in which nothing takes time."""
    rng = random.Random(0)
    seconds = [0.0 if i % 3 else rng.uniform(1e-3, 2e-3) for i in range(24)]
    plan = partition(chain_profile(seconds), machine(devices, latency=latency))
    check_coverage(chain_profile(seconds).graph, shape_of(plan.stages))
    assert all(stage.forward_seconds > 0 for stage in plan.stages)
    idle = partition(chain_profile([0.0] * 6), machine(devices, latency=latency))
    assert idle.certificate is not None
    assert idle.certificate.gap == 0
    assert math.isfinite(idle.step_seconds)
