"""The searchers against an exhaustive search that shares nothing with them but the cost of a single stage."""

import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import numpy as np
import pulp
import pytest

from dpart.partitioner import ilp, ilp_solver, pipedream
from dpart.partitioner.search import Found, Matrix
from dpart.partitioner.states import States, list_states

NUM_GRAPHS = 300
TOPOLOGIES = ((1,), (2,), (3,), (4,), (4,), (2, 1), (1, 2), (2, 2), (2, 2), (3, 1), (1, 3), (1, 4))

Layers = frozenset[int]


@dataclass(frozen=True)
class Synthetic:
    """A `Problem` on random figures, one layer at a time, with its costs as plain functions of sets of layers."""

    predecessors: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    parameters: tuple[float, ...]
    outputs: tuple[float, ...]
    memory: float
    machines: tuple[int, ...]
    use_fewer: bool

    @cached_property
    def states(self) -> States:
        return list_states(self.predecessors)

    @cached_property
    def sets(self) -> list[Layers]:
        return [frozenset(int(layer) for layer in np.flatnonzero(row)) for row in self.states.member]

    @property
    def nested(self) -> np.ndarray:
        return self.states.nested

    def value(self, level: int, before: Layers, upto: Layers, r: int, after: int, inner: float, first: bool) -> float:
        """Of the stage upto - before; slower links outside, and a stash for each microbatch in flight."""
        stage, link = upto - before, 0.5 + 1.5 * level
        in_flight = math.ceil((after + r) / r)
        static = sum(self.parameters[layer] for layer in stage)
        stash = sum(self.outputs[layer] for layer in stage)
        if level == 0 and 2 * static + in_flight * stash > self.memory:
            return math.inf
        if level and in_flight * stash > 2 * self.memory:
            return math.inf
        value = (inner + link * 2 * (r - 1) / r * static) / r
        if first:
            return value
        read = {p for layer in stage for p in self.predecessors[layer]} & before
        return value + link * sum(self.outputs[layer] for layer in read) / r

    def compute_seconds(self) -> Matrix:
        return self._matrix(lambda i, j: sum(self.seconds[layer] for layer in self.sets[j] - self.sets[i]))

    def unsplit_seconds(self, level: int, num_machines: int, after: int, inner: Matrix) -> Matrix:
        return self._costs(level, num_machines, after, inner, first=True)

    def stage_seconds(self, level: int, num_machines: int, after: int, inner: Matrix) -> Matrix:
        return self._costs(level, num_machines, after, inner, first=False)

    def _costs(self, level: int, r: int, after: int, inner: Matrix, first: bool) -> Matrix:
        return self._matrix(
            lambda i, j: self.value(level, self.sets[i], self.sets[j], r, after, float(inner[i, j]), first)
        )

    def _matrix(self, entry) -> Matrix:
        matrix = np.full(self.nested.shape, np.inf)
        for i, j in np.argwhere(self.nested):
            matrix[i, j] = entry(i, j)
        return matrix


def random_problem(seed: int) -> Synthetic:
    """Up to 7 layers with branches, up to 4 devices, and memory from ample to too little."""
    rng = random.Random(seed)
    n = rng.randint(1, 7)
    reach, density = rng.choice([1, 2, 2, 3]), rng.choice([0.5, 0.7, 0.9])
    before = []
    for layer in range(n):
        near = range(max(0, layer - reach), layer)
        chosen = [p for p in near if rng.random() < density]
        # Sources past the second would make nearly every set of layers a state.
        before.append(tuple(chosen or ([layer - 1] if layer > 1 else [])))
    slow, heavy = rng.choice([(2, 1), (2, 3), (2, 10), (20, 30)])
    outputs = tuple(rng.choice([0.0, rng.uniform(0, slow)]) for _ in range(n))
    parameters = tuple(rng.choice([0.0, rng.uniform(0, heavy)]) for _ in range(n))
    total = 2 * sum(parameters) + sum(outputs)
    return Synthetic(
        predecessors=tuple(before),
        seconds=tuple(rng.uniform(0.1, 5) for _ in range(n)),
        parameters=parameters,
        outputs=outputs,
        memory=rng.choice([math.inf, rng.uniform(0.2, 1.5) * total, rng.uniform(0.3, 0.9) * total]),
        machines=rng.choice(TOPOLOGIES),
        use_fewer=rng.random() < 0.5,
    )


