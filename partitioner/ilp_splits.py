"""How to split every layer of a stage over its tensor-parallel group, where layers have several ways.

A way takes its layer's input in one layout and leaves its output in another; where a value is made in another layout
than it is read in, it has to be resharded, which takes seconds of its own::

    layer u       whole -> parts       parts -> parts        minimise  sum of seconds(choice of v)
                       \\                /                             + sum of reshard(choice of u, choice of v)
    reshard         0   \\   all-gather /   0                 within   sum of bytes(choice of v) <= limit
                         v            v
    layer v       parts -> whole       whole -> whole

On chains and trees of layers that is a dynamic programme (``split_trees.py``). The rest is an integer programme:
s(v, i) is 1 where layer v is split in way i, and e(u, i, v, j) stands for pairs, its sums over i and j bound to s. Both
are exact.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pulp

from dpart.compiler.graph import ModelGraph, Value
from dpart.partitioner.ilp_engine import TOLERANCE, Engine, SolverError, minimise
from dpart.partitioner.split_trees import Pairs, TooManyError, best_of_trees, is_forest

__all__ = ["Edge", "SolverError", "SplitChoice", "SplitProblem", "Splits", "inside_stage", "search"]

WHOLE = "whole"
"""The layout in which every rank has all of a value: so it enters a stage, and so it leaves."""

_UNITS = 1000.0
_MAX_VARIABLES = 200_000

_MAX_ROUNDS = 30
"""Answers that are refused because they exceed the limit by a few bytes."""


@dataclass(frozen=True)
class SplitChoice:
    """One way to split one layer.

    Attributes:
        split: Its name: ``column``, ``row``, ``heads``, ...
        seconds: Of one microbatch on one rank, forward and backward, collectives inside the layer included.
        memory_bytes: On one rank.
        input_layout: In which it reads values.
        output_layout: In which it leaves what it makes.
    """

    split: str
    seconds: float
    memory_bytes: int
    input_layout: str = WHOLE
    output_layout: str = WHOLE


@dataclass(frozen=True)
class Edge:
    """A value that one layer makes and another one reads.

    Attributes:
        producer: Index of the layer that makes it.
        consumer: Index of the layer that reads it.
        reshard_seconds: From one layout to another, forward and backward. It takes none where the two are equal and
            not listed; others that are not listed cannot be.
    """

    producer: int
    consumer: int
    reshard_seconds: Mapping[tuple[str, str], float]

    def seconds(self, source: str, target: str) -> float:
        """Infinite where it cannot be."""
        return self.reshard_seconds.get((source, target), 0.0 if source == target else np.inf)


@dataclass(frozen=True)
class SplitProblem:
    """What has to be decided.

    Attributes:
        layers: Ways to split each layer, one or more.
        edges: Between different layers, in any order.
        memory_limit_bytes: Of all layers together, on each rank; None for no limit.
    """

    layers: tuple[tuple[SplitChoice, ...], ...]
    edges: tuple[Edge, ...]
    memory_limit_bytes: int | None = None

    def value(self, chosen: Sequence[int]) -> tuple[float, int]:
        """Seconds and bytes, by the number of each layer's choice."""
        taken = [choices[number] for choices, number in zip(self.layers, chosen, strict=True)]
        seconds = sum(choice.seconds for choice in taken)
        seconds += sum(e.seconds(taken[e.producer].output_layout, taken[e.consumer].input_layout) for e in self.edges)
        return seconds, sum(choice.memory_bytes for choice in taken)


@dataclass(frozen=True)
class Splits:
    """What is best.

    Attributes:
        chosen: Of each layer the number of its choice.
        lower_bound_seconds: No choice within the limit takes less.
        method: ``tree``: exact. ``ilp``: to the tolerance of solvers, 1e-6, unless it was stopped by the time limit.
    """

    chosen: tuple[int, ...]
    seconds: float
    memory_bytes: int
    lower_bound_seconds: float
    method: Literal["tree", "ilp"]


def search(
    problem: SplitProblem,
    *,
    time_limit_seconds: float = 60.0,
    solver: Engine | None = None,
    method: Literal["tree", "ilp"] | None = None,
) -> Splits | None:
    """The choices that take the least time within the limit; None if there are none.

    Args:
        time_limit_seconds: For the integer programme.
        solver: None for the first one installed.
        method: None for trees where the edges are one, and trees with a memory limit stay small.

    Raises:
        SolverError: An integer programme was needed, and no solver is installed, or it died, or found nothing in time.
    """
    if not all(problem.layers):
        return None
    pairs = _pairs(problem)
    tree = is_forest(len(problem.layers), pairs)
    assert method != "tree" or tree, "these edges are no tree"
    if tree and method != "ilp":
        try:
            chosen = best_of_trees(
                [np.array([choice.seconds for choice in choices]) for choices in problem.layers],
                [np.array([choice.memory_bytes for choice in choices]) for choices in problem.layers],
                pairs,
                problem.memory_limit_bytes,
            )
        except TooManyError:
            assert method is None, "too many choices for a tree"
        else:
            return None if chosen is None else Splits(chosen, *problem.value(chosen), problem.value(chosen)[0], "tree")
    return _by_programme(problem, pairs, time_limit_seconds, solver)


def _pairs(problem: SplitProblem) -> Pairs:
    """Resharding seconds by the choices of two layers, all values between them together; the lower number first."""
    found: Pairs = {}
    for edge in problem.edges:
        u, v = edge.producer, edge.consumer
        assert u != v, f"layer {u} reads what it makes"
        seconds = np.array(
            [[edge.seconds(a.output_layout, b.input_layout) for b in problem.layers[v]] for a in problem.layers[u]]
        )
        key = (min(u, v), max(u, v))
        oriented = seconds if u < v else seconds.T
        found[key] = found[key] + oriented if key in found else oriented
    return found


