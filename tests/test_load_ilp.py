"""The integer programme and the local search for graphs that branch, against exhaustive search."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from test_branching import check, exhaustive, load, random_problem

from dpart.partitioner import branching, load_ilp, load_moves
from dpart.partitioner.load_bounds import lower_bound
from dpart.partitioner.loads import LoadProblem, SharedPlan, contract


def exhaustive_scattered(problem: LoadProblem, together: Sequence[Sequence[int]]) -> float:
    """The least largest load over all ways to put layers on devices."""
    devices = [kind for kind in problem.classes for _ in range(kind.count)]
    best = np.inf
    for place in itertools.product(range(len(devices)), repeat=problem.num_layers):
        if all(len({place[layer] for layer in group}) == 1 for group in together):
            sets = [frozenset(layer for layer, d in enumerate(place) if d == device) for device in range(len(devices))]
            best = min(best, max(load(problem, layers, kind) for layers, kind in zip(sets, devices, strict=True)))
    return best


def small(problem: LoadProblem) -> bool:
    count = sum(kind.count for kind in problem.classes)
    return count > 0 and count**problem.num_layers <= 2000


def test_contiguous_programme_equals_exhaustive_search() -> None:
    for seed in range(100):
        problem, together = random_problem(seed)
        expected = exhaustive(problem, together)
        found = load_ilp.search(problem, together=together)
        check(problem, together, found.plan)
        if expected == np.inf:
            assert found.plan is None and found.lower_bound == np.inf, seed
        else:
            assert found.value == pytest.approx(expected, rel=1e-5), seed
            assert found.lower_bound <= expected * (1 + 1e-5), seed
            assert found.gap <= 1e-5, seed


def test_scattered_programme_equals_exhaustive_search() -> None:
    for seed in range(200, 300):
        problem, together = random_problem(seed)
        if small(problem):
            expected = exhaustive_scattered(problem, together)
            found = load_ilp.search(problem, together=together, contiguous=False)
            if expected == np.inf:
                assert found.plan is None and found.lower_bound == np.inf, seed
            else:
                assert found.value == pytest.approx(expected, rel=1e-5), seed
                assert found.lower_bound <= expected * (1 + 1e-5), seed


def test_a_plan_at_hand_is_kept_and_proved_where_it_is_the_best() -> None:
    for seed in range(300, 360):
        problem, together = random_problem(seed)
        start = branching.search(problem, together=together).plan
        if start is not None:
            found = load_ilp.search(problem, together=together, start=start)
            assert found.value == pytest.approx(start.value, rel=1e-5), seed
            assert found.gap <= 1e-5, seed


def test_out_of_time_the_plan_at_hand_is_the_answer() -> None:
    problem, together, start = next(
        (problem, together, plan)
        for problem, together in map(random_problem, range(100))
        if (plan := branching.search(problem, together=together).plan) is not None
        and plan.value > 1.01 * lower_bound(contract(problem, together).problem)
    )
    found = load_ilp.search(problem, together=together, start=start, time_limit_seconds=0.0)
    assert found.plan == start
    assert found.lower_bound <= start.value
    with pytest.raises(load_ilp.SolverError, match="time limit"):
        load_ilp.search(problem, together=together, time_limit_seconds=0.0)


def test_moves_reach_the_best_scattered_plan_of_small_graphs() -> None:
    reached = total = 0
    for seed in range(400, 460):
        problem, together = random_problem(seed)
        start = branching.search(problem, together=together).plan
        if start is None or not small(problem):
            continue
        found = load_moves.improve(problem, start, together=together, max_rounds=3)
        check_scattered(problem, together, load_moves.improve(problem, start, together=together, max_rounds=1))
        check_scattered(problem, together, found)
        expected = exhaustive_scattered(problem, together)
        assert expected * (1 - 1e-9) <= found.value <= start.value, seed
        total += 1
        reached += found.value <= expected * (1 + 1e-9)
    assert total >= 20
    assert reached == total


def check_scattered(problem: LoadProblem, together: Sequence[Sequence[int]], plan: SharedPlan) -> None:
    loose = LoadProblem(((),) * problem.num_layers, problem.memory_bytes, problem.classes, problem.transfers)
    check(loose, together, plan)
