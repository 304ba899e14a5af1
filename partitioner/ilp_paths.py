"""The plans of one level as the paths of a graph: what the integer programme chooses from.

A node is (state, machines still to come). An edge is a stage from state i to j on r machines, so it leads from
(i, after + r) to (j, after). Edges above a limit are dropped, then those on no path from start to end.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dpart.partitioner.search import LevelStage, Mask, Matrix, Problem

_Slot = tuple[int, int]
"""(machines of a stage, machines after it)"""


@dataclass(frozen=True)
class LevelCosts:
    """One level's matrices; `first` has only the rows that paths may start from, 0 and up."""

    first: dict[_Slot, Matrix]
    later: dict[_Slot, Matrix]


def level_costs(problem: Problem, level: int, inner: Matrix) -> LevelCosts:
    """Ask the problem for every matrix of a level, given the best values on one machine of it."""
    machines = problem.machines[level]
    starts = slice(0, 1) if level == len(problem.machines) - 1 else slice(None)
    slots = [(r, after) for r in range(1, machines + 1) for after in range(machines - r + 1)]
    return LevelCosts(
        {(r, after): problem.unsplit_seconds(level, r, after, inner)[starts].copy() for r, after in slots},
        {(r, after): problem.stage_seconds(level, r, after, inner) for r, after in slots if r + after < machines},
    )


@dataclass(frozen=True)
class Paths:
    """The cost of every edge that lies on some path from one state to another.

    Edges that leave `start` are first stages, and no others are: a later stage begins where one has ended.
    """

    start: int
    stop: int
    edges: dict[LevelStage, float]


def find_paths(costs: LevelCosts, start: int, stop: int, counts: range, limit: float) -> Paths | None:
    """All paths on one of these counts of machines without an edge above the limit; None if there are none."""
    first, later, ends = _towards(costs, start, stop, counts, limit)
    most, size = counts[-1], stop - start + 1
    met: dict[int, Mask] = {}
    for after in reversed(range(most)):
        heads = (row for (_, behind), row in first.items() if behind == after)
        steps = (met[after + r] @ later[r, after] for r in range(1, most - after))
        met[after] = _any(size, (*heads, *steps)) & ends[after]
    edges: dict[LevelStage, float] = {}
    for (r, after), row in first.items():
        for k in (np.flatnonzero(row & ends[after]) + start).tolist():
            edges[LevelStage(start, k, r, after)] = float(costs.first[r, after][start, k])
    for (r, after), pairs in later.items():
        for i, j in (np.argwhere(pairs & met[after + r][:, None] & ends[after]) + start).tolist():
            edges[LevelStage(i, j, r, after)] = float(costs.later[r, after][i, j])
    return Paths(start, stop, edges) if edges else None


def narrow(
    costs: LevelCosts, start: int, stop: int, counts: range, limit: float, tolerance: float
) -> tuple[float, float]:
    """Bounds (low, high) of the bottleneck between two states, by halving.

    Some plan is within high, which is at most the limit, and none within low; they end up to the tolerance apart,
    relative to high. Where no plan is within the limit, both are infinite.
    """
    if limit == np.inf:
        window = slice(start, stop + 1)
        parts = (matrix[start, window] for matrix in costs.first.values())
        more = (matrix[window, window] for matrix in costs.later.values())
        limit = max(float(c[c < np.inf].max(initial=0.0)) for c in (*parts, *more))
    low, high = 0.0, limit
    if not _is_connected(costs, start, stop, counts, high):
        return np.inf, np.inf
    # The floor ends the halving where the best bottleneck is zero.
    while high - low > max(tolerance * high, 1e-9 * limit):
        middle = (low + high) / 2
        if _is_connected(costs, start, stop, counts, middle):
            high = middle
        else:
            low = middle
    return low, high


def _is_connected(costs: LevelCosts, start: int, stop: int, counts: range, limit: float) -> bool:
    first, _, ends = _towards(costs, start, stop, counts, limit)
    return any(bool((row & ends[after]).any()) for (_, after), row in first.items())


def _towards(
    costs: LevelCosts, start: int, stop: int, counts: range, limit: float
) -> tuple[dict[_Slot, Mask], dict[_Slot, Mask], list[Mask]]:
    """The first and later edges within the limit, and by machines still to come the states that lead to the end."""
    window, size, most = slice(start, stop + 1), stop - start + 1, counts[-1]
    first = {
        (r, after): _within(matrix[start, window], limit)
        for (r, after), matrix in costs.first.items()
        if r + after in counts
    }
    later = {
        (r, after): _within(matrix[window, window], limit)
        for (r, after), matrix in costs.later.items()
        if r + after < most
    }
    ends: list[Mask] = [np.arange(size) == size - 1]
    for used in range(1, most):
        ends.append(_any(size, (_leads(later[r, used - r], ends[used - r]) for r in range(1, used + 1))))
    return first, later, ends


def _within(costs: Matrix, limit: float) -> Mask:
    within: Mask = (costs <= limit) & (costs < np.inf)
    return within


def _leads(edges: Mask, ends: Mask) -> Mask:
    """From which states some edge leads to one of the ends."""
    leads: Mask = np.logical_or.reduce(edges & ends, axis=1)
    return leads


def _any(size: int, rows: Iterable[Mask]) -> Mask:
    total = np.zeros(size, dtype=np.bool_)
    for row in rows:
        total |= row
    return total
