"""The planner for graphs that branch, against exhaustive search over all contiguous splits."""

import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from dpart.partitioner import branching
from dpart.partitioner.ideals import IdealSearch, all_ideals
from dpart.partitioner.load_bounds import balance, lower_bound
from dpart.partitioner.loads import DeviceClass, LoadProblem, SharedPlan, Transfer, contract
from dpart.partitioner.orders import Chain, depth_first_orders
from dpart.partitioner.trials import Descent


def random_problem(seed: int) -> tuple[LoadProblem, list[tuple[int, ...]]]:
    """A small graph with transfers, perhaps memory limits, unlike devices and layers that must share a device."""
    rng = random.Random(seed)
    size = rng.randint(1, 7)
    density = rng.choice([0.15, 0.4, 0.8])
    predecessors = [tuple(p for p in range(layer) if rng.random() < density) for layer in range(size)]
    readers: list[set[int]] = [{layer} for layer in range(size)]
    for layer, before in enumerate(predecessors):
        for p in before:
            readers[p].add(layer)
    if rng.random() < 0.4:
        # A value that goes backwards: its maker is not the first of its layers.
        readers.append(set(rng.sample(range(size), min(size, 3))))
    transfers = tuple(Transfer(tuple(ends), rng.choice([0, 1, 3, 20])) for ends in readers)
    work = np.array([rng.choice([0, 0, 1, 2, 5, 9]) for _ in range(size)], np.float64)
    slow = work * rng.choice([1, 3, 10])
    if rng.random() < 0.3:
        slow = np.array([rng.choice([0, 1, 4, np.inf]) for _ in range(size)])
    if rng.random() < 0.2:
        work[rng.randrange(size)] = np.inf
    memory = np.array([rng.randint(0, 4) for _ in range(size)], np.float64)
    limit = rng.choice([np.inf, max(1.0, memory.sum() / 2), 4.0])
    classes = [DeviceClass("accelerator", rng.randint(0, 3), work, limit)]
    if rng.random() < 0.7:
        classes.append(DeviceClass("processor", rng.randint(0, 1), slow, transfer_scale=0.0))
    if rng.random() < 0.3:
        classes.append(DeviceClass("other", rng.randint(0, 2), slow + 1, 6.0, transfer_scale=0.5))
    together = [tuple(rng.sample(range(size), 2))] if size > 1 and rng.random() < 0.3 else []
    return LoadProblem(tuple(predecessors), memory, tuple(classes), transfers), together


def ideals(problem: LoadProblem) -> list[frozenset[int]]:
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(problem.num_layers), size) for size in range(problem.num_layers + 1)
    )
    return [
        frozenset(subset)
        for subset in subsets
        if all(set(problem.predecessors[layer]) <= set(subset) for layer in subset)
    ]


def load(problem: LoadProblem, layers: frozenset[int], kind: DeviceClass) -> float:
    """By definition, in another way than the searchers: transfer by transfer."""
    if sum(problem.memory_bytes[layer] for layer in layers) > kind.memory_bytes:
        return np.inf
    total = sum(float(kind.work[layer]) for layer in layers)
    for transfer in problem.transfers:
        inside = [layer in layers for layer in transfer.layers]
        total += kind.transfer_scale * transfer.cost * (any(inside) and not all(inside))
    return total


def exhaustive(problem: LoadProblem, together: Iterable[Sequence[int]]) -> float:
    """The least bottleneck over all rows of nested ideals that part no group, and all devices for its pieces."""
    whole = [i for i in ideals(problem) if all(len(i & set(group)) in (0, len(group)) for group in together)]
    counts = tuple(kind.count for kind in problem.classes)
    best = {(frozenset[int](), counts): 0.0}
    for ideal in whole:
        for (covered, left), value in list(best.items()):
            if covered < ideal:
                for number, kind in enumerate(problem.classes):
                    if left[number]:
                        after = (ideal, (*left[:number], left[number] - 1, *left[number + 1 :]))
                        worse = max(value, load(problem, ideal - covered, kind))
                        best[after] = min(best.get(after, np.inf), worse)
    everything = frozenset(range(problem.num_layers))
    return min((value for (covered, _), value in best.items() if covered == everything), default=np.inf)


