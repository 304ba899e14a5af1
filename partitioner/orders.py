"""Plans along one topological order: upper bounds for graphs that branch.

Cut a depth-first order in pieces, and the pieces are a contiguous plan. Depth first (a stack, not a queue) keeps a
branch together, so that few transfers cross; several orders differ in which branch comes first. A piece (i, j]
holds the layers at positions i .. j - 1, and all loads of pieces stand in one matrix::

    order   a  b  c  d          load[1, 3]: layers b and c
    cut    0  1  2  3  4

A transfer misses a piece that lies between two of its layers, and is inside a piece that has all of them: both
are rectangles of (i, j), so the matrix is a sum of rectangles. For a trial bottleneck T the fewest devices up to
every cut follow from those before it, whatever the number of devices.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dpart.partitioner.loads import Indices, LoadProblem, Mask, Matrix, SharedPlan, Vector, share
from dpart.partitioner.trials import NO_PLAN, Columns

_MAX_CUTS = 1500
"""The matrices are cuts by cuts: 18 MB each at this size."""


def depth_first_orders(problem: LoadProblem, seed: float = 0) -> Iterator[list[int]]:
    """Topological orders without end: in the order of the list, in the reverse, then at random; half from the end."""
    followers: list[list[int]] = [[] for _ in problem.predecessors]
    for layer, before in enumerate(problem.predecessors):
        for p in dict.fromkeys(before):
            followers[p].append(layer)
    predecessors = [list(dict.fromkeys(before)) for before in problem.predecessors]
    generator = random.Random(seed)
    rank = list(range(problem.num_layers))
    yield _depth_first(predecessors, followers, rank)
    yield _depth_first(followers, predecessors, [-r for r in rank])[::-1]
    yield _depth_first(predecessors, followers, [-r for r in rank])
    yield _depth_first(followers, predecessors, rank)[::-1]
    while True:
        generator.shuffle(rank)
        yield _depth_first(predecessors, followers, rank)
        yield _depth_first(followers, predecessors, rank)[::-1]


def _depth_first(
    predecessors: Sequence[Sequence[int]], followers: Sequence[Sequence[int]], rank: list[int]
) -> list[int]:
    """Follows a branch to where it must wait; lower ranks first."""
    waiting = [len(before) for before in predecessors]
    stack = sorted((layer for layer, count in enumerate(waiting) if not count), key=rank.__getitem__, reverse=True)
    order = []
    while stack:
        layer = stack.pop()
        order.append(layer)
        freed = []
        for follower in followers[layer]:
            waiting[follower] -= 1
            if not waiting[follower]:
                freed.append(follower)
        stack.extend(sorted(freed, key=rank.__getitem__, reverse=True))
    return order


class Chain:
    """Pieces of one order, with their loads; -- see `trial`."""

    def __init__(self, problem: LoadProblem, order: Sequence[int]) -> None:
        """Takes time and memory in proportion to cuts squared, times classes."""
        self._problem = problem
        self._columns = Columns.of(problem)
        self._order = order
        self._cuts = _choose_cuts(problem, order)
        crossing = _crossing(problem, order, self._cuts)
        self._loads: list[Matrix] = []
        for kind in problem.classes:
            load = _between(kind.work[list(order)], self._cuts)
            load += kind.transfer_scale * crossing
            load[_between(problem.memory_bytes[list(order)], self._cuts) > kind.memory_bytes] = np.inf
            # Row j, column i: what is asked for is all pieces that end at one cut.
            self._loads.append(np.ascontiguousarray(load.T))

    def trial(self, threshold: float) -> SharedPlan | None:
        """A plan of pieces with loads of at most the threshold."""
        columns, last = self._columns, len(self._cuts) - 1
        fits = {kind: self._loads[kind] <= threshold for kind in columns.steps}
        fewest = np.full((len(columns.used), last + 1), NO_PLAN, np.int16)
        fewest[0, 0] = 0
        for stop in range(1, last + 1):
            for kind, steps in columns.steps.items():
                fit = fits[kind][stop, :stop]
                more = int(kind == columns.lead)
                for before, after in steps:
                    least = int(np.where(fit, fewest[before, :stop], NO_PLAN).min()) + more
                    if least < fewest[after, stop] and least <= columns.lead_count:
                        fewest[after, stop] = least
        column = int(fewest[:, last].argmin())
        if fewest[column, last] == NO_PLAN:
            return None
        return self._read_back(fits, fewest, column)

    def _read_back(self, fits: dict[int, Mask], fewest: npt.NDArray[np.int16], column: int) -> SharedPlan:
        shares = []
        stop = len(self._cuts) - 1
        while stop:
            start, kind, column = next(
                (int(starts[0]), kind, before)
                for kind, steps in self._columns.steps.items()
                for before, after in steps
                if after == column
                if len(
                    starts := np.flatnonzero(
                        fits[kind][stop, :stop]
                        & (fewest[before, :stop] == fewest[after, stop] - int(kind == self._columns.lead))
                    )
                )
            )
            shares.append(share(self._problem, self._order[self._cuts[start] : self._cuts[stop]], kind))
            stop = start
        return SharedPlan(tuple(reversed(shares)))


def _choose_cuts(problem: LoadProblem, order: Sequence[int]) -> Indices:
    """All positions, or where they are too many, some that part the work evenly."""
    if len(order) <= _MAX_CUTS:
        return np.arange(len(order) + 1)
    least = np.min([kind.work for kind in problem.classes if kind.count], axis=0)[list(order)]
    least[~np.isfinite(least)] = 0.0
    # A little for each layer, so that a row of layers without work has cuts, too.
    total = np.cumsum(least + max(least.sum(), 1.0) / len(order) / 100)
    even = np.searchsorted(total, np.linspace(0, total[-1], _MAX_CUTS)[1:-1], "right")
    return np.unique([0, *even, len(order)])


def _between(values: Vector, cuts: Indices) -> Matrix:
    """[cuts, cuts]: sum of the values from one cut to another; infinite where one of them is."""
    finite = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))[cuts]
    between: Matrix = total[None, :] - total[:, None]
    if not finite.all():
        barred = np.concatenate(([0], np.cumsum(~finite)))[cuts]
        between[barred[None, :] != barred[:, None]] = np.inf
    return between


def _crossing(problem: LoadProblem, order: Sequence[int], cuts: Indices) -> Matrix:
    """[cuts, cuts]: cost of the transfers with a layer inside the piece and one outside."""
    last = len(cuts) - 1
    position = np.empty(len(order), np.intp)
    position[list(order)] = np.arange(len(order))
    missed = np.zeros((last + 1, last + 1))
    inside = np.zeros((last + 1, last + 1))
    for layers, cost in zip(problem.nets.layers, problem.nets.cost, strict=True):
        # First cut behind each layer of the net.
        behind = np.searchsorted(cuts, np.sort(position[list(layers)]), "right")
        np.add.at(missed, (np.concatenate(([0], behind)), np.concatenate((behind - 1, [last]))), cost)
        inside[behind[0] - 1, behind[-1]] += cost
    missed = missed.cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]
    inside = inside[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
    crossing: Matrix = np.maximum(problem.nets.cost.sum() - missed - inside, 0.0)
    return crossing
