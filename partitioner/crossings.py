"""`Edges`: every stage on every kind of devices, as an edge between nodes that know where the stage before stands.

What a stage receives comes over the link between pools where the stage before it stands in another one. So a node is
a state and the pool of the stage that ends there, and a stage is one edge for each pair of pools::

    from (3, A) to (7, A)    on pool A, behind one of A: over a link of A
    from (3, A) to (7, B)    on pool B, behind one of A: over the link between pools
    from (3, B) to (7, B)    on pool B, behind one of B: over a link of B

With one pool nodes are states and edges segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpart.compiler.graph import ModelGraph
from dpart.partitioner.options import Integers
from dpart.partitioner.quantities import chains
from dpart.partitioner.search import Mask


@dataclass(frozen=True)
class Edges:
    """Sorted by where they start.

    Attributes:
        num_nodes: Node 0 is before all layers, the last one behind them.
        segment: [X]: which layers.
        start: [X]: the node before the stage.
        stop: [X]: the node behind it, of a higher number.
        pool: [X]: where the stage stands.
        crossing: [X]: whether what it receives comes from another pool.
    """

    num_nodes: int
    segment: Integers
    start: Integers
    stop: Integers
    pool: Integers
    crossing: npt.NDArray[np.bool_]

    @cached_property
    def way(self) -> Integers:
        """[X]: pool and crossing in one number."""
        return 2 * self.pool + self.crossing


def edges(start: Integers, stop: Integers, num_states: int, num_pools: int, chained: Mask, *, bound: bool) -> Edges:
    """The edges of all segments.

    Args:
        start: [E]: a segment's first state, ascending.
        stop: [E]: its last one.
        chained: [E]: whether it certainly receives something from the stage before it.
        bound: Where that is not certain, take its sources to be in its own pool: never more than in truth. Else take
            them to be elsewhere.
    """
    if num_pools == 1:
        same = np.zeros_like(start)
        return Edges(num_states, np.arange(len(start)), start, stop, same, same.astype(np.bool_))
    parts = []
    for pool in range(num_pools):
        for before in range(num_pools):
            chosen = np.flatnonzero((start > 0) | (before == 0))
            inner = start[chosen] > 0
            crosses = np.where(chained[chosen], pool != before, not bound) & inner
            parts.append(
                (
                    chosen,
                    np.where(inner, 1 + (start[chosen] - 1) * num_pools + before, 0),
                    np.minimum(1 + (stop[chosen] - 1) * num_pools + pool, 1 + (num_states - 2) * num_pools),
                    np.full(len(chosen), pool),
                    crosses,
                )
            )
    segment, first, last, pools, crossing = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((last, first))
    segment, first, last, pools = (column[order].astype(np.int64) for column in (segment, first, last, pools))
    return Edges(2 + (num_states - 2) * num_pools, segment, first, last, pools, crossing[order])


def chained(graph: ModelGraph, member: Mask, start: Integers, stop: Integers) -> Mask:
    """[E]: whether a segment receives something from the stage before it, whatever layers that one has.

    All stages that end at a state have the layers that are in no smaller state: in a chain its last unit.
    """
    column = {layer.name: i for i, layer in enumerate(graph.layers)}
    newest = member.copy()
    for end in np.unique(stop).tolist():
        newest[end] &= ~member[start[stop == end]].any(axis=0)
    receives = np.zeros((len(member), len(member)), dtype=np.bool_)
    for chain in chains(graph):
        if chain.forward_bytes or chain.backward_bytes:
            holders = [column[name] for name in set(chain.holders)]
            held = member[:, holders].sum(axis=1)
            for state in np.flatnonzero(newest[:, holders].any(axis=1)).tolist():
                receives[state] |= held > held[state]
    certain: Mask = receives[start, stop]
    return certain


def joint(signatures: Sequence[npt.NDArray[np.intp]]) -> tuple[npt.NDArray[np.intp], list[npt.NDArray[np.intp]]]:
    """[E] one signature of each segment for all pools, and for each pool its own one of each of those."""
    if len(signatures) == 1:
        return signatures[0], [np.arange(int(signatures[0].max(initial=-1)) + 1)]
    distinct, found = np.unique(np.stack(signatures, axis=1), axis=0, return_inverse=True)
    return found.ravel(), list(distinct.T)