def exhaustive(problem: Synthetic, count: int) -> float:
    """The best bottleneck on exactly `count` machines of the outermost level, by trying every plan."""
    everything = frozenset(range(len(problem.predecessors)))
    values: dict[tuple[int, Layers, Layers], float] = {}

    def one_machine(level: int, before: Layers, upto: Layers) -> float:
        key = (level, before, upto)
        if key not in values:
            if level == 0:
                values[key] = sum(problem.seconds[layer] for layer in upto - before)
            else:
                values[key] = pipeline(level - 1, before, upto, problem.machines[level - 1], True)
        return values[key]

    def pipeline(level: int, before: Layers, upto: Layers, machines: int, first: bool) -> float:
        inner = one_machine(level, before, upto)
        best = problem.value(level, before, upto, machines, 0, inner, first)
        for cut in closed_between(problem, before, upto):
            for r in range(1, machines):
                inner = one_machine(level, before, cut)
                value = problem.value(level, before, cut, r, machines - r, inner, first)
                best = min(best, max(value, pipeline(level, cut, upto, machines - r, False)))
        return best

    return pipeline(len(problem.machines) - 1, frozenset(), everything, count, True)


def closed_between(problem: Synthetic, low: Layers, high: Layers) -> Iterator[Layers]:
    """The sets strictly between that hold the predecessors of all their layers."""
    more = sorted(high - low)
    for added in chain.from_iterable(combinations(more, size) for size in range(1, len(more))):
        closed = low | set(added)
        if all(p in closed for layer in added for p in problem.predecessors[layer]):
            yield closed


def value_of(problem: Synthetic, found: Found) -> float:
    """The bottleneck of a plan, from the cost of its stages alone; checks that it is a plan."""

    def walk(depth: int, start: int, stop: int) -> float:
        level = len(problem.machines) - 1 - depth
        if level < 0:
            return sum(problem.seconds[layer] for layer in problem.sets[stop] - problem.sets[start])
        row = [s for s in found.levels[depth] if start <= s.start and s.stop <= stop]
        assert [start, *(s.stop for s in row)] == [*(s.start for s in row), stop]
        behind, worst = 0, 0.0
        for s in reversed(row):
            assert s.after == behind
            behind += s.num_machines
            inner = walk(depth + 1, s.start, s.stop)
            sets = problem.sets[s.start], problem.sets[s.stop]
            worst = max(worst, problem.value(level, *sets, s.num_machines, s.after, inner, s is row[0]))
        exact = depth > 0 or not problem.use_fewer
        assert behind == problem.machines[level] if exact else behind <= problem.machines[level]
        return worst

    return walk(0, 0, len(problem.sets) - 1)


@pytest.mark.parametrize("seed", range(NUM_GRAPHS))
def test_dp_ilp_and_exhaustive_search_agree(seed: int) -> None:
    problem = random_problem(seed)
    last = problem.machines[-1]
    by_count = {count: exhaustive(problem, count) for count in range(1, last + 1)}
    expected = min(by_count.values()) if problem.use_fewer else by_count[last]
    dp, integer = pipedream.search(problem), ilp.search(problem)
    each = pipedream.search_each(problem)
    assert {count for count, value in by_count.items() if value < math.inf} == set(each)
    for count, found in each.items():
        assert found.bottleneck_seconds == pytest.approx(by_count[count], rel=1e-9)
    if expected == math.inf:
        assert dp is None
        assert integer is None
        return
    for found in (dp, integer):
        assert found is not None
        assert found.optimal
        assert found.bottleneck_seconds == pytest.approx(expected, rel=1e-7)
        assert value_of(problem, found) == pytest.approx(found.bottleneck_seconds, rel=1e-9)
        assert found.stages[0].start == 0
        assert found.stages[-1].stop == len(problem.sets) - 1
        devices = sum(stage.num_replicas for stage in found.stages)
        assert devices <= math.prod(problem.machines)
        assert problem.use_fewer or devices == math.prod(problem.machines)


def test_the_random_graphs_cover_what_they_are_for() -> None:
    seen = dict.fromkeys(("infeasible", "memory binds", "replicas", "branches", "two levels", "fewer"), 0)
    for seed in range(NUM_GRAPHS):
        problem = random_problem(seed)
        found, free = pipedream.search(problem), pipedream.search(replace(problem, memory=math.inf))
        assert free is not None
        seen["infeasible"] += found is None
        seen["memory binds"] += found is not None and found.bottleneck_seconds > free.bottleneck_seconds
        seen["replicas"] += found is not None and len(found.stages) > 1 and found.stages[0].num_replicas > 1
        seen["branches"] += len(problem.sets) > len(problem.predecessors) + 1
        seen["two levels"] += min(len(problem.machines), *problem.machines) > 1
        seen["fewer"] += found is not None and sum(s.num_replicas for s in found.stages) < math.prod(problem.machines)
    assert min(seen.values()) >= 5, seen


