"""`method="ilp"` for graphs that branch: the load-balancing problem as a mixed-integer programme.

Contiguous plans have K stages in a row, one for each device. *Cumulative* variables say what is behind a cut::

    y[l, s] = 1 iff layer l is on stage s or before it      y[l, s] <= y[l, s + 1]
    y[l, s] - y[l, s - 1] = sum of x[l, s, c] over c        y[l, s] <= y[p, s] for every predecessor p

where x[l, s, c] has layer l on stage s, and stage s on a device of class c, for which z[s, c] is one-hot. With a
plan at hand, the layers before and behind l, and what they are worth (`load_bounds`), leave l few stages. In plans
that are not contiguous a device may take any set of layers: x itself is what is chosen, and each device has its
class beforehand.

A transfer u costs stage s what touched[u, s] - inside[u, s] says, with touched >= x >= inside for its layers. The
relaxation of that is weak (nothing crosses where every layer is everywhere in equal parts), so T starts at the
bound of `load_bounds`. The solver is asked for plans better than the one at hand only.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence

import numpy as np
import pulp

from dpart.partitioner.branching import Balanced
from dpart.partitioner.ilp_solver import SolverError, SolverName, solve
from dpart.partitioner.load_bounds import lower_bound
from dpart.partitioner.load_ilp_rows import contiguous as contiguous_programme
from dpart.partitioner.load_ilp_rows import scattered as scattered_programme
from dpart.partitioner.loads import LoadProblem, SharedPlan, contract

__all__ = ["SolverError", "search"]

_UNITS = 1000.0
"""Of the plan at hand: CBC prints bounds with three decimals."""

_BETTER = 1 - 2e-6
"""Of the plan at hand: what is looked for. Solvers cannot tell less from rounding, their tolerances are 1e-6."""

_MAX_VARIABLES = 100_000


def search(
    problem: LoadProblem,
    *,
    together: Iterable[Sequence[int]] = (),
    contiguous: bool = True,
    start: SharedPlan | None = None,
    time_limit_seconds: float = 60.0,
    solver: SolverName | None = None,
) -> Balanced:
    """The plan of least value, or the better of `start` and what the solver found in time, with the bound it proved.

    Args:
        problem: Layers in any order; cycles are merged where plans are to be contiguous.
        together: Groups of layers that must share a device.
        contiguous: Whether data must flow to later devices only.
        start: A plan at hand, of the same kind.
        time_limit_seconds: Of the solver. The rows of large problems take a while, too.
        solver: None for the first one installed.

    Raises:
        SolverError: There is no plan at hand, and the solver came to no answer.
    """
    began = time.perf_counter()
    if not contiguous:
        problem = dataclasses.replace(problem, predecessors=((),) * problem.num_layers)
    contraction = contract(problem, together)
    merged = contraction.problem
    bound = lower_bound(merged)
    best = start
    if not merged.num_layers:
        best = SharedPlan(())
    elif bound < np.inf:
        limit = max(merged.largest_load(), 1e-9) if start is None else start.value * _BETTER
        seconds = time_limit_seconds - (time.perf_counter() - began)
        try:
            found, bound = _solve(merged, contiguous, bound, limit, seconds, solver)
        except SolverError:
            if start is None:
                raise
            found = None
        if found is not None:
            best = contraction.expand(problem, found)
        elif start is None:
            bound = np.inf
    if best is not None and start is not None and start.value < best.value:
        best = start
    return Balanced(best, bound, None, time.perf_counter() - began)


def _solve(
    problem: LoadProblem, contiguous: bool, bound: float, limit: float, seconds: float, solver: SolverName | None
) -> tuple[SharedPlan | None, float]:
    """The best plan of value at most the limit and a lower bound; no plan and the limit where there is none."""
    if limit <= bound:
        return None, bound
    stages = sum(min(kind.count, problem.num_layers) for kind in problem.classes)
    size = stages * (problem.num_layers * len(problem.classes) + 2 * len(problem.nets.layers))
    if size > _MAX_VARIABLES:
        raise SolverError(f"the programme would have {size} variables, more than {_MAX_VARIABLES}")
    unit = max(limit, bound) / _UNITS
    make = contiguous_programme if contiguous else scattered_programme
    programme = make(problem, bound, limit, unit)
    try:
        proved = solve(programme.model, time_limit_seconds=seconds, gap=0.0, solver=solver) * unit
    except SolverError:
        if programme.model.status == pulp.LpStatusInfeasible:
            return None, limit
        raise
    return programme.plan(), max(bound, min(proved, limit))