def check(problem: LoadProblem, together: Sequence[Sequence[int]], plan: SharedPlan | None) -> None:
    """The plan covers every layer once, is contiguous, keeps groups and counts, and its loads are true."""
    if plan is None:
        return
    device_of = {layer: number for number, part in enumerate(plan.shares) for layer in part.layers}
    assert sorted(layer for part in plan.shares for layer in part.layers) == list(range(problem.num_layers))
    for layer, before in enumerate(problem.predecessors):
        assert all(device_of[p] <= device_of[layer] for p in before)
    for group in together:
        assert len({device_of[layer] for layer in group}) == 1
    for number, kind in enumerate(problem.classes):
        assert sum(part.device_class == number for part in plan.shares) <= kind.count
    for part in plan.shares:
        expected = load(problem, frozenset(part.layers), problem.classes[part.device_class])
        assert part.load == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("block", range(10))
def test_equals_exhaustive_search(block: int) -> None:
    for seed in range(40 * block, 40 * block + 40):
        problem, together = random_problem(seed)
        expected = exhaustive(problem, together)
        found = branching.search(problem, together=together)
        check(problem, together, found.plan)
        if expected == np.inf:
            assert found.plan is None, seed
            assert found.lower_bound == np.inf, seed
        else:
            assert found.value == pytest.approx(expected, rel=1e-9), seed
            assert found.lower_bound <= expected * (1 + 1e-12), seed
            assert found.gap <= 1.1e-9, seed


def test_the_search_of_ideals_alone_equals_exhaustive_search() -> None:
    """Pieces of orders are often the best plan already, and would hide a fault of what comes after them."""
    for seed in range(1000, 1200):
        problem, together = random_problem(seed)
        expected = exhaustive(problem, together)
        merged = contract(problem, together).problem
        masks = all_ideals(merged.predecessors, 1000)
        assert masks is not None
        descent = Descent(lower_bound(merged), tolerance=0.0, deadline=np.inf)
        descent.lower(IdealSearch(merged, balance(merged), masks).trial, max(merged.largest_load(), 1e-9), proves=True)
        assert (descent.best is None) == (expected == np.inf), seed
        if descent.best is not None:
            assert descent.best.value == pytest.approx(expected, rel=1e-9), seed
            assert descent.bound <= expected * (1 + 1e-12), seed


@pytest.mark.parametrize(("time_limit", "max_ideals"), [(0.0, 1000), (60.0, 0), (60.0, 5)])
def test_bounds_hold_when_stopped_early(time_limit: float, max_ideals: int) -> None:
    for seed in range(100):
        problem, together = random_problem(seed)
        expected = exhaustive(problem, together)
        reported: list[tuple[float, float]] = []
        found = branching.search(
            problem,
            together=together,
            time_limit_seconds=time_limit,
            max_ideals=max_ideals,
            progress=lambda value, bound, to=reported: to.append((value, bound)),  # type: ignore[misc]
        )
        check(problem, together, found.plan)
        assert found.lower_bound <= expected * (1 + 1e-12), seed
        assert found.value is None or found.value >= expected * (1 - 1e-12), seed
        for value, bound in reported:
            assert bound <= expected * (1 + 1e-12) and expected <= value * (1 + 1e-12), seed
        if np.isinf(problem.classes[0].memory_bytes) and np.isfinite(expected) and problem.classes[0].count:
            assert found.value is not None or np.isinf(problem.classes[0].work).any(), seed


def test_a_tolerance_stops_early_and_says_so() -> None:
    for seed in range(100):
        problem, together = random_problem(seed)
        expected = exhaustive(problem, together)
        found = branching.search(problem, together=together, tolerance=0.5)
        if found.value is not None:
            assert found.value <= 1.5 * expected * (1 + 1e-9), seed
            assert found.lower_bound <= expected * (1 + 1e-12) and found.value <= 1.5 * found.lower_bound + 1e-9, seed


def test_one_order_equals_exhaustive_search_over_its_pieces() -> None:
    for seed in range(60):
        problem, _ = random_problem(seed)
        order = next(depth_first_orders(problem, seed))
        chain = dataclasses.replace(
            problem,
            predecessors=tuple(
                (order[order.index(layer) - 1],) if layer != order[0] else () for layer in range(problem.num_layers)
            ),
        )
        expected = exhaustive(chain, ())
        found = Chain(problem, order).trial(expected * (1 + 1e-12)) if expected < np.inf else None
        assert (found is None) == (expected == np.inf), seed
        if found is not None:
            assert found.value == pytest.approx(expected, rel=1e-9), seed
        if 0 < expected < np.inf:
            assert Chain(problem, order).trial(expected * (1 - 1e-9)) is None, seed


