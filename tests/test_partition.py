"""Plan laws: nothing offered is better than what is chosen, everything asked for is kept, every number adds up."""

import io
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from dpart.partitioner import candidates, ilp, ilp_options, pipedream
from dpart.partitioner.candidates import Space, Wanted, baselines, search
from dpart.partitioner.cost import Terms
from dpart.partitioner.evaluate import Evaluator, StageShape, check_coverage, shape_of
from dpart.partitioner.partition import partition
from dpart.partitioner.plan import Plan
from dpart.partitioner.ranking import rank
from dpart.partitioner.shapes import best_of_each_shape, best_of_replicas
from dpart.partitioner.table import plan_table
from dpart.partitioner.topology import Device, Level, Topology, local_topology
from dpart.partitioner.units import format_bytes, format_seconds
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, write_file

MiB, GiB = 2**20, 2**30
ONE_LEVEL = Topology(Device("cpu", GiB), (Level("machine", 4, 2e9, 1e-4),))
FAST = Topology(Device("cpu", GiB), (Level("machine", 4, 1e12, 0.0),))
TWO_LEVELS = Topology(Device("cpu", GiB), (Level("host", 2, 8e9, 1e-5), Level("cluster", 2, 1e9, 1e-4)))
TOPOLOGIES = {"one level": ONE_LEVEL, "fast": FAST, "two levels": TWO_LEVELS}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("seed", range(12))
def test_plans_add_up_and_nothing_offered_is_better(
    seed: int, topology: Topology, random_profile: Callable[[int], Profile], tmp_path
) -> None:
    profile, optimizer = random_profile(seed), ("adam", "sgd")[seed % 2]
    plan = partition(
        profile,
        topology,
        optimizer=optimizer,
        schedule=("1f1b", "gpipe")[seed // 2 % 2],
        batch_size=30 - seed,
    )  # type: ignore[call-overload]
    assert plan.num_microbatches == math.ceil((30 - seed) / 4)
    shape = shape_of(plan.stages)
    check_coverage(profile.graph, shape)
    assert [d for stage in plan.stages for d in stage.devices] == list(range(sum(s.num_replicas for s in shape)))
    assert all(s.memory.total_bytes <= plan.memory_limit_bytes for s in plan.stages)
    assert plan.memory_limit_bytes == int(0.9 * GiB)

    terms = Terms(plan.num_microbatches, plan.schedule, plan.optimizer, plan.memory_limit_bytes)
    last = (30 - seed - 4 * (plan.num_microbatches - 1)) / 4
    evaluator = Evaluator(profile, topology, terms, last)
    again = evaluator.evaluate(shape)
    assert again.stages == plan.stages
    assert again.bottleneck_seconds == plan.bottleneck_seconds
    assert evaluator.play(again).step_seconds == plan.step_seconds >= again.busy_seconds * (1 - 1e-12)
    assert 0 <= plan.bubble <= 1

    for other in plan.alternatives:
        assert other.step_seconds is None or other.step_seconds >= plan.step_seconds * (1 - 1e-12)
    assert {a.name for a in plan.alternatives} >= {"one device", "data parallel"}
    write_file(plan, tmp_path / "plan.json")
    assert read_file(Plan, tmp_path / "plan.json") == plan


def cuts(space: Space, stages: int) -> Iterator[tuple[int, ...]]:
    """All rows of nested states from the empty one to everything."""
    nested, last = space.states.nested, len(space.states.member) - 1
    for inner in itertools.combinations(range(1, last), stages - 1):
        row = (0, *inner, last)
        if all(nested[a, b] for a, b in itertools.pairwise(row)):
            yield row


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for chosen in itertools.product(range(1, total + 1), repeat=parts):
        if sum(chosen) <= total:
            yield chosen


def exhaustive(space: Space, replicas: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """By replicas: the smallest bottleneck of all cuts that fit, each evaluated as a plan of its own."""
    evaluator = Evaluator(space.profile, space.topology, space.terms, 1.0)
    names = np.array([layer.name for layer in space.profile.graph.layers], dtype=object)
    member, best = space.states.member, {}
    for chosen in replicas:
        if max(chosen) > space.terms.num_microbatches:
            continue
        for row in cuts(space, len(chosen)):
            shape = tuple(
                StageShape(tuple(names[member[b] & ~member[a]]), r)
                for (a, b), r in zip(itertools.pairwise(row), chosen, strict=True)
            )
            found = evaluator.evaluate(shape)
            if not found.short_bytes:
                best[chosen] = min(best.get(chosen, math.inf), found.bottleneck_seconds)
    return best


def tight_limit(profile: Profile, topology: Topology, m: int, seed: int) -> int:
    """A memory limit somewhere between what the most frugal plan needs and what one device needs."""
    space = Space(profile, topology, Terms(m, "1f1b", "adam", GiB))
    everything = space.slowest.peak_bytes(1, 0)[0, -1]
    each = best_of_each_shape(space.slowest.peak_bytes, topology.num_devices, topology.num_devices)
    least = min(found.value for found in each.values())
    return int(least + (everything - least) * (0.0, 0.1, 0.5, 1.0)[seed % 4])


@pytest.mark.parametrize("seed", range(20))
def test_searchers_equal_an_exhaustive_search_of_plans(seed: int, random_profile: Callable[..., Profile]) -> None:
    """On one level, memory binding in most cases: by count of devices, by shape, and by given replicas."""
    profile = random_profile(seed, max_layers=5)
    topology = local_topology(replace(profile.machine, num_devices=3))
    m = 2 + seed % 4
    terms = Terms(m, "1f1b", "adam", tight_limit(profile, topology, m, seed))
    space = Space(profile, topology, terms)
    best = exhaustive(space, [c for k in (1, 2, 3) for c in compositions(3, k)])
    compute = space.slowest.compute_seconds()

    def seconds(r: int, after: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
        return space.slowest.stage_seconds(0, r, after, compute)

    assert best, "the limit is one that some plan meets"
    for replicas in (c for k in (1, 2, 3) for c in compositions(3, k)):
        found = best_of_replicas(seconds, replicas)
        assert (found.value if found else math.inf) == pytest.approx(best.get(replicas, math.inf), rel=1e-9)
    by_shape: dict[tuple[int, int], float] = {}
    for replicas, value in best.items():
        key = len(replicas), sum(replicas)
        by_shape[key] = min(by_shape.get(key, math.inf), value)
    each = best_of_each_shape(seconds, 3, 3)
    assert {key: f.value for key, f in each.items()} == pytest.approx(by_shape, rel=1e-9)
    by_devices: dict[int, float] = {}
    for (_, n), value in by_shape.items():
        by_devices[n] = min(by_devices.get(n, math.inf), value)
    counts = pipedream.search_each(space.slowest)
    assert {n: f.bottleneck_seconds for n, f in counts.items()} == pytest.approx(by_devices, rel=1e-9)

    plan = partition(
        profile, topology, method="pipedream", memory_limit_bytes=terms.memory_limit_bytes, batch_size=4 * m
    )
    optimum = min(best.values())
    assert plan.bottleneck_seconds >= optimum * (1 - 1e-9)
    assert plan.optimal == (plan.bottleneck_seconds <= optimum * (1 + 1e-9))


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("seed", range(8))
def test_dp_equals_ilp_on_the_real_cost_model(
    seed: int, topology: Topology, random_profile: Callable[..., Profile]
) -> None:
    profile = random_profile(seed + 100, max_layers=6)
    limit = tight_limit(profile, topology, 4, seed)
    space = Space(profile, topology, Terms(4, "1f1b", "adam", limit))
    by_dp, by_ilp = pipedream.search(space.nested()), ilp.search(space.nested())
    assert (by_dp is None) == (by_ilp is None)
    if by_dp is not None and by_ilp is not None:
        assert by_dp.bottleneck_seconds == pytest.approx(by_ilp.bottleneck_seconds, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_single_outer_group_is_the_flat_problem_on_all_its_devices(
    seed: int, random_profile: Callable[..., Profile]
) -> None:
    """So memory checks of outer levels must not refuse what a split inside makes fit."""
    profile = random_profile(seed + 200, max_layers=6)
    nested = replace(TWO_LEVELS, levels=(replace(TWO_LEVELS.levels[0], count=3), Level("one", 1, 8e9, 1e-5)))
    flat = replace(nested, levels=nested.levels[:1])
    terms = Terms(6, "1f1b", "adam", tight_limit(profile, flat, 6, seed))
    inside = pipedream.search_each(Space(profile, nested, terms).nested())
    plain = pipedream.search_each(Space(profile, flat, terms).nested())
    assert (1 in inside) == (3 in plain)
    if 3 in plain:
        assert inside[1].bottleneck_seconds == pytest.approx(plain[3].bottleneck_seconds, rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_no_candidate_that_was_passed_over_is_faster(seed: int, random_profile: Callable[..., Profile]) -> None:
    profile = random_profile(seed + 300)
    limit = tight_limit(profile, ONE_LEVEL, 8, seed)
    plan = partition(profile, ONE_LEVEL, method="pipedream", memory_limit_bytes=limit)
    space = Space(profile, ONE_LEVEL, Terms(8, "1f1b", "adam", limit))
    evaluator = Evaluator(profile, ONE_LEVEL, space.terms, 1.0)
    offered = [*baselines(space), *search(space, Wanted()).candidates]
    evaluations = [evaluator.evaluate(candidate.shape) for candidate in offered]
    steps = [evaluator.play(e).step_seconds for e in evaluations if not e.short_bytes]
    assert plan.step_seconds == pytest.approx(min(steps), rel=1e-6)
    ranked = rank(evaluator, [replace(candidate, reported=False) for candidate in offered], Wanted())
    assert ranked.winner is not None
    assert ranked.winner.step_seconds == pytest.approx(min(steps), rel=1e-6)


def test_nothing_is_proved_where_not_every_cut_was_looked_at(
    random_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = random_profile(0)
    whole = partition(profile, ONE_LEVEL, method="pipedream", replicas=(1, 1))
    monkeypatch.setattr(candidates, "_MAX_STATES", 3)
    capped = partition(profile, ONE_LEVEL, method="pipedream", replicas=(1, 1))
    assert (whole.optimal, capped.optimal) == (True, False)
    assert any("branches too widely" in note for note in capped.notes)


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (2, 1), (1, 2), (3, 1), (1, 1, 1), (1, 1, 1, 1)])
def test_replicas_asked_for_are_kept(replicas: tuple[int, ...], chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 2e-3])
    plan = partition(profile, ONE_LEVEL, method="pipedream", replicas=replicas)
    assert tuple(stage.num_replicas for stage in plan.stages) == replicas
    space = Space(profile, ONE_LEVEL, Terms(8, "1f1b", "adam", plan.memory_limit_bytes))
    assert plan.bottleneck_seconds == pytest.approx(exhaustive(space, [replicas])[replicas], rel=1e-12)
    assert plan.optimal
    assert any(a.name == "data parallel" for a in plan.alternatives)


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_asked_for_are_kept(num_stages: int, topology: Topology, chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 2e-3])
    assert len(partition(profile, topology, num_stages=num_stages).stages) == num_stages
    assert len(partition(profile, topology, max_stages=num_stages).stages) <= num_stages
    assert sum(s.num_replicas for s in partition(profile, topology, num_devices=2).stages) <= 2


def test_everything_impossible_that_was_asked_for_is_listed(chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3] * 3)
    with pytest.raises(UserError, match=r"replicas 3-2 are for 2 stages, not 3\.\nreplicas 3-2 need 5 devices"):
        partition(profile, ONE_LEVEL, replicas=(3, 2), num_stages=3)
    with pytest.raises(UserError, match="4 stages asked for; the model has 3 layers"):
        partition(profile, ONE_LEVEL, num_stages=4)
    with pytest.raises(UserError, match="3 stages need 3 devices; there are 2"):
        partition(profile, ONE_LEVEL, num_stages=3, num_devices=2)
    with pytest.raises(UserError, match="2 replicas share 1 microbatches"):
        partition(profile, ONE_LEVEL, replicas=(2, 1), batch_size=3)
    with pytest.raises(UserError, match="batch size 0"):
        partition(profile, ONE_LEVEL, batch_size=0)
    with pytest.raises(UserError, match="expected one of 1f1b, gpipe"):
        partition(profile, ONE_LEVEL, schedule="2f2b")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="headroom"):
        partition(profile, ONE_LEVEL, memory_headroom=1.5)


