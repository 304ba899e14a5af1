"""Splits of the layers of a stage, by trees and by programmes, against trying everything."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from dpart.partitioner import split_trees
from dpart.partitioner.ilp_engine import Engine
from dpart.partitioner.ilp_splits import (
    Edge,
    SolverError,
    SplitChoice,
    SplitProblem,
    Splits,
    inside_stage,
    search,
)
from dpart.profiler.profile import Profile

LAYOUTS = ("whole", "rows", "columns")
REL = 3e-6


def random_problem(seed: int, *, tree: bool) -> SplitProblem:
    """Up to six layers of up to four ways; some layouts cannot become others, and memory binds in most."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    layers = tuple(
        tuple(
            SplitChoice(f"way {n}", rng.uniform(0, 3), rng.randint(0, 6), rng.choice(LAYOUTS), rng.choice(LAYOUTS))
            for n in range(rng.randint(1, 4))
        )
        for _ in range(count)
    )
    # Of a tree every layer has one earlier neighbour, or none; numbered in any order, and read either way.
    pairs = [(rng.randrange(v), v) for v in range(1, count) if rng.random() < 0.9]
    if not tree:
        pairs = [(u, v) for v in range(count) for u in range(v) if rng.random() < 0.6]
        pairs += [pair for pair in pairs if rng.random() < 0.2]
    name = rng.sample(range(count), count)
    edges = []
    for u, v in pairs:
        seconds = {(a, b): rng.uniform(0, 2) for a in LAYOUTS for b in LAYOUTS if a != b and rng.random() < 0.9} | (
            {("rows", "rows"): 0.1} if rng.random() < 0.2 else {}
        )
        ends = (name[u], name[v]) if rng.random() < 0.5 else (name[v], name[u])
        edges.append(Edge(*ends, seconds))
    least, most = (sum(f(c.memory_bytes for c in choices) for choices in layers) for f in (min, max))
    limit = None if rng.random() < 0.2 else rng.randint(least - 1, max(least, most - 1))
    return SplitProblem(layers, tuple(edges), limit)


def exhaustive(problem: SplitProblem) -> float:
    best = math.inf
    for chosen in itertools.product(*(range(len(choices)) for choices in problem.layers)):
        seconds, memory = problem.value(chosen)
        if problem.memory_limit_bytes is None or memory <= problem.memory_limit_bytes:
            best = min(best, seconds)
    return best


def check(problem: SplitProblem, found: Splits | None, best: float) -> None:
    assert (found is None) == (best == math.inf)
    if found is not None:
        assert (found.seconds, found.memory_bytes) == problem.value(found.chosen)
        assert problem.memory_limit_bytes is None or found.memory_bytes <= problem.memory_limit_bytes
        assert found.lower_bound_seconds <= best + 1e-12
        assert best - 1e-12 <= found.seconds <= best * (1 + REL) + 1e-6


def test_trees_and_programmes_find_what_trying_everything_finds() -> None:
    solved = bound = 0
    for seed in range(300):
        problem = random_problem(seed, tree=True)
        best = exhaustive(problem)
        found = search(problem, method="tree")
        check(problem, found, best)
        assert found is None or (found.method == "tree" and found.seconds == pytest.approx(best))
        if seed % 2:
            by_programme = search(problem, method="ilp")
            check(problem, by_programme, best)
            assert by_programme is None or by_programme.method == "ilp"
        solved += found is not None
        bound += found is not None and best > exhaustive(replace(problem, memory_limit_bytes=None)) + 1e-9
    assert solved > 150 and bound > 40


def test_graphs_with_cycles_go_to_the_solver() -> None:
    solved = cyclic = 0
    for seed in range(200):
        problem = random_problem(1000 + seed, tree=False)
        found = search(problem)
        check(problem, found, exhaustive(problem))
        solved += found is not None
        cyclic += found is not None and found.method == "ilp"
    assert solved > 100 and cyclic > 50


