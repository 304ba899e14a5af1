"""States of a layer graph: all ideals, and the fallback where they are too many."""

import random
import time

import numpy as np
import pytest

from dpart.partitioner.states import depth_first_order, list_states


def random_graph(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    density = rng.choice([0.1, 0.3, 0.6])
    return [[p for p in range(layer) if rng.random() < density] for layer in range(rng.randint(1, 9))]


@pytest.mark.parametrize("seed", range(60))
def test_states_are_exactly_the_closed_sets_of_layers(seed: int) -> None:
    graph = random_graph(seed)
    n = len(graph)
    closed = {
        mask
        for mask in range(1 << n)
        if all(mask >> p & 1 for layer in range(n) if mask >> layer & 1 for p in graph[layer])
    }
    states = list_states(graph)
    masks = [int(row @ (1 << np.arange(n))) for row in states.member]
    assert len(set(masks)) == len(masks)
    assert set(masks) == closed
    assert (masks[0], masks[-1]) == (0, (1 << n) - 1)
    assert states.complete
    for i, a in enumerate(masks):
        for j, b in enumerate(masks):
            assert states.nested[i, j] == (a != b and a & b == a)
    assert not np.tril(states.nested).any()


@pytest.mark.parametrize("seed", range(20))
def test_past_the_cap_states_are_the_prefixes_of_one_topological_order(seed: int) -> None:
    graph = random_graph(seed)
    number = len(list_states(graph).member)
    assert list_states(graph, max_states=number).complete
    if number == len(graph) + 1:
        return
    states = list_states(graph, max_states=number - 1)
    assert not states.complete
    assert states.member.sum(axis=1).tolist() == list(range(len(graph) + 1))
    assert np.array_equal(states.nested, ~np.tri(len(graph) + 1, dtype=bool))
    for row in states.member:
        assert all(row[p] for layer in np.flatnonzero(row) for p in graph[layer])
    for smaller, larger in zip(states.member, states.member[1:], strict=False):
        assert (smaller <= larger).all()


def test_the_depth_first_order_finishes_a_branch_before_the_next() -> None:
    #       0 -> 1 -> 3 -> 5,  0 -> 2 -> 4 -> 5
    assert depth_first_order([[], [0], [0], [1], [2], [3, 4]]) == [0, 1, 3, 2, 4, 5]


def test_a_chain_of_1500_layers_is_listed_without_recursion() -> None:
    graph = [[layer - 1] if layer else [] for layer in range(1500)]
    began = time.perf_counter()
    states = list_states(graph)
    assert states.complete
    assert len(states.member) == 1501
    assert time.perf_counter() - began < 20


def test_wide_graphs_stop_at_the_cap() -> None:
    """64 parallel chains have 11^64 states."""
    graph = [[layer - 64] if layer >= 64 else [] for layer in range(640)]
    states = list_states(graph)
    assert not states.complete
    assert len(states.member) == 641


def test_long_parallel_chains_fall_back_in_good_time() -> None:
    graph = [[layer - 2] if layer >= 2 else [] for layer in range(1500)]
    assert len(list_states(graph).member) == 1501
