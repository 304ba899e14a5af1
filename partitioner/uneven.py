"""The exact optimum over plans whose stages may differ in their replicas, where devices are few.

Every stage, number of replicas, tensor-parallel degree and choice of what to recompute becomes one option of the
label search (``labels.py``), which follows them from the last stage to the first. PipeDream's plans, fifteen
replicas of one stage and one of the next, are of this kind. Unlike devices are counted kind by kind.
"""

from dataclasses import dataclass

import numpy as np

from dpart.partitioner.evaluate import Shape, StageShape
from dpart.partitioner.labels import LabelSearch
from dpart.partitioner.options import UNLIMITED, Integers, Options
from dpart.partitioner.prices import Priced, Prices, stage_shape


@dataclass(frozen=True)
class Uneven:
    """What the search found.

    Attributes:
        plan: The best one and its objective; None if none is better than the upper bound.
        complete: Whether every plan was covered.
    """

    plan: tuple[Shape, float] | None
    complete: bool


class AllOptions:
    """All ways to run all stages on so many devices, as options; an `OptionProblem`."""

    def __init__(self, prices: Prices, num_devices: int) -> None:
        self.prices, self.num_devices = prices, num_devices
        self.budgets = prices.budgets(num_devices)
        most = min(max(self.budgets), prices.terms.num_microbatches)
        self._priced = [
            priced
            for replicas in range(1, most + 1)
            for priced in prices.ways(replicas, -(-num_devices // replicas), num_devices)
        ]

    def options(self, limit_seconds: float) -> Options:
        """Those within the limit; `variant` is ``priced * 2**32 + microbatches in flight``."""
        parts = [self._of(n, priced, limit_seconds) for n, priced in enumerate(self._priced)]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Options(self.prices.edges.num_nodes, *columns)

    def stage(self, options: Options, index: int) -> StageShape:
        """The stage that an option is."""
        priced, in_flight = divmod(int(options.variant[index]), 2**32)
        pools = len(self.budgets)
        # Nodes are states, each once for every pool, but for the first and the last (`Edges`).
        start, stop = ((int(node[index]) + pools - 1) // pools for node in (options.start, options.stop))
        segment = int(self._segment_of[start, stop])
        return stage_shape(self.prices, segment, self._priced[priced], in_flight)

    @property
    def _segment_of(self) -> Integers:
        found = np.full((self.prices.num_states, self.prices.num_states), -1, dtype=np.int64)
        found[self.prices.start, self.prices.stop] = np.arange(len(self.prices.start))
        return found

    def _of(self, number: int, priced: Priced, limit_seconds: float) -> tuple[np.ndarray, ...]:
        prices, edges = self.prices.pools[priced.pool - self.prices.pool], self.prices.edges
        here = (edges.pool == priced.pool - self.prices.pool) & (edges.crossing == priced.crossing)
        of_edge = prices.signature[edges.segment[here]]
        # One option for each choice: the last number of microbatches in flight at which it is the one.
        choice, depth = priced.choice, len(priced.choice)
        ends = np.ones_like(choice, dtype=np.bool_)
        ends[:-1] = choice[1:] != choice[:-1]
        wanted = (ends & (choice >= 0) & (priced.busy_seconds <= limit_seconds)).T
        per_signature = wanted.sum(axis=1)
        count = per_signature[of_edge]
        edge = np.repeat(np.arange(len(count)), count)
        # Of an edge, the n-th of its options is the n-th wanted choice of its signature.
        first = np.concatenate([[0], np.cumsum(count)])[:-1]
        place = np.arange(len(edge)) - first[edge]
        signature, last = np.nonzero(wanted)
        begin = np.concatenate([[0], np.cumsum(per_signature)[:-1]])
        entry = begin[of_edge[edge]] + place
        g, n = signature[entry], last[entry]
        same = np.ones(len(edge), dtype=np.int64)
        return (
            edges.start[here][edge],
            edges.stop[here][edge],
            same * priced.num_replicas,
            same * priced.num_replicas * priced.degree,
            np.where(n + 1 == depth, UNLIMITED, n + 1),
            priced.busy_seconds[n, g],
            priced.latency_seconds[n, g],
            number * 2**32 + n.astype(np.int64) + 1,
            same * (priced.pool - self.prices.pool),
        )


def search(
    prices: Prices,
    num_devices: int,
    *,
    upper_seconds: float = np.inf,
    num_stages: int | None = None,
    max_stages: int | None = None,
) -> Uneven:
    """The plan of least objective.

    Args:
        upper_seconds: Only better plans are looked for.
        num_stages: Exactly so many.
        max_stages: At most so many.
    """
    problem = AllOptions(prices, num_devices)
    options = problem.options(upper_seconds)
    if not len(options.start):
        return Uneven(None, True)
    found = LabelSearch(options).exact(
        num_devices,
        upper_bound=upper_seconds,
        num_stages=num_stages,
        max_stages=max_stages,
        budgets=problem.budgets if len(problem.budgets) > 1 else (),
    )
    if found.path is None:
        return Uneven(None, found.complete)
    shape = tuple(problem.stage(options, index) for index in found.path.chosen)
    return Uneven((shape, found.path.value), found.complete)


def fits(prices: Prices, num_devices: int, *, num_stages: int | None = None, max_stages: int | None = None) -> bool:
    """Whether any plan fits."""
    if len(prices.pools) > 1:
        return search(prices, num_devices, num_stages=num_stages, max_stages=max_stages).plan is not None
    options = AllOptions(prices, num_devices).options(np.inf)
    if not len(options.start):
        return False
    labels = LabelSearch(options)
    return labels.least(max_devices=num_devices, num_stages=num_stages, max_stages=max_stages) is not None
