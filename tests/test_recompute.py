"""What is recomputed: the cheapest of all sets of regions that makes a stage fit, for every limit at once."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from full_space import FullSpace, Layers

from dpart.partitioner.contraction import contract
from dpart.partitioner.cost import Terms
from dpart.partitioner.evaluate import Evaluator
from dpart.partitioner.prices import Freedom, Prices, stage_shape
from dpart.partitioner.recompute import Classes, Regions, choices, kept_bytes
from dpart.partitioner.topology import Device, Level, Topology
from dpart.profiler.profile import Profile

MiB, GiB = 2**20, 2**30
ONE_LEVEL = Topology(Device("cpu", GiB), (Level("machine", 4, 2e9, 1e-4),))


def random_regions(rng: random.Random) -> Regions:
    """All different, or of a few kinds; some save nothing, or cost nothing."""
    count = rng.randint(1, 11)
    kinds = rng.choice([count, rng.randint(1, count)])
    drawn = [
        (rng.choice([0.0, *(rng.random() for _ in range(6))]), rng.choice([0, *rng.sample(range(1, 99), 6)]))
        for _ in range(kinds)
    ]
    chosen = drawn if kinds == count else [rng.choice(drawn) for _ in range(count)]
    again, saved = (np.array(column, dtype=np.float64) for column in zip(*chosen, strict=True))
    return Regions(np.eye(count, dtype=np.bool_), again, saved, saved + 1)


@pytest.mark.parametrize("seed", range(80))
def test_a_row_has_the_cheapest_set_for_every_number_of_bytes(seed: int) -> None:
    """Up to 256 combinations exactly; beyond, with at most the seconds of one region more."""
    regions = random_regions(random.Random(seed))
    size, classes = len(regions.saved_bytes), Classes(regions)
    counts = classes.counts(np.ones(size, dtype=np.bool_)).tolist()
    row = choices(classes, counts)
    subsets = [list(s) for k in range(size + 1) for s in itertools.combinations(range(size), k)]
    seconds = np.array([regions.again_seconds[s].sum() for s in subsets])
    saved = np.array([regions.saved_bytes[s].sum() for s in subsets])
    assert row.again_seconds[0] == 0
    assert (np.diff(row.again_seconds) >= 0).all() and (np.diff(row.saved_bytes) >= 0).all()
    assert row.counts @ classes.again_seconds == pytest.approx(row.again_seconds)
    assert row.counts @ classes.saved_bytes == pytest.approx(row.saved_bytes)
    assert (row.counts <= counts).all()
    slack = 0.0 if np.prod(np.array(counts) + 1) <= 256 else float(regions.again_seconds.max())
    for wanted in np.unique(saved):
        optimum = seconds[saved >= wanted].min()
        (enough,) = np.nonzero(row.saved_bytes >= wanted)
        assert optimum - 1e-12 <= row.again_seconds[enough[0]] <= optimum + slack + 1e-12


def test_both_kinds_of_rows_are_met() -> None:
    combinations = []
    for seed in range(80):
        regions = random_regions(random.Random(seed))
        counts = Classes(regions).counts(np.ones(len(regions.saved_bytes), dtype=np.bool_))
        combinations.append(int(np.prod(counts + 1)))
    assert 5 < sum(c > 256 for c in combinations) < 75


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_is_what_enters(seed: int, random_profile: Callable[..., Profile]) -> None:
    graph = random_profile(seed).graph
    names = [layer.name for layer in graph.layers]
    member = np.random.default_rng(seed).random((20, len(names))) < 0.4
    for row, kept in zip(member, kept_bytes(graph, member), strict=True):
        inside = {name for name, is_in in zip(names, row, strict=True) if is_in}
        entering = {v for name in inside for v in graph.layer[name].inputs} - {
            v for name in inside for v in graph.layer[name].outputs
        }
        made = (graph.value[v] for v in entering if graph.value[v].producer is not None)
        assert kept == sum(value.size_bytes for value in made)


def sets_of(profile: Profile, prices: Prices, segment: int) -> tuple[Layers, Layers]:
    member = prices.contraction.member
    start, stop = (member[states[segment]] for states in (prices.start, prices.stop))
    return frozenset(np.flatnonzero(start).tolist()), frozenset(np.flatnonzero(stop).tolist())


@pytest.mark.parametrize("seed", range(24))
def test_every_stage_has_the_cheapest_choice_that_fits(seed: int, split_profile: Callable[..., Profile]) -> None:
    """All segments, degrees, shardings and microbatches in flight; the room that is needed once included.

    The stage by name that comes of it takes as long, and fits.
    """
    rng = random.Random(seed)
    profile = split_profile(seed, 4)
    terms = Terms(rng.randint(2, 6), "1f1b", "adam", rng.randint(20, 120) * MiB, reduce_buckets=rng.choice([1, 4]))
    freedom = Freedom((1, 2), (0, 1, 2, 3), True)
    prices = Prices(profile, contract(profile), ONE_LEVEL, terms, freedom)
    space = FullSpace(profile, ONE_LEVEL, terms, freedom)
    for degree, replicas in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3)):
        for sharding in prices.shardings(replicas):
            own = FullSpace(profile, ONE_LEVEL, terms, replace(freedom, shardings=(sharding,)))
            priced = prices.price(degree, sharding, replicas, 4)
            for segment, signature in enumerate(prices.signature.tolist()):
                before, upto = sets_of(profile, prices, segment)
                for n in range(1, 5):
                    held = min(n, terms.own_microbatches(replicas))
                    possible = own.choices(before, upto, replicas, degree, held)
                    latency = priced.latency_seconds[n - 1, signature]
                    if not possible:
                        assert np.isinf(latency)
                        continue
                    assert latency == pytest.approx(possible[0].latency, rel=1e-9)
                    assert priced.busy_seconds[n - 1, signature] == pytest.approx(possible[0].busy, rel=1e-9)
                    stage = stage_shape(prices, segment, priced, n)
                    again = space.one_stage(before, upto, stage, held)
                    assert again[0] == pytest.approx(latency, rel=1e-9)
                    assert again[2] <= terms.memory_limit_bytes


@pytest.mark.parametrize("limit", range(30, 180, 15))
def test_many_regions_cost_at_most_one_more_than_they_need(limit: int, chain_profile: Callable[..., Profile]) -> None:
    """Ten different layers: 1,024 sets, which a row does not list."""
    rng = random.Random(limit)
    profile = chain_profile([rng.uniform(1e-3, 9e-3) for _ in range(10)], parameter_bytes=0)
    costs = tuple(replace(cost, stash_bytes=rng.randint(2, 12) * MiB, workspace_bytes=0) for cost in profile.costs)
    profile = replace(profile, costs=costs)
    terms = Terms(4, "1f1b", "sgd", limit * MiB)
    freedom = Freedom((1,), (0,), True)
    prices = Prices(profile, contract(profile), ONE_LEVEL, terms, freedom)
    priced = prices.price(1, 0, 1, 3)
    (whole,) = np.nonzero((prices.start == 0) & (prices.stop == prices.num_states - 1))
    best = FullSpace(profile, ONE_LEVEL, terms, freedom).choices(frozenset(), frozenset(range(10)), 1, 1, 3)
    found = priced.latency_seconds[2, prices.signature[whole[0]]]
    if not best:
        assert np.isinf(found)
        return
    assert best[0].latency - 1e-12 <= found <= best[0].latency + max(c.forward_seconds for c in costs) + 1e-12
    stage = stage_shape(prices, int(whole[0]), priced, 3)
    evaluation = Evaluator(profile, ONE_LEVEL, replace(terms, schedule="gpipe", num_microbatches=3), 1.0).evaluate(
        (stage,)
    )
    assert evaluation.short_bytes == 0
