"""Laws of the answers: every number is what planning again gives, and the curve, the prices and the ranges hold."""

import io
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from dpart.cli import main
from dpart.partitioner.answers import Explanation
from dpart.partitioner.answers_table import explanation_table
from dpart.partitioner.case import case_of, case_of_plan, is_as_good, same_decisions
from dpart.partitioner.certificates import with_profile
from dpart.partitioner.curve import default_counts
from dpart.partitioner.hosts import catalogue_topology
from dpart.partitioner.partition import partition
from dpart.partitioner.questions import curve, explain, sensitivity, shadow_prices
from dpart.partitioner.sensitivity import perturbed
from dpart.partitioner.topology import Device, Level, Topology, parse_topology, topology_text
from dpart.partitioner.variants import growths, level_places, with_bandwidth
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, write_file

MiB, GiB = 2**20, 2**30
ONE_LEVEL = Topology(Device("cpu", GiB, price_dollars_per_hour=2.0), (Level("machine", 5, 2e9, 1e-4),))
TWO_LEVELS = Topology(Device("cpu", GiB), (Level("host", 2, 8e9, 1e-5), Level("cluster", 2, 1e9, 1e-4)))


@pytest.mark.parametrize("topology", [ONE_LEVEL, TWO_LEVELS], ids=["one level", "two levels"])
@pytest.mark.parametrize("seed", range(4))
def test_the_curve_is_the_best_plan_on_at_most_so_many_devices(
    seed: int, topology: Topology, random_profile: Callable[[int], Profile]
) -> None:
    profile, most = random_profile(seed), topology.num_devices
    plans = [partition(profile, topology, num_devices=n) for n in range(1, most + 1)]
    best = list(itertools.accumulate((plan.step_seconds for plan in plans), min))
    found = curve(profile, topology)
    assert [point.num_devices for point in found.points] == list(range(1, most + 1))
    assert [point.step_seconds for point in found.points] == best
    for point, plan in zip(found.points, plans, strict=True):
        assert 1 <= point.used_devices <= point.num_devices
        assert plan.certificate is not None and point.lower_bound_seconds == plan.certificate.lower_bound_seconds
        dollars = 2.0 / 3600 * point.used_devices * (point.step_seconds or 0) / 32
        assert point.dollars_per_sample == (pytest.approx(dollars) if topology is ONE_LEVEL else None)
    for target in (best[0], (best[0] + best[-1]) / 2, best[-1], best[-1] / 2):
        least = next((n for n, step in enumerate(best, 1) if step <= target), None)
        fewest = curve(profile, topology, target_step_seconds=target).fewest
        assert (fewest.num_devices if fewest else None) == least
        sparse = curve(profile, topology, [most], target_step_seconds=target).fewest
        assert (sparse is None) == (least is None)
        if sparse is not None:
            assert (sparse.step_seconds or 0) <= target and sparse.num_devices >= (least or 0)


def test_a_count_without_a_plan_says_why(chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3] * 6)
    found = curve(profile, ONE_LEVEL, num_stages=3, target_step_seconds=1e-6)
    assert [point.step_seconds is None for point in found.points] == [True, True, False, False, False]
    assert "3 stages need 3 devices; there are 2" in found.points[1].note and found.fewest is None
    assert [point.num_devices for point in curve(profile, ONE_LEVEL, num_devices=2).points] == [1, 2]
    with pytest.raises(UserError, match="No plan fits"):
        curve(profile, ONE_LEVEL, memory_limit_bytes=100)
    with pytest.raises(UserError, match="expected counts from 1 to 5"):
        curve(profile, ONE_LEVEL, [3, 6])
    with pytest.raises(UserError, match="target step time 0 s"):
        curve(profile, ONE_LEVEL, target_step_seconds=0.0)


@pytest.mark.parametrize(
    ("most", "counts"),
    [(1, [1]), (7, [1, 2, 3, 4, 5, 6, 7]), (16, [1, 2, 3, 4, 6, 8, 12, 16]), (100, [1, 2, 4, 8, 16, 32, 64, 100])],
)
def test_the_counts_of_a_curve(most: int, counts: list[int]) -> None:
    assert default_counts(most) == counts