def test_balance_is_the_linear_programme_of_two_classes() -> None:
    """By another route: the least T for which layers, taken by ratio, fit on both classes in pieces."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        size = int(rng.integers(1, 8))
        fast, slow = rng.uniform(0.1, 2, size), rng.uniform(0.1, 9, size)
        counts = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        classes = DeviceClass("fast", counts[0], fast), DeviceClass("slow", counts[1], slow)
        problem = LoadProblem(((),) * size, np.zeros(size), classes)
        low, high = 0.0, float(fast.sum())
        for _ in range(60):
            threshold, room, rest = (low + high) / 2, (low + high) / 2 * counts[0], 0.0
            for layer in np.argsort(fast / slow):
                part = min(1.0, room / fast[layer])
                room -= part * fast[layer]
                rest += (1 - part) * slow[layer]
            low, high = (low, threshold) if rest <= threshold * counts[1] else (threshold, high)
        assert balance(problem).bound == pytest.approx(high, rel=1e-9)


def plain(predecessors: Sequence[Sequence[int]], count: int, cost: float, seed: int = 0) -> LoadProblem:
    """Layers of random work; every layer sends its output to those behind it."""
    size = len(predecessors)
    work = np.random.default_rng(seed).uniform(0.1, 2, size)
    readers = [{layer} for layer in range(size)]
    for layer, before in enumerate(predecessors):
        for p in before:
            readers[p].add(layer)
    return LoadProblem(
        tuple(tuple(before) for before in predecessors),
        np.ones(size),
        (DeviceClass("accelerator", count, work),),
        tuple(Transfer(tuple(ends), cost) for ends in readers),
    )


def parallel_chains(number: int, length: int) -> list[list[int]]:
    return [[layer - 1] if layer % length else [] for layer in range(number * length)]


def test_many_parallel_chains_are_capped() -> None:
    """21 ** 10 ideals: a plan, a bound and a small gap all the same."""
    problem = plain(parallel_chains(10, 20), 6, 0.05)
    found = branching.search(problem, max_ideals=20_000)
    check(problem, (), found.plan)
    assert found.num_ideals is None
    assert 0 < found.gap < 0.05


def test_three_parallel_chains_are_exact() -> None:
    problem = plain(parallel_chains(3, 12), 4, 0.2)
    found = branching.search(problem)
    check(problem, (), found.plan)
    assert found.num_ideals == 13**3
    assert found.gap <= 1.1e-9


def test_a_chain_of_1500_layers_on_any_number_of_devices() -> None:
    chain = [[layer - 1] if layer else [] for layer in range(1500)]
    for count in (1, 7, 2048):
        problem = plain(chain, count, 0.05)
        found = branching.search(problem)
        check(problem, (), found.plan)
        assert found.gap <= 1.1e-9
        assert found.plan is not None and len(found.plan.shares) <= count


def test_layers_on_a_cycle_share_a_device() -> None:
    work = np.array([1.0, 2.0, 3.0, 4.0])
    problem = LoadProblem(((), (0, 2), (1,), (2,)), np.zeros(4), (DeviceClass("accelerator", 4, work),))
    found = branching.search(problem)
    assert found.value == 5.0
    assert contract(problem).members == ((0,), (1, 2), (3,))


def test_what_lies_between_layers_that_share_a_device_goes_with_them() -> None:
    chain = LoadProblem(((), (0,), (1,), (2,)), np.zeros(4), (DeviceClass("accelerator", 4, np.ones(4)),))
    assert contract(chain, [(0, 2)]).members == ((0, 1, 2), (3,))
    assert branching.search(chain, together=[(0, 2)]).value == 3.0


def test_a_problem_that_makes_no_sense_lists_all_faults() -> None:
    with pytest.raises(ValueError, match=r"none of the 1 layers.*costs less than nothing.*accelerator: work"):
        LoadProblem(((3,),), np.zeros(1), (DeviceClass("accelerator", 1, -np.ones(1)),), (Transfer((0,), -1.0),))