def _by_programme(
    problem: SplitProblem, pairs: Pairs, time_limit_seconds: float, solver: Engine | None
) -> Splits | None:
    began = time.perf_counter()
    size = sum(map(len, problem.layers)) + sum(matrix.size for matrix in pairs.values())
    if size > _MAX_VARIABLES:
        raise SolverError(f"the programme would have {size} variables, more than {_MAX_VARIABLES}")
    largest = sum(max(choice.seconds for choice in choices) for choices in problem.layers)
    largest += sum(float(matrix[np.isfinite(matrix)].max(initial=0.0)) for matrix in pairs.values())
    unit = largest / _UNITS or 1.0
    model, variables = _programme(problem, pairs, unit)
    for _ in range(_MAX_ROUNDS):
        left = time_limit_seconds - (time.perf_counter() - began)
        answer = minimise(model, time_limit_seconds=left, engine=solver)
        if answer.status == "infeasible":
            return None
        if answer.values is None:
            raise SolverError(f"the solver found no splits in {time_limit_seconds:.0f} s")
        values = answer.values
        chosen = tuple(int(np.argmax([values.get(v.name, 0.0) for v in ways])) for ways in variables)
        seconds, memory_bytes = problem.value(chosen)
        if problem.memory_limit_bytes is None or memory_bytes <= problem.memory_limit_bytes:
            bound = min(answer.bound * unit, seconds) * (1 - TOLERANCE)
            return Splits(chosen, seconds, memory_bytes, max(bound, 0.0), "ilp")
        # Solvers may exceed a limit by a millionth: these choices are left out, and no others.
        taken = [(ways[number], 1) for ways, number in zip(variables, chosen, strict=True)]
        model += pulp.LpAffineExpression(taken) <= len(taken) - 1
    raise SolverError("the solver's answers do not fit in memory")


def _programme(problem: SplitProblem, pairs: Pairs, unit: float) -> tuple[pulp.LpProblem, list[list[pulp.LpVariable]]]:
    """The rows, and a variable for every choice of every layer."""
    model = pulp.LpProblem("splits", pulp.LpMinimize)
    s = [
        [pulp.LpVariable(f"s_{v}_{i}", cat=pulp.LpBinary) for i in range(len(choices))]
        for v, choices in enumerate(problem.layers)
    ]
    cost: list[tuple[pulp.LpVariable, float]] = []
    used: list[tuple[pulp.LpVariable, float]] = []
    limit = problem.memory_limit_bytes
    scale = max(abs(limit or 0), 1)
    for choices, variables in zip(problem.layers, s, strict=True):
        model += pulp.LpAffineExpression([(variable, 1) for variable in variables]) == 1
        cost += [(variable, choice.seconds / unit) for choice, variable in zip(choices, variables, strict=True)]
        used += [(v, c.memory_bytes / scale) for c, v in zip(choices, variables, strict=True)]
    for (u, v), matrix in pairs.items():
        e = {
            (i, j): pulp.LpVariable(f"e_{u}_{i}_{v}_{j}", lowBound=0)
            for i, j in np.argwhere(np.isfinite(matrix)).tolist()
        }
        cost += [(variable, float(matrix[pair]) / unit) for pair, variable in e.items()]
        for side, layer in enumerate((u, v)):
            sums: dict[int, list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
            for pair, variable in e.items():
                sums[pair[side]].append((variable, 1))
            for i, variable in enumerate(s[layer]):
                model += pulp.LpAffineExpression([*sums[i], (variable, -1)]) == 0
    model += pulp.LpAffineExpression(cost)
    if limit is not None:
        model += pulp.LpAffineExpression(used) <= limit / scale
    return model, s


def inside_stage(
    graph: ModelGraph,
    layers: Sequence[str],
    choices: Iterable[Sequence[SplitChoice]],
    reshard_seconds: Callable[[Value], Mapping[tuple[str, str], float]],
    *,
    memory_limit_bytes: int | None = None,
) -> SplitProblem:
    """The problem of one stage: what its layers hand each other, and what enters and leaves it whole.

    Args:
        layers: Of the stage.
        choices: Of each of them.
        reshard_seconds: Of a value, from one layout to another.
    """
    place = {name: n for n, name in enumerate(layers)}
    own = [list(ways) for ways in choices]
    edges = []
    for value in graph.values:
        seconds = reshard_seconds(value)
        inside = [place[name] for name in value.consumers if name in place]
        if value.producer in place:
            producer = place[value.producer]
            edges += [Edge(producer, consumer, seconds) for consumer in inside]
            if len(inside) < len(value.consumers) or value.name == graph.loss:
                outside = Edge(0, 0, seconds)
                own[producer] = [
                    replace(way, seconds=way.seconds + outside.seconds(way.output_layout, WHOLE))
                    for way in own[producer]
                ]
        else:
            entering = Edge(0, 0, seconds)
            for consumer in inside:
                own[consumer] = [
                    replace(way, seconds=way.seconds + entering.seconds(WHOLE, way.input_layout))
                    for way in own[consumer]
                ]
    # A way that cannot take what enters, or give what leaves, is none.
    possible = tuple(tuple(way for way in ways if np.isfinite(way.seconds)) for ways in own)
    return SplitProblem(possible, tuple(edges), memory_limit_bytes)
