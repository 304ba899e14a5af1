"""Folding averages noise and nothing else; a contraction cuts only where a plan may, and keeps what it must."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dpart.partitioner import contraction
from dpart.partitioner.contraction import Contraction, contract
from dpart.partitioner.folding import fold
from dpart.partitioner.partition import partition
from dpart.partitioner.quantities import chains
from dpart.partitioner.topology import Device, Level, Topology
from dpart.profiler.profile import Profile

GiB, MiB = 2**30, 2**20
ONE_LEVEL = Topology(Device("cpu", GiB), (Level("machine", 4, 2e9, 1e-4),))
Maker = Callable[..., Profile]


def blocks(profile: Profile, seconds: list[float], spread: float) -> Profile:
    """A chain whose layers but the first are of one kind, measured so."""
    costs = tuple(
        replace(
            cost,
            forward_seconds=time,
            backward_seconds=2 * time,
            forward_spread_seconds=spread,
            backward_spread_seconds=2 * spread,
            stash_bytes=MiB,
            workspace_bytes=MiB,
        )
        for cost, time in zip(profile.costs, seconds, strict=True)
    )
    return replace(profile, costs=costs)


@pytest.mark.parametrize("seed", range(20))
def test_equal_layers_within_their_noise_become_equal(seed: int, chain_profile: Maker) -> None:
    """Their sum stays, and folding again changes nothing."""
    rng = random.Random(seed)
    seconds = [1e-3 * (1 + 0.01 * rng.random()) for _ in range(8)]
    profile = blocks(chain_profile(seconds), seconds, spread=1e-5)
    folded = fold(profile)
    equal = [cost.forward_seconds for cost in folded.costs[1:]]
    assert len(set(equal)) == 1
    assert equal[0] == pytest.approx(sum(seconds[1:]) / 7, rel=1e-12)
    for name in ("forward_seconds", "backward_seconds"):
        before, after = (sum(getattr(c, name) for c in p.costs) for p in (profile, folded))
        assert after == pytest.approx(before, rel=1e-12)
    # The first layer reads the batch, a value of another shape.
    assert folded.costs[0] == profile.costs[0]
    assert fold(folded) == folded
    assert (folded.graph, folded.machine, folded.batch_size) == (profile.graph, profile.machine, profile.batch_size)


@pytest.mark.parametrize("seed", range(20))
def test_layers_that_differ_by_more_than_their_spread_stay_as_they_are(seed: int, chain_profile: Maker) -> None:
    rng = random.Random(seed)
    seconds = [1e-3 * rng.uniform(1.0, 1.01) for _ in range(8)]
    seconds[rng.randint(1, 6)] += 1e-4
    profile = blocks(chain_profile(seconds), seconds, spread=1e-5)
    assert fold(profile) == profile


@pytest.mark.parametrize("seed", range(30))
def test_measurements_without_spread_stay_as_they_are(seed: int, split_profile: Maker) -> None:
    """Equal times are equal already, at every degree: so the plans of random profiles are those of the profile."""
    profile = split_profile(seed)
    assert fold(profile) == profile


def test_splits_are_averaged_with_their_layers(chain_profile: Maker, split_profile: Maker) -> None:
    (split, *_) = split_profile(0).costs[0].splits
    seconds = [1e-3, 1.001e-3, 0.999e-3, 1e-3]
    profile = blocks(chain_profile(seconds), seconds, spread=1e-5)
    costs = tuple(
        replace(cost, splits=(replace(split, forward_seconds=time / 2, backward_seconds=time),))
        for cost, time in zip(profile.costs, seconds, strict=True)
    )
    folded = fold(replace(profile, costs=costs))
    (first,), (second,) = folded.costs[1].splits, folded.costs[2].splits
    assert first == second
    assert first.forward_seconds == pytest.approx(0.5e-3, rel=1e-12)


def test_layers_of_other_sizes_are_not_averaged(chain_profile: Maker) -> None:
    seconds = [1e-3, 1.001e-3, 0.999e-3, 1e-3]
    profile = blocks(chain_profile(seconds), seconds, spread=1e-5)
    costs = list(profile.costs)
    costs[1] = replace(costs[1], stash_bytes=costs[1].stash_bytes + 1)
    folded = fold(replace(profile, costs=tuple(costs))).costs
    assert folded[:2] == tuple(costs[:2])
    assert folded[2].forward_seconds == folded[3].forward_seconds == pytest.approx(0.9995e-3)


def all_ideals(profile: Profile) -> set[tuple[bool, ...]]:
    graph = profile.graph
    names = [layer.name for layer in graph.layers]
    found = set()
    for chosen in itertools.product((False, True), repeat=len(names)):
        inside = {name for name, is_in in zip(names, chosen, strict=True) if is_in}
        if all(set(graph.digraph.predecessors(name)) <= inside for name in inside):
            found.add(chosen)
    return found


def check_states(profile: Profile, found: Contraction) -> None:
    """States are ideals, a subset before what holds it, both ends among them; units are what no cut separates."""
    rows = [tuple(row) for row in found.member.tolist()]
    assert not any(rows[0])
    assert all(rows[-1])
    assert len(set(rows)) == len(rows)
    names = [layer.name for layer in profile.graph.layers]
    for row in rows:
        inside = {name for name, is_in in zip(names, row, strict=True) if is_in}
        assert all(set(profile.graph.digraph.predecessors(name)) <= inside for name in inside)
    sizes = found.member.sum(axis=1)
    assert (np.diff(sizes) >= 0).all()
    assert (found.units.sum(axis=0) == 1).all()
    for unit in found.units:
        inside = found.member[:, unit]
        assert (inside.all(axis=1) | ~inside.any(axis=1)).all()
    reached = np.zeros(len(names), dtype=np.bool_)
    for unit in found.units:
        for layer in np.flatnonzero(unit):
            before = {names.index(p) for p in profile.graph.digraph.predecessors(names[layer])}
            assert before <= set(np.flatnonzero(reached | unit).tolist())
        reached |= unit


@pytest.mark.parametrize("seed", range(60))
def test_states_are_all_ideals_where_they_are_few(seed: int, random_profile: Maker) -> None:
    profile = random_profile(seed)
    found = contract(profile)
    check_states(profile, found)
    assert {tuple(row) for row in found.member.tolist()} == all_ideals(profile)
    assert (found.complete, found.one_order, found.num_cuts) == (True, False, found.num_places)


@pytest.mark.parametrize("seed", range(60))
def test_layers_kept_together_are_cut_by_no_state(seed: int, random_profile: Maker) -> None:
    """All other ideals are states."""
    profile = random_profile(seed)
    names = [layer.name for layer in profile.graph.layers]
    group = random.Random(seed).sample(names, min(len(names), 2))
    found = contract(profile, together=[group])
    check_states(profile, found)
    columns = [names.index(name) for name in group]
    allowed = {ideal for ideal in all_ideals(profile) if len({ideal[c] for c in columns}) == 1}
    assert {tuple(row) for row in found.member.tolist()} == allowed
    assert found.complete


@pytest.mark.parametrize("most", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(30))
def test_thinned_states_keep_the_ends_and_the_cheapest_cuts(seed: int, most: int, random_profile: Maker) -> None:
    """Beyond the cap they are places of one order; it is said that cuts were left out."""
    profile = random_profile(seed)
    found = contract(profile, max_states=most)
    check_states(profile, found)
    if len(all_ideals(profile)) <= most:
        assert found.complete
        return
    assert len(found.member) <= most
    assert not found.complete
    assert (found.member[:-1] <= found.member[1:]).all(), "one order"
    assert found.num_cuts <= found.num_places


def test_a_chain_is_thinned_to_where_least_crosses(chain_profile: Maker) -> None:
    """Of blocks of three layers, the cuts between blocks."""
    profile = chain_profile([1e-3] * 30)
    values = tuple(
        replace(value, size_bytes=MiB if i % 3 == 0 else 2 * MiB) for i, value in enumerate(profile.graph.values)
    )
    profile = replace(profile, graph=replace(profile.graph, values=values))
    assert contract(profile).num_cuts == 29
    found = contract(profile, max_states=12)
    assert found.member.sum(axis=1).tolist() == list(range(0, 31, 3))
    assert not found.complete
    assert not found.one_order
    crossing = {chain.holders: chain.forward_bytes for chain in chains(profile.graph)}
    assert {crossing[(f"l{n - 1}", f"l{n}")] for n in range(3, 30, 3)} == {MiB}


def test_a_chain_without_cheap_cuts_is_thinned_evenly_in_time(chain_profile: Maker) -> None:
    profile = chain_profile([1e-3] * 20 + [9e-3] * 20)
    found = contract(profile, max_states=11)
    check_states(profile, found)
    seconds = found.member @ np.array([cost.forward_seconds for cost in profile.costs])
    assert len(found.member) == 11
    assert np.diff(seconds).max() <= 2 * seconds[-1] / 10


def test_folding_makes_no_plan_slower(chain_profile: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers do differ, the plan is the one of the profile as it is."""
    seconds = [1e-3, 2e-3, 5e-3, 1e-3, 4e-3, 1e-3]
    profile = blocks(chain_profile(seconds), seconds, spread=1e-5)
    plan = partition(profile, ONE_LEVEL, num_stages=2, replicas=(1, 1), batch_size=32)
    assert [layer for stage in plan.stages for layer in stage.layers] == [f"l{i}" for i in range(6)]
    assert sum(s.forward_seconds + s.backward_seconds for s in plan.stages) == pytest.approx(3 * sum(seconds))
    assert len(plan.stages[0].layers) == 3


@pytest.mark.parametrize("most", [4, 6])
def test_what_was_left_out_is_said_in_the_certificate(
    most: int, chain_profile: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contraction.contract, "__kwdefaults__", {"max_states": most, "together": ()})
    plan = partition(chain_profile([1e-3] * 12), ONE_LEVEL)
    assert plan.certificate is not None
    assert f"{most - 2} of 11 cuts" in plan.certificate.space