@pytest.mark.parametrize("method", ["dp", "pipedream"])
def test_a_layer_that_fits_nowhere_is_named_with_the_bytes_missing(
    chain_profile: Callable[..., Profile], method: str
) -> None:
    profile = chain_profile([1e-3] * 3, parameter_bytes=100 * MiB)
    cost = profile.costs[1]
    huge = replace(profile, costs=(profile.costs[0], replace(cost, workspace_bytes=900 * MiB), profile.costs[2]))
    with pytest.raises(UserError, match="layer 'l1' alone needs") as caught:
        partition(huge, ONE_LEVEL, method=method, memory_limit_bytes=GiB)
    # Parameters, gradients and Adam's two states, shared out by four where that is allowed; one microbatch's stash,
    # and the workspace. A layer whose parameters are gathered has them all.
    state = {"pipedream": 4, "dp": 1.75}[method]
    needed = int(state * 100) * MiB + cost.stash_bytes + 900 * MiB
    assert f"{needed - GiB} bytes too much" in str(caught.value)


@pytest.mark.parametrize("method", ["dp", "pipedream"])
def test_if_no_plan_fits_the_best_one_is_short_by_what_is_said(
    chain_profile: Callable[..., Profile], method: str
) -> None:
    profile = chain_profile([1e-3] * 8, parameter_bytes=100 * MiB)
    limit = {"dp": 300, "pipedream": 600}[method] * MiB
    with pytest.raises(UserError, match="every layer fits alone") as caught:
        partition(profile, ONE_LEVEL, method=method, memory_limit_bytes=limit)
    short = int(str(caught.value).split(" bytes too much")[0].split()[-1])
    partition(profile, ONE_LEVEL, method=method, memory_limit_bytes=limit + short)
    with pytest.raises(UserError, match="1 bytes too much"):
        partition(profile, ONE_LEVEL, method=method, memory_limit_bytes=limit + short - 1)