@pytest.mark.parametrize("seed", range(5))
def test_prices_are_what_planning_again_saves(seed: int, random_profile: Callable[[int], Profile]) -> None:
    profile = random_profile(seed + 50)
    plan = partition(profile, TWO_LEVELS)
    found = shadow_prices(profile, TWO_LEVELS, memory_bytes=GiB, bandwidth_share=0.5)
    by_kind = {price.kind: price for price in found.prices}
    three = replace(TWO_LEVELS, levels=(TWO_LEVELS.levels[0], replace(TWO_LEVELS.levels[1], count=3)))
    expected = min(plan.step_seconds, partition(profile, three).step_seconds)
    assert (by_kind["device"].added, by_kind["device"].step_seconds) == (2, expected)
    limit = plan.memory_limit_bytes + GiB
    roomy = partition(profile, TWO_LEVELS, memory_limit_bytes=limit).step_seconds
    assert by_kind["memory"].step_seconds == min(plan.step_seconds, roomy)
    case = case_of(profile, TWO_LEVELS, {})
    for price, place in zip([p for p in found.prices if p.kind == "bandwidth"], level_places(TWO_LEVELS), strict=True):
        faster = with_bandwidth(TWO_LEVELS, place, 1.5)
        kept, again = case.keep(plan, topology=faster).step_seconds, partition(profile, faster)
        assert price.step_seconds == min(kept, again.step_seconds, plan.step_seconds)
        assert price.same_plan == (is_as_good(kept, again.step_seconds) or same_decisions(plan, again))
        assert price.added == place.bandwidth_bytes_per_second / 2
    for price in found.prices:
        assert price.saved_seconds == plan.step_seconds - price.step_seconds >= 0


def test_a_kept_plan_is_the_plan(random_profile: Callable[[int], Profile]) -> None:
    for seed in range(8):
        profile = random_profile(seed)
        plan = partition(profile, TWO_LEVELS, schedule=("1f1b", "gpipe")[seed % 2], batch_size=30)  # type: ignore[call-overload]
        kept = case_of(profile, TWO_LEVELS, {}).keep(plan)
        assert (kept.step_seconds, kept.stages, kept.fits) == (plan.step_seconds, plan.stages, True)
        assert max(kept.stage_seconds) == plan.bottleneck_seconds


def test_what_binds(chain_profile: Callable[..., Profile]) -> None:
    plain = shadow_prices(chain_profile([1e-3] * 6), ONE_LEVEL, replicas=(1, 1, 1)).binding
    assert (plain.resource, plain.all_reduce_seconds) == ("compute", 0.0)
    assert plain.compute_seconds == pytest.approx(6e-3) == plain.stage_seconds
    wide = shadow_prices(chain_profile([1e-3] * 6, value_bytes=50 * MiB), ONE_LEVEL, replicas=(1, 1, 1)).binding
    assert wide.resource == "transfer" and wide.stage_seconds > wide.compute_seconds
    heavy = chain_profile([1e-4] * 3, parameter_bytes=60 * MiB)
    reduced = shadow_prices(heavy, ONE_LEVEL, replicas=(4,), sharding=(0,), memory_limit_bytes=2 * GiB).binding
    assert reduced.resource == "all-reduce" and reduced.all_reduce_seconds > reduced.compute_seconds


def test_memory_binds_where_a_plan_without_a_limit_is_faster(chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3] * 8, parameter_bytes=50 * MiB)
    found = shadow_prices(profile, TWO_LEVELS, memory_limit_bytes=430 * MiB, sharding=(0,), memory_bytes=10 * GiB)
    plan = partition(profile, TWO_LEVELS, memory_limit_bytes=430 * MiB, sharding=(0,))
    free = partition(profile, TWO_LEVELS, memory_limit_bytes=10 * GiB, sharding=(0,))
    assert found.binding.unlimited_step_seconds == free.step_seconds < plan.step_seconds
    price = next(price for price in found.prices if price.kind == "memory")
    assert price.saved_seconds == plan.step_seconds - free.step_seconds and not price.same_plan
    fullest = plan.stages[found.binding.fullest_stage].memory.total_bytes
    assert found.binding.fullest_bytes == fullest == max(s.memory.total_bytes for s in plan.stages)


