"""Cost laws: vectors and matrices say what sets of layers say, and one plan costs the same either way."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from dpart.partitioner.candidates import Space
from dpart.partitioner.cost import Terms, all_reduce_seconds
from dpart.partitioner.evaluate import Evaluator, Shape, StageShape
from dpart.partitioner.quantities import measure
from dpart.partitioner.search import FoundStage
from dpart.partitioner.topology import Device, Level, Topology
from dpart.profiler.profile import Profile
from dpart.runtime.schedule import EXECUTABLE_SCHEDULES, SCHEDULES, Replica

GiB = 2**30
ONE_LEVEL = Topology(Device("cpu", GiB), (Level("machine", 4, 2e9, 1e-4),))
TWO_LEVELS = Topology(Device("cpu", GiB), (Level("host", 2, 8e9, 1e-5), Level("cluster", 2, 1e9, 1e-4)))


def space(profile: Profile, *, topology: Topology = ONE_LEVEL, m: int = 8, **options: str) -> Space:
    terms = {"schedule": "1f1b", "optimizer": "adam", "memory_limit_bytes": GiB} | options
    return Space(profile, topology, Terms(num_microbatches=m, **terms))  # type: ignore[arg-type]


def by_sets(profile: Profile, before: set[str], stage: set[str]) -> dict[str, float]:
    """The definition of every quantity, one stage at a time."""
    graph = profile.graph
    after = {layer.name for layer in graph.layers} - before - stage
    costs = [profile.cost[name] for name in stage]

    def uses(name: str, layers: Iterable[str]) -> bool:
        return any(name in graph.layer[layer].parameters for layer in layers)

    mine = [p for p in graph.parameters if uses(p.name, stage)]
    expected = {
        "forward_seconds": sum(c.forward_seconds for c in costs),
        "backward_seconds": sum(c.backward_seconds for c in costs),
        "stash_bytes": sum(c.stash_bytes for c in costs),
        "workspace_bytes": max(c.workspace_bytes for c in costs),
        "parameter_bytes": sum(p.size_bytes for p in mine),
        "trainable_bytes": sum(p.size_bytes for p in mine if p.trainable),
        "received_bytes": 0,
        "returned_bytes": sum(p.size_bytes for p in mine if p.trainable and uses(p.name, before)),
        "sent_bytes": 0,
        "accepted_bytes": sum(p.size_bytes for p in mine if p.trainable and uses(p.name, after)),
    }
    for value in graph.values:
        read = set(value.consumers)
        if value.producer in before and read & stage:
            expected["received_bytes"] += value.size_bytes
            expected["returned_bytes"] += value.size_bytes * value.differentiable
        if value.producer is not None and (value.producer in stage or read & stage) and read & after:
            expected["sent_bytes"] += value.size_bytes
            expected["accepted_bytes"] += value.size_bytes * value.differentiable
    return expected


@pytest.mark.parametrize("seed", range(60))
def test_quantities_are_those_of_the_sets_of_layers(seed: int, random_profile: Callable[[int], Profile]) -> None:
    profile = random_profile(seed)
    states = space(profile).states
    found = measure(profile, states.member)
    names = np.array([layer.name for layer in profile.graph.layers])
    for i, j in zip(*np.nonzero(states.nested), strict=True):
        before, stage = set(names[states.member[i]]), set(names[states.member[j] & ~states.member[i]])
        for name, expected in by_sets(profile, before, stage).items():
            value = getattr(found, name)[i, j]
            assert value == (pytest.approx(expected, abs=1e-15) if "seconds" in name else expected), name


def plans(here: Space, replicas: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Shape]]:
    """All plans with these replicas, as rows of states and as stages of layers."""
    nested, last = here.states.nested, len(here.states.member) - 1
    for inner in itertools.combinations(range(1, last), len(replicas) - 1):
        row = (0, *inner, last)
        if all(nested[a, b] for a, b in itertools.pairwise(row)):
            found = (FoundStage(a, b, r) for (a, b), r in zip(itertools.pairwise(row), replicas, strict=True))
            yield row, here.shape(found)


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_costs_what_its_stages_cost_the_searcher(seed: int, random_profile: Callable[..., Profile]) -> None:
    """On one level: every plan of two and three stages, its seconds, bytes and microbatches in flight."""
    options = {"schedule": ("1f1b", "gpipe")[seed % 2], "optimizer": ("adam", "sgd")[seed // 2 % 2]}
    here = space(random_profile(seed, max_layers=5), m=5, **options)
    costs, evaluator = here.slowest, Evaluator(here.profile, ONE_LEVEL, here.terms, 1.0)
    compute = costs.compute_seconds()
    for replicas in ((2, 1), (1, 3), (2, 2), (1, 1, 1), (1, 2, 1)):
        for row, shape in plans(here, replicas):
            found, before = evaluator.evaluate(shape), set[str]()
            for s, (i, j) in enumerate(itertools.pairwise(row)):
                after, stage = sum(replicas[s + 1 :]), found.stages[s]
                asked = costs.stage_seconds(0, replicas[s], after, compute)[i, j]
                assert found.stage_seconds[s] == pytest.approx(asked, rel=1e-12)
                assert stage.memory.total_bytes == costs.peak_bytes(replicas[s], after)[i, j]
                expected = by_sets(here.profile, before, set(stage.layers))
                held = expected["stash_bytes"] + expected["received_bytes"]
                assert stage.memory.stash_bytes == stage.in_flight * held
                directions = ("received_bytes", "returned_bytes", "sent_bytes", "accepted_bytes")
                assert stage.memory.channel_bytes == sum(expected[name] for name in directions)
                before |= set(stage.layers)
            assert found.short_bytes == 0


def test_a_value_that_skips_a_stage_goes_past_it(chain_profile: Callable[..., Profile]) -> None:
    """From its producer straight to the stage that reads it, and on from there to the next one that does."""
    profile = chain_profile([1e-3] * 4)
    graph = profile.graph
    skipping = replace(graph.values[1], consumers=("l1", "l3"), size_bytes=5)
    graph = replace(graph, values=(graph.values[0], skipping, *graph.values[2:]))
    here = space(replace(profile, graph=graph))
    evaluator = Evaluator(here.profile, ONE_LEVEL, here.terms, 1.0)
    flows = evaluator.evaluate(tuple(StageShape((f"l{i}",), 1) for i in range(4))).flows
    sizes = {(f.source, f.target): f.forward_bytes for f in flows}
    assert sizes == {(0, 1): 5, (1, 2): 2**20, (1, 3): 5, (2, 3): 2**20}


def test_in_flight_is_the_peak_of_the_schedule() -> None:
    for replicas in itertools.chain(*(itertools.product((1, 2, 3, 4), repeat=k) for k in (1, 2, 3))):
        for m, kind in itertools.product(range(1, 8), EXECUTABLE_SCHEDULES):
            terms, schedule = Terms(m, kind, "sgd", GiB), SCHEDULES[kind](replicas, m)  # type: ignore[arg-type]
            for s, r in enumerate(replicas):
                held = schedule.peak_in_flight(Replica(s, 0))
                assert terms.in_flight(r, sum(replicas[s + 1 :])) == held
                assert held == max(schedule.peak_in_flight(Replica(s, q)) for q in range(r))


def test_the_share_is_that_of_the_busiest_replica() -> None:
    for m, r in itertools.product(range(1, 9), range(1, 9)):
        busiest = max(len(range(q, m, r)) for q in range(r))
        assert Terms(m, "1f1b", "sgd", GiB).share(r) == busiest / m


def test_a_tied_weight_counts_once_a_stage_and_its_gradient_travels(
    random_profile: Callable[[int], Profile],
) -> None:
    seen = 0
    for seed in range(40):
        profile = random_profile(seed)
        users = [layer.name for layer in profile.graph.layers if "tied" in layer.parameters]
        if not users or not profile.graph.parameter["tied"].trainable:
            continue
        seen += 1
        names = tuple(layer.name for layer in profile.graph.layers)
        here = space(profile)
        evaluator = Evaluator(profile, ONE_LEVEL, here.terms, 1.0)
        cut = names.index(users[0]) + 1
        whole = evaluator.evaluate((StageShape(names, 1),))
        split = evaluator.evaluate((StageShape(names[:cut], 1), StageShape(names[cut:], 1)))
        size = profile.graph.parameter["tied"].size_bytes
        assert sum(s.memory.parameter_bytes for s in split.stages) == whole.stages[0].memory.parameter_bytes + size
        (flow,) = split.flows
        assert flow.closing_bytes == size
        assert (flow.backward_bytes or 0) >= size
        assert whole.flows == ()
    assert seen > 5


def test_memory_adds_up_and_follows_the_optimizer(random_profile: Callable[[int], Profile]) -> None:
    profile = random_profile(3)
    names = tuple(layer.name for layer in profile.graph.layers)
    found = {
        optimizer: Evaluator(profile, ONE_LEVEL, space(profile, optimizer=optimizer).terms, 1.0)
        .evaluate((StageShape(names, 1),))
        .stages[0]
        .memory
        for optimizer in ("sgd", "adam")
    }
    trainable = sum(p.size_bytes for p in profile.graph.parameters if p.trainable)
    assert found["adam"].optimizer_bytes == 2 * trainable
    assert found["sgd"].optimizer_bytes == 0
    for memory in found.values():
        assert memory.gradient_bytes == trainable
        items = [
            getattr(memory, f"{n}_bytes")
            for n in ["parameter", "gradient", "optimizer", "stash", "workspace", "channel"]
        ]
        assert memory.total_bytes == sum(items)


def test_all_reduce_is_a_ring_on_every_level() -> None:
    size = np.array([8e9])
    levels = TWO_LEVELS.levels
    assert all_reduce_seconds(size, levels, (1, 1))[0] == 0
    assert all_reduce_seconds(size, levels, (2, 1))[0] == pytest.approx(8e9 / 8e9 + 2 * 1e-5)
    both = all_reduce_seconds(size, levels, (2, 2))[0]
    assert both == pytest.approx(8e9 / 8e9 + 2 * 1e-5 + 8e9 / 1e9 + 2 * 1e-4)
    assert all_reduce_seconds(np.array([0.0]), levels, (2, 2))[0] == 0


def test_links_of_a_flattened_plan_are_those_of_the_level_that_holds_both(
    chain_profile: Callable[..., Profile],
) -> None:
    profile = chain_profile([1e-3] * 4, value_bytes=10**6)
    here = space(profile, topology=TWO_LEVELS)
    shape = tuple(StageShape((f"l{i}",), 1) for i in range(4))
    found = Evaluator(profile, TWO_LEVELS, here.terms, 1.0).evaluate(shape)
    inside, across = 1e-5 + 1e6 / 8e9, 1e-4 + 1e6 / 1e9
    assert [s.receive_seconds for s in found.stages] == pytest.approx([0, inside, across, inside])


@pytest.mark.parametrize("seed", range(30))
def test_the_fastest_links_bound_every_plan_from_below(seed: int, random_profile: Callable[..., Profile]) -> None:
    """So a plan that reaches the optimum of that problem is proved to be optimal on the true links."""
    here = space(random_profile(seed, max_layers=5), topology=TWO_LEVELS)
    evaluator = Evaluator(here.profile, TWO_LEVELS, here.terms, 1.0)
    compute = here.fastest.compute_seconds()
    for replicas in ((1, 1), (3, 1), (1, 2), (2, 2), (1, 1, 1, 1), (4,)):
        for row, shape in plans(here, replicas):
            exact = evaluator.evaluate(shape).stage_seconds
            for s, (i, j) in enumerate(itertools.pairwise(row)):
                after = sum(replicas[s + 1 :])
                least = here.fastest.stage_seconds(0, replicas[s], after, compute)[i, j]
                assert least <= exact[s] * (1 + 1e-12)
                if max(replicas) == 1:
                    assert here.slowest.stage_seconds(0, 1, after, compute)[i, j] >= exact[s] * (1 - 1e-12)