def test_a_limit_that_is_a_byte_too_low_holds() -> None:
    """Solvers take a millionth for nothing; of 16 GiB that is many bytes."""
    solved = 0
    for seed in range(60):
        problem = random_problem(2000 + seed, tree=False)
        rng = random.Random(seed)
        large = tuple(
            tuple(replace(way, memory_bytes=way.memory_bytes * 2**32 + rng.randrange(9)) for way in choices)
            for choices in problem.layers
        )
        free = SplitProblem(large, problem.edges)
        best = search(free)
        if best is None:
            continue
        tight = replace(free, memory_limit_bytes=best.memory_bytes - 1)
        found = search(tight, method="ilp")
        expected = exhaustive(tight)
        if found is not None:
            solved += 1
            assert found.memory_bytes < best.memory_bytes
            assert found.lower_bound_seconds <= expected <= found.seconds + 1e-12
        else:
            assert expected == math.inf
    assert solved > 20


def test_a_long_chain_alternates_as_column_and_row_parallel_layers_do() -> None:
    """Each way alone would reshard at every layer; two by two they need it only at the ends."""
    ways = (
        SplitChoice("column", 1.0, 1, "whole", "parts"),
        SplitChoice("row", 1.0, 1, "parts", "whole"),
        SplitChoice("replicated", 1.9, 2),
    )
    seconds = {("whole", "parts"): 0.5, ("parts", "whole"): 0.5}
    count = 1500
    chain = SplitProblem((ways,) * count, tuple(Edge(n, n + 1, seconds) for n in range(count - 1)))
    found = search(chain)
    assert found is not None and found.method == "tree"
    assert found.seconds == pytest.approx(count)
    kinds = [ways[number].split for number in found.chosen]
    assert {tuple(kinds[n : n + 2]) for n in range(count - 1)} <= {("column", "row"), ("row", "column")}
    short = replace(chain, memory_limit_bytes=count - 1)
    assert search(short) is None


def test_where_sums_are_too_many_the_solver_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(
        p
        for p in (random_problem(seed, tree=True) for seed in range(100))
        if len(p.layers) == 6 and exhaustive(replace(p, memory_limit_bytes=None)) < exhaustive(p) < math.inf
    )
    monkeypatch.setattr(split_trees, "_MAX_SUMS", 1)
    found = search(problem)
    assert found is not None and found.method == "ilp"
    check(problem, found, exhaustive(problem))


def test_what_enters_and_leaves_a_stage_is_whole(split_profile: Callable[..., Profile]) -> None:
    """A stage's values from and to other stages are resharded at its ends, once for each reader."""
    ways = (
        SplitChoice("column", 1.0, 1, "whole", "parts"),
        SplitChoice("row", 1.1, 1, "parts", "whole"),
        SplitChoice("replicated", 1.4, 2),
    )
    for seed in range(40):
        graph = split_profile(seed, 6).graph
        names = [layer.name for layer in graph.layers]
        rng = random.Random(seed)
        begin = rng.randrange(len(names))
        inside = names[begin : begin + rng.randint(1, 4)]
        table = {("whole", "parts"): 0.3, ("parts", "whole"): 0.2}
        problem = inside_stage(graph, inside, [ways] * len(inside), lambda value, table=table: table)
        best = math.inf
        for kinds in itertools.product(ways, repeat=len(inside)):
            taken = dict(zip(inside, kinds, strict=True))
            seconds = sum(way.seconds for way in kinds)
            for value in graph.values:
                made = taken[value.producer].output_layout if value.producer in taken else "whole"
                for name in value.consumers:
                    if name in taken:
                        seconds += table.get((made, taken[name].input_layout), 0.0)
                leaves = value.name == graph.loss or any(name not in taken for name in value.consumers)
                if value.producer in taken and leaves:
                    seconds += table.get((made, "whole"), 0.0)
            best = min(best, seconds)
        found = search(problem)
        assert found is not None
        assert found.seconds == pytest.approx(best, rel=REL)


def test_a_layer_that_cannot_take_what_enters_has_no_splits(chain_profile: Callable[..., Profile]) -> None:
    graph = chain_profile([1.0, 1.0]).graph
    row = SplitChoice("row", 1.0, 1, "parts", "whole")
    assert search(inside_stage(graph, ["l0"], [(row,)], lambda value: {})) is None


def test_a_broken_solver_is_an_error() -> None:
    problem = next(p for p in (random_problem(s, tree=False) for s in range(99)) if len(p.edges) > len(p.layers))
    with pytest.raises(SolverError, match="does not run"):
        search(problem, solver=Engine("cbc", "/nowhere/cbc"))
    with pytest.raises(SolverError, match="no splits in 0 s"):
        search(problem, time_limit_seconds=0.0)