def test_what_does_not_fit_is_listed_as_rejected(chain_profile: Callable[..., Profile]) -> None:
    plan = partition(chain_profile([1e-3] * 8, parameter_bytes=50 * MiB), ONE_LEVEL, memory_limit_bytes=GiB)
    rejected = {a.name: a for a in plan.alternatives if a.step_seconds is None}
    assert len(plan.stages) > 1
    assert {"one device", "data parallel"} <= set(rejected)
    assert "does not fit" in rejected["one device"].note


def test_a_missing_solver_falls_back_and_says_so(
    chain_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = chain_profile([1e-3] * 6)
    solved = partition(profile, ONE_LEVEL, method="ilp")
    assert solved.method == "ilp"

    def died(*args: object, **options: object) -> None:
        raise ilp_options.SolverError("no solver is installed")

    monkeypatch.setattr(ilp_options, "search", died)
    plan = partition(profile, ONE_LEVEL, method="ilp")
    assert plan.method == "dp"
    assert any("no solver is installed" in note for note in plan.notes)
    assert (plan.stages, plan.step_seconds) == (solved.stages, solved.step_seconds)


def test_surprises_are_said(chain_profile: Callable[..., Profile]) -> None:
    small = partition(chain_profile([1e-6] * 4), ONE_LEVEL)
    assert len(small.stages) == 1
    assert any("One stage wins: one device" in note and "2-stage plan" in note for note in small.notes)
    assert any("3 of 4 devices stay idle" in note for note in small.notes)
    free = partition(chain_profile([1e-2] * 8), FAST)
    assert any("Communication is free" in note for note in free.notes)
    slow = partition(chain_profile([1e-3] * 8, value_bytes=10 * MiB), ONE_LEVEL)
    assert not any("Communication is free" in note for note in slow.notes)
    gpu = replace(ONE_LEVEL, device=Device("A100", GiB))
    assert any("measured on cpu" in note for note in partition(chain_profile([1e-2] * 4), gpu).notes)


def test_ties_go_to_fewer_devices(chain_profile: Callable[..., Profile]) -> None:
    """One microbatch cannot be shared: more devices only add transfers, here free ones."""
    free = replace(FAST, levels=(Level("machine", 4, 1e15, 0.0),))
    plan = partition(chain_profile([1e-3] * 4), free, batch_size=4)
    assert [stage.num_replicas for stage in plan.stages] == [1]


def test_odd_layer_counts_lose_and_double_nothing(chain_profile: Callable[..., Profile]) -> None:
    for layers, stages in ((10, 3), (30, 4), (38, 4), (61, 4), (5, 4)):
        profile = chain_profile([1e-3] * layers)
        plan = partition(profile, ONE_LEVEL, num_stages=stages)
        assert [n for s in plan.stages for n in s.layers] == [layer.name for layer in profile.graph.layers]


def test_the_straight_pipeline_is_cut_to_fit_where_it_can(chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3, 1e-3, 1e-3, 9e-3], parameter_bytes=100 * MiB)
    two = replace(ONE_LEVEL, levels=(replace(ONE_LEVEL.levels[0], count=2),))
    plan = partition(profile, two, memory_limit_bytes=950 * MiB)
    (straight,) = [a for a in plan.alternatives if a.name == "straight pipeline"]
    assert (straight.note, len(plan.stages)) == ("this plan", 2)


def test_the_table_shows_stages_baselines_and_notes(chain_profile: Callable[..., Profile]) -> None:
    plan = partition(chain_profile([1e-6] * 4), ONE_LEVEL, num_stages=2, replicas=(2, 1))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(plan_table(replace(plan, notes=("[bold] is no markup here.",))))
    text = console.export_text()
    slower = next(a for a in plan.alternatives if a.name == "data parallel").step_seconds
    assert slower is not None
    for part in (
        "l3 (3)" if len(plan.stages[0].layers) == 1 else "l0 .. ",
        format_bytes(plan.stages[0].memory.total_bytes),
        format_seconds(plan.step_seconds),
        "data parallel",
        f"{slower / plan.step_seconds:.2f}x",
        "Note: [bold] is no markup here.",
    ):
        assert part in text


def test_planning_loads_no_torch() -> None:
    code = "import dpart.partitioner.partition, dpart.partitioner.table, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