@pytest.mark.parametrize(
    ("word", "added", "what"),
    [
        ("2xdgx-a100-80", [8], ["one more host (8 x a100-80)"]),
        ("11xa100-80", [1], ["one more device (a100-80)"]),
        ("4xrtx4090", [1], ["one more device (rtx4090)"]),
        ("dgx-1", [4], ["one more quad (4 x v100-32)"]),
        ("1xdgx-h100+2xdgx-a100-80", [1, 8], ["one more device (h100)", "one more host (8 x a100-80)"]),
    ],
)
def test_topologies_grow_by_the_least_there_is(word: str, added: list[int], what: list[str]) -> None:
    topology = catalogue_topology(word)
    found = growths(topology)
    assert ([growth.added for growth in found], [growth.what for growth in found]) == (added, what)
    for growth in found:
        for larger in growth.topologies:
            assert larger.num_devices == topology.num_devices + growth.added
            assert parse_topology(topology_text(larger), "it") == larger


def test_a_device_left_out_is_the_one_more(chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3] * 6)
    price = shadow_prices(profile, TWO_LEVELS, num_devices=2).prices[0]
    assert price.what == "one more device (cpu)"
    assert price.step_seconds == partition(profile, TWO_LEVELS, num_devices=3).step_seconds


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_a_range_ends_where_another_plan_wins(seed: int, random_profile: Callable[[int], Profile]) -> None:
    profile, precision = random_profile(seed), 0.1
    plan, case = partition(profile, TWO_LEVELS), case_of(profile, TWO_LEVELS, {})

    def stays(place: object, factor: float) -> bool:
        topology = with_bandwidth(TWO_LEVELS, place, factor)  # type: ignore[arg-type]
        best = partition(profile, topology)
        return is_as_good(case.keep(plan, topology=topology).step_seconds, best.step_seconds, case.margin)

    found = sensitivity(profile, TWO_LEVELS, precision=precision, draws=1).bandwidths
    for place, ends in zip(level_places(TWO_LEVELS), found, strict=True):
        own = place.bandwidth_bytes_per_second
        low, high = ends.low_bytes_per_second / own, ends.high_bytes_per_second / own
        assert 1 / 8 <= low <= 1 <= high <= 8
        assert stays(place, low) and stays(place, high)
        assert (low > 1 / 8) == (ends.below is not None) and (high < 8) == (ends.above is not None)
        if ends.below is not None:
            assert not all(stays(place, low / (1 + precision) ** share) for share in (0.25, 0.5, 0.75, 1.0))
        if ends.above is not None:
            assert not all(stays(place, high * (1 + precision) ** share) for share in (0.25, 0.5, 0.75, 1.0))


def test_robustness_counts_draws(random_profile: Callable[[int], Profile]) -> None:
    profile = random_profile(2)
    assert profile != perturbed(profile, 0.3, random.Random(7))
    exact = sensitivity(profile, TWO_LEVELS, relative_error=0.0, draws=2, precision=3.0).robustness
    assert (exact.same_share, exact.worst_loss, exact.mean_loss) == (1.0, 0.0, 0.0)
    options = {"relative_error": 0.5, "draws": 8, "seed": 7, "precision": 3.0, "tolerance": 1e-3}
    found = sensitivity(profile, TWO_LEVELS, **options).robustness  # type: ignore[arg-type]
    rng, plan, case, losses = random.Random(7), partition(profile, TWO_LEVELS), case_of(profile, TWO_LEVELS, {}), []
    for _ in range(8):
        wrong = perturbed(profile, 0.5, rng)
        best = partition(wrong, TWO_LEVELS, tolerance=1e-3).step_seconds
        loss = case.keep(plan, profile=wrong).step_seconds / best - 1
        losses.append(loss if loss > 1e-3 else 0.0)
    assert found.same_share == losses.count(0.0) / 8 < 1
    assert found.worst_loss == pytest.approx(max(losses)) and found.worst_loss > 0
    assert found.mean_loss == pytest.approx(math.fsum(losses) / 8)
    with pytest.raises(UserError, match="0 draws"):
        sensitivity(profile, TWO_LEVELS, draws=0)