def chain_problem(n: int, machines: tuple[int, ...], seed: int = 0) -> Synthetic:
    rng = random.Random(seed)
    return Synthetic(
        predecessors=tuple((layer - 1,) if layer else () for layer in range(n)),
        seconds=tuple(rng.uniform(0.5, 2) for _ in range(n)),
        parameters=tuple(rng.uniform(1, 3) for _ in range(n)),
        outputs=tuple(rng.uniform(0, 0.3) for _ in range(n)),
        memory=math.inf,
        machines=machines,
        use_fewer=False,
    )


def test_the_ilp_with_an_upper_bound_keeps_the_optimum_and_refuses_less() -> None:
    problem = chain_problem(16, (4,))
    best = pipedream.search(problem)
    assert best is not None
    found = ilp.search(problem, upper_bound_seconds=best.bottleneck_seconds)
    assert found is not None
    assert found.bottleneck_seconds == pytest.approx(best.bottleneck_seconds, rel=1e-9)
    assert ilp.search(problem, upper_bound_seconds=0.999 * best.bottleneck_seconds) is None


@pytest.mark.parametrize("name", ["cbc", "highs"])
def test_the_bound_of_a_solver_stopped_at_its_gap_is_below_its_value(name: ilp_solver.SolverName) -> None:
    """pulp's status is Optimal all the same."""
    if name == "highs" and not pulp.HiGHS().available():
        pytest.skip("HiGHS is not installed")
    rng = random.Random(1)
    items, bins = range(30), range(5)
    programme = pulp.LpProblem("spread", pulp.LpMinimize)
    top = pulp.LpVariable("top", 0)
    programme += top
    placed = {(i, b): pulp.LpVariable(f"x{i}_{b}", cat="Binary") for i in items for b in bins}
    sizes = [rng.uniform(1, 10) for _ in items]
    for b in bins:
        programme += pulp.lpSum(sizes[i] * placed[i, b] for i in items) <= top
    for i in items:
        programme += pulp.lpSum(placed[i, b] for b in bins) == 1
    bound = ilp_solver.solve(programme, time_limit_seconds=20, gap=0.05, solver=name)
    assert programme.status == pulp.LpStatusOptimal
    assert bound < top.varValue - 1e-4
    assert bound == pytest.approx(sum(sizes) / len(bins), rel=0.02)


def test_a_found_plan_above_its_lower_bound_is_not_called_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(programme: pulp.LpProblem, **options: Any) -> float:
        return 0.99 * ilp_solver.solve(programme, **options)

    problem = chain_problem(24, (4,), seed=3)
    best = pipedream.search(problem)
    monkeypatch.setattr(ilp, "solve", lazy)
    found = ilp.search(problem)
    assert best is not None
    assert found is not None
    assert not found.optimal
    assert 0.95 * best.bottleneck_seconds < found.lower_bound_seconds < best.bottleneck_seconds


def test_an_inner_level_too_large_for_the_ilp_is_left_to_the_dynamic_programme() -> None:
    problem = chain_problem(9, (3, 2), seed=1)
    whole, mixed = ilp.search(problem), ilp.search(problem, max_variables=120)
    assert whole is not None
    assert mixed is not None
    assert mixed.bottleneck_seconds == pytest.approx(whole.bottleneck_seconds, rel=1e-7)
    assert value_of(problem, mixed) == pytest.approx(mixed.bottleneck_seconds, rel=1e-9)


def test_solver_failures_are_one_kind_of_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain_problem(12, (3,))
    with pytest.raises(ilp.SolverError, match="more than 0 variables"):
        ilp.search(problem, max_variables=0)
    with pytest.raises(ilp.SolverError, match="time limit"):
        ilp.search(problem, time_limit_seconds=0.0)
    monkeypatch.setattr("pulp.PULP_CBC_CMD.available", lambda self: False)
    with pytest.raises(ilp.SolverError, match="cbc is not installed"):
        ilp.search(problem, solver="cbc")


@pytest.mark.skipif(os.name != "posix", reason="kills the solver with a shell script in its place")
def test_a_solver_that_dies_raises(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    fake = tmp_path / "cbc"
    fake.write_text("#!/bin/sh\nkill -9 $$\n")
    fake.chmod(0o755)
    monkeypatch.setattr("pulp.PULP_CBC_CMD.pulp_cbc_path", str(fake))
    with pytest.raises(ilp.SolverError, match="died"):
        ilp.search(chain_problem(12, (3,)), solver="cbc")
