"""`method="ilp"`: the same bottleneck as an integer programme, through pulp (HiGHS if installed, else CBC).

A plan is a path, and x(edge) is 1 where the plan has that stage; what enters a node leaves it. Machines are
slots, counted from the end, and exactly one edge of the path covers each slot in use, so a row per slot may
bound T by a whole sum::

    minimise T                                      slot   4    3    2    1        a stage on 2 machines,
    T >= sum of cost(e) x(e) over the edges e       path   o---------o----o----o   then two on 1 each
         that cover slot q, for every slot q        node (0,4)     (i,2)(j,1)(all,0)

Those few rows bound far better than T >= cost(e) x(e) per edge. The bottleneck is bounded to a few percent
beforehand, by asking which limits still leave a path, so that most edges never become variables.

Levels of the topology are solved inside out. What a stage costs at a level never falls when its inner
pipeline gets slower, so inner pipelines may be minimised apart: one path for each (i, j), all in one
programme. Where that is too large, the dynamic programme, which is exact as well, solves the inner level
instead.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pulp

from dpart.partitioner import pipedream
from dpart.partitioner.ilp_paths import LevelCosts, Paths, find_paths, level_costs, narrow
from dpart.partitioner.ilp_solver import SolverError, SolverName, solve
from dpart.partitioner.search import Found, LevelStage, Matrix, Problem, flatten

__all__ = ["SolverError", "search"]

_SCALE = 1000.0
"""Solvers have absolute tolerances, about 1e-6: costs are scaled so that the largest edge of a path has this."""

_SLACK = 1 + 1e-9
"""An upper bound computed in another order may differ in its last digits."""

_TOLERANCES = (0.05, 0.005, 0.0005)
"""How closely the bottleneck is bounded beforehand, the next where the last leaves too many variables."""

_MAX_BYTES = 2**30

_PROVED = 1e-6
"""A plan this close to the lower bound, relative to itself, counts as optimal: solvers prove no closer."""

_Stages = tuple[LevelStage, ...]
_Term = tuple[pulp.LpVariable, float]


def search(
    problem: Problem,
    *,
    upper_bound_seconds: float = np.inf,
    time_limit_seconds: float = 60.0,
    gap: float = 0.0,
    max_variables: int = 100_000,
    solver: SolverName | None = None,
) -> Found | None:
    """The plan with the smallest bottleneck; None if no plan fits, or none up to the upper bound.

    Args:
        upper_bound_seconds: A bottleneck some plan is known to reach; only plans up to it are looked for.
        time_limit_seconds: When it has passed, the best plan so far is returned with its lower bound.
        gap: Distance from the lower bound, relative to it, at which the solver may stop.
        max_variables: Larger programmes are refused, or at inner levels left to the dynamic programme.
        solver: None for the first one installed.

    Raises:
        SolverError: No solver is installed, or it died, found no plan in time, or the programme is too large.
    """
    began = time.perf_counter()
    options = _Options(began + time_limit_seconds, max_variables, solver)
    solved: list[_InnerLevel] = []
    inner = problem.compute_seconds()
    for level in range(len(problem.machines) - 1):
        solved.append(_solve_inner(problem, level, inner, options))
        inner = solved[-1].best
    machines, last = problem.machines[-1], len(inner) - 1
    counts = range(1, machines + 1) if problem.use_fewer else range(machines, machines + 1)
    _check_size(len(inner), machines * (machines - 1) // 2)
    costs = level_costs(problem, len(problem.machines) - 1, inner)
    paths, low = _outermost_paths(costs, last, counts, upper_bound_seconds * _SLACK, max_variables)
    if paths is None:
        return None
    (plan,), relative_bound = _minimise([paths], options, gap)
    bound = max(low, relative_bound * _largest(paths))
    levels = [plan]
    for inner_level in reversed(solved):
        levels.append(inner_level.split(levels[-1]))
    value = max(paths.edges[stage] for stage in levels[0])
    optimal = value - bound <= _PROVED * value
    seconds = time.perf_counter() - began
    return Found(flatten(levels), value, optimal, value if optimal else bound, seconds, tuple(levels))


def _outermost_paths(
    costs: LevelCosts, last: int, counts: range, limit: float, max_variables: int
) -> tuple[Paths | None, float]:
    """The paths for the whole graph, few enough to choose from, and a lower bound of the bottleneck.

    Only as many plans as a programme can hold are kept, by bounding the bottleneck from both sides.
    """
    for tolerance in _TOLERANCES:
        low, limit = narrow(costs, 0, last, counts, limit, tolerance)
        if limit == np.inf:
            return None, limit
        paths = find_paths(costs, 0, last, counts, limit)
        if paths is None or len(paths.edges) <= max_variables:
            return paths, low
    raise SolverError(f"the programme has more than {max_variables} variables")


def _check_size(num_states: int, num_matrices: int) -> None:
    """Refuse what would not fit in memory here."""
    needed = num_states**2 * num_matrices * 8
    if needed > _MAX_BYTES:
        raise SolverError(f"{num_states} states take {needed / 2**30:.1f} GiB of costs, more than 1 GiB")


@dataclass(frozen=True)
class _Options:
    deadline: float
    max_variables: int
    solver: SolverName | None


@dataclass(frozen=True)
class _InnerLevel:
    """An inner level, solved: the best value of every (i, j) on all its machines, and the plans by (i, j)."""

    best: Matrix
    plans: dict[tuple[int, int], _Stages]

    def split(self, outer: _Stages) -> _Stages:
        """The stages of this level inside those of the next outer one."""
        return tuple(part for stage in outer for part in self.plans[stage.start, stage.stop])


def _solve_inner(problem: Problem, level: int, inner: Matrix, options: _Options) -> _InnerLevel:
    machines, size = problem.machines[level], len(inner)
    _check_size(size, machines * machines)
    costs, counts = level_costs(problem, level, inner), range(machines, machines + 1)
    blocks: list[Paths] = []
    num_variables = 0
    for start in range(size - 1):
        for stop in range(start + 1, size):
            _, limit = narrow(costs, start, stop, counts, np.inf, _TOLERANCES[0])
            paths = find_paths(costs, start, stop, counts, limit) if limit < np.inf else None
            if paths is not None:
                blocks.append(paths)
                num_variables += len(paths.edges)
            if num_variables > options.max_variables // 10:
                best = pipedream.solve_level(problem, level, inner)
                pairs = [(int(i), int(j)) for i, j in np.argwhere(best < np.inf)]
                return _InnerLevel(best, pipedream.split_level(problem, level, inner, pairs))
    best = np.full_like(inner, np.inf)
    if not blocks:
        return _InnerLevel(best, {})
    stages, bound = _minimise(blocks, options, gap=0.0)
    total = 0.0
    for paths, plan in zip(blocks, stages, strict=True):
        value = max(paths.edges[stage] for stage in plan)
        best[paths.start, paths.stop] = value
        total += value / _largest(paths)
    if total - bound > _PROVED * total:
        raise SolverError(f"level {level + 1} of the topology was not solved to the end in time")
    return _InnerLevel(best, {(p.start, p.stop): plan for p, plan in zip(blocks, stages, strict=True)})


def _minimise(blocks: Sequence[Paths], options: _Options, gap: float) -> tuple[list[_Stages], float]:
    """A path for every block, and a lower bound of the sum of their bottlenecks.

    The sum is that of the bottlenecks relative to the largest edge of their block.
    """
    programme = pulp.LpProblem("bottleneck", pulp.LpMinimize)
    tops = [pulp.LpVariable(f"t{b}", lowBound=0) for b in range(len(blocks))]
    programme += pulp.lpSum(tops)
    chosen = []
    for b, (paths, top) in enumerate(zip(blocks, tops, strict=True)):
        chosen.append([pulp.LpVariable(f"x{b}_{e}", cat=pulp.LpBinary) for e in range(len(paths.edges))])
        _add_block(programme, paths, chosen[-1], top)
    bound = solve(
        programme,
        time_limit_seconds=options.deadline - time.perf_counter(),
        gap=gap,
        solver=options.solver,
    )
    plans = [_follow(paths, variables) for paths, variables in zip(blocks, chosen, strict=True)]
    return plans, bound / _SCALE


def _add_block(
    programme: pulp.LpProblem, paths: Paths, variables: Sequence[pulp.LpVariable], top: pulp.LpVariable
) -> None:
    """The rows of one path: it begins once, leaves every node it enters, and each slot bounds its bottleneck."""
    scale = _SCALE / _largest(paths)
    begins: list[_Term] = []
    balance: dict[tuple[int, int], list[_Term]] = defaultdict(list)
    slots: dict[int, list[_Term]] = defaultdict(list)
    for variable, (stage, cost) in zip(variables, paths.edges.items(), strict=True):
        if stage.start == paths.start:
            begins.append((variable, 1))
        else:
            balance[stage.start, stage.after + stage.num_machines].append((variable, -1))
        if stage.after:
            balance[stage.stop, stage.after].append((variable, 1))
        for slot in range(stage.after, stage.after + stage.num_machines):
            slots[slot].append((variable, cost * scale))
    programme += pulp.LpAffineExpression(begins) == 1
    for terms in balance.values():
        programme += pulp.LpAffineExpression(terms) == 0
    for terms in slots.values():
        programme += pulp.LpAffineExpression([*terms, (top, -1)]) <= 0


def _largest(paths: Paths) -> float:
    return max(paths.edges.values()) or 1.0


def _follow(paths: Paths, variables: Sequence[pulp.LpVariable]) -> _Stages:
    """The chosen stages, in order."""
    chosen = [s for s, variable in zip(paths.edges, variables, strict=True) if (variable.varValue or 0.0) > 0.5]
    plan = tuple(sorted(chosen, key=lambda stage: stage.start))
    ends = [paths.start, *(stage.stop for stage in plan)]
    if [*(stage.start for stage in plan), paths.stop] != ends:
        raise SolverError("the solver's answer is no path from the first to the last state")
    return plan