def test_equal_layers_are_wrong_by_the_same_factor(chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3, 1e-3, 2e-3, 1e-3])
    costs = [replace(cost, stash_bytes=MiB, workspace_bytes=MiB) for cost in profile.costs]
    wrong = perturbed(replace(profile, costs=tuple(costs)), 0.2, random.Random(0))
    times = [cost.forward_seconds for cost in wrong.costs]
    assert times[1] == times[3] and len(set(times)) > 1
    assert [c.parameter_bytes for c in wrong.costs] == [c.parameter_bytes for c in profile.costs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "pipedream", "schedule": "gpipe", "batch_size": 24},
        {"num_stages": 2, "sharding": (0, 1), "recompute": False, "optimizer": "sgd", "together": [("l0", "l1")]},
        {"max_stages": 2, "pins": {"l0": 0}, "memory_limit_bytes": 900 * MiB, "num_devices": 3},
        {"replicas": (2, 2), "tensor_parallel": (1,), "reduce_buckets": 2},
        {"schedule": "auto", "num_stages": 4},
        {"schedule": "2bw", "num_stages": 3},
    ],
)
def test_a_plan_has_its_question(options: dict[str, object], chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 2e-3])
    plan = partition(profile, TWO_LEVELS, **options)  # type: ignore[arg-type]
    case = case_of_plan(plan, profile)
    assert case.plan() == plan
    assert case.keep(plan).step_seconds == plan.step_seconds
    with pytest.raises(UserError, match="made from another profile"):
        case_of_plan(plan, replace(profile, batch_size=31))


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_the_command_explains_profiles_and_plans(tmp_path, chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 2e-3])
    write_file(profile, tmp_path / "profile.json")
    (tmp_path / "t.yaml").write_text(topology_text(ONE_LEVEL))
    done = run(
        "explain", tmp_path / "profile.json", "-t", tmp_path / "t.yaml", "--devices", 3, "--target-step", "100 ms",
        "--draws", 2, "-o", tmp_path / "explain.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for part in ("Step time by number of devices", "$/M samples", "fewest found for", "Bottleneck: stage", "2 draws"):
        assert part in done.output, part
    found = read_file(Explanation, tmp_path / "explain.json")
    expected = explain(profile, ONE_LEVEL, num_devices=3, target_step_seconds=0.1, draws=2)
    assert found == expected

    plan = with_profile(partition(profile, ONE_LEVEL, num_devices=3), "profile.json")
    write_file(plan, tmp_path / "plan.json")
    done = run("explain", tmp_path / "plan.json", "--what", "curve", "-o", tmp_path / "curve.json")
    assert done.exit_code == 0, done.output
    again = read_file(Explanation, tmp_path / "curve.json")
    assert again.curve == curve(profile, ONE_LEVEL, num_devices=3) and again.prices is None
    text = io.StringIO()
    Console(file=text, width=120).print(explanation_table(again))
    assert text.getvalue().splitlines()[0] in done.output


def test_mistakes_are_messages(tmp_path, chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3] * 3)
    write_file(profile, tmp_path / "profile.json")
    write_file(partition(profile, ONE_LEVEL), tmp_path / "lost.json")
    write_file(with_profile(partition(profile, ONE_LEVEL), "profile.json"), tmp_path / "plan.json")
    for words, part in (
        (["no.json"], "no.json: no such file"),
        (["lost.json"], "does not say which profile"),
        (["plan.json", "--devices", "2"], "is a plan, which says its topology and constraints"),
        (["profile.json", "-o", "plan.json"], "exists already"),
        (["profile.json", "--schedule", "2f2b"], "expected one of"),
    ):
        done = run("explain", *(tmp_path / w if w.endswith(".json") else w for w in words))
        assert done.exit_code == 1 and part in done.output.replace("\n", " "), done.output
    for words in (["--what", "curves"], ["--target-step", "3"], ["--device-counts", "1,x"], ["--memory-limit", "3"]):
        assert run("explain", tmp_path / "profile.json", *words).exit_code == 2
    with pytest.raises(UserError, match="expected some of curve, prices, sensitivity"):
        explain(profile, what=("costs",))  # type: ignore[arg-type]
