"""Choices at the nodes of trees, costs on nodes and edges, one limit on a sum: exact, by dynamic programming.

From the leaves to the roots, every node keeps for each of its choices what the subtree below it can take: sums of
bytes and seconds, where more bytes take fewer seconds. Subtrees are joined by adding all of one side to all of the
other and keeping what nothing beats::

    bytes      node, choice i       child, best of its choices j + edge(i, j)          joined
      ^        .  5 s               .  3 s      .                                       8 s, 7 s, ...
      |

If the least seconds of all fit within the limit no sums of bytes are kept: that is the usual minimum over a tree.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from dpart.partitioner.options import Floats, Integers

Pairs = dict[tuple[int, int], Floats]
"""Of two nodes, the lower number first: the cost of every pair of choices."""

_MAX_SUMS = 4_000_000
"""Sums that are compared at once."""


class TooManyError(RuntimeError):
    """More sums than can be kept."""


@dataclass(frozen=True)
class _Front:
    """Sums that nothing beats, by ascending bytes and descending seconds; each of one sum of either side.

    Attributes:
        left: Number in the front that a child was joined to; of a node alone, nothing.
        child: Number in the child's front.
    """

    memory: Integers
    seconds: Floats
    left: Integers
    child: Integers


def is_forest(count: int, pairs: Pairs) -> bool:
    """Whether the edges have no cycle."""
    root = list(range(count))

    def top(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for u, v in pairs:
        if top(u) == top(v):
            return False
        root[top(u)] = top(v)
    return True


def best_of_trees(
    seconds: list[Floats], memory_bytes: list[Integers], pairs: Pairs, limit_bytes: int | None
) -> tuple[int, ...] | None:
    """The choice at each node, of least total seconds within the limit; None if there is none.

    Raises:
        TooManyError: The limit binds, and there are too many different sums of bytes.
    """
    nothing = [np.zeros_like(memory) for memory in memory_bytes]
    free = _Trees(seconds, nothing, pairs, 0).best()
    if free is None or limit_bytes is None:
        return free
    if sum(int(memory[choice]) for memory, choice in zip(memory_bytes, free, strict=True)) <= limit_bytes:
        return free
    return _Trees(seconds, memory_bytes, pairs, limit_bytes).best()


class _Trees:
    """All trees of a forest, hung on one more node that has one choice, costs nothing, and comes last."""

    def __init__(self, seconds: list[Floats], memory_bytes: list[Integers], pairs: Pairs, limit: int) -> None:
        count = len(seconds)
        self._seconds = [*seconds, np.zeros(1)]
        self._memory = [*memory_bytes, np.zeros(1, np.int64)]
        self._limit = limit
        neighbours: dict[int, dict[int, Floats]] = defaultdict(dict)
        for (u, v), cost in pairs.items():
            neighbours[u][v], neighbours[v][u] = cost, cost.T
        self._children: list[list[tuple[int, Floats]]] = [[] for _ in range(count + 1)]
        self._order: list[int] = []
        parent = [-1] * count
        for root in range(count):
            if parent[root] < 0:
                parent[root] = count
                self._children[count].append((root, np.zeros((1, len(seconds[root])))))
                waiting = [root]
                while waiting:
                    node = waiting.pop()
                    self._order.append(node)
                    for child, cost in neighbours[node].items():
                        if child != parent[node]:
                            parent[child] = node
                            self._children[node].append((child, cost))
                            waiting.append(child)
        # Every node stands behind its children, and the last one behind all.
        self._order = [*reversed(self._order), count]
        self._least = [int(memory.min()) for memory in self._memory]
        for node in self._order:
            self._least[node] += sum(self._least[child] for child, _ in self._children[node])

    def best(self) -> tuple[int, ...] | None:
        """The choice at each node."""
        joined: dict[tuple[int, int], list[_Front]] = {}
        merged: dict[tuple[int, int, int], tuple[Integers, Integers]] = {}
        for node in self._order:
            for choice in range(len(self._seconds[node])):
                fronts = [self._alone(node, choice)]
                spare = self._limit - self._least[-1] + self._own_least(node)
                for number, (child, cost) in enumerate(self._children[node]):
                    below, source = self._below(joined, child, cost[choice])
                    merged[node, choice, number] = source
                    spare += self._least[child]
                    fronts.append(_join(fronts[-1], below, spare))
                joined[node, choice] = fronts
        end = joined[len(self._seconds) - 1, 0][-1]
        if not len(end.seconds):
            return None
        return self._follow(joined, merged, len(end.seconds) - 1)

    def _follow(
        self,
        joined: dict[tuple[int, int], list[_Front]],
        merged: dict[tuple[int, int, int], tuple[Integers, Integers]],
        entry: int,
    ) -> tuple[int, ...]:
        """From the last node's entry to the choices that it is the sum of."""
        chosen = [0] * len(self._seconds)
        waiting = [(len(self._seconds) - 1, 0, entry)]
        while waiting:
            node, choice, entry = waiting.pop()
            chosen[node] = choice
            for number in reversed(range(len(self._children[node]))):
                front = joined[node, choice][number + 1]
                choices, entries = merged[node, choice, number]
                at = int(front.child[entry])
                waiting.append((self._children[node][number][0], int(choices[at]), int(entries[at])))
                entry = int(front.left[entry])
        return tuple(chosen[:-1])

    def _alone(self, node: int, choice: int) -> _Front:
        memory, seconds = self._memory[node][choice : choice + 1], self._seconds[node][choice : choice + 1]
        here = np.isfinite(seconds)
        zero = np.zeros(int(here.sum()), np.int64)
        return _Front(memory[here], seconds[here], zero, zero)

    def _below(
        self, joined: dict[tuple[int, int], list[_Front]], child: int, cost: Floats
    ) -> tuple[_Front, tuple[Integers, Integers]]:
        """The child's fronts, over an edge that costs so much for each of its choices, as one; and where they were."""
        fronts = [joined[child, j][-1] for j in range(len(cost))]
        choices = np.repeat(np.arange(len(cost)), [len(front.seconds) for front in fronts])
        entries = np.concatenate([np.arange(len(front.seconds)) for front in fronts])
        memory = np.concatenate([front.memory for front in fronts])
        seconds = np.concatenate([front.seconds for front in fronts]) + cost[choices]
        kept = _undominated(memory, seconds)
        zero = np.zeros(len(kept), np.int64)
        return _Front(memory[kept], seconds[kept], zero, zero), (choices[kept], entries[kept])

    def _own_least(self, node: int) -> int:
        return int(self._memory[node].min())


def _join(left: _Front, child: _Front, limit: int) -> _Front:
    """All sums of both, within the limit: what the rest leaves over that takes the least."""
    size = len(left.seconds) * len(child.seconds)
    if size > _MAX_SUMS:
        raise TooManyError(f"{size} sums")
    memory = (left.memory[:, None] + child.memory[None, :]).ravel()
    seconds = (left.seconds[:, None] + child.seconds[None, :]).ravel()
    kept = _undominated(memory, seconds)
    kept = kept[memory[kept] <= limit]
    width = max(1, len(child.seconds))
    return _Front(memory[kept], seconds[kept], kept // width, kept % width)


def _undominated(memory: Integers, seconds: Floats) -> Integers:
    """Indices of what nothing beats, by ascending bytes."""
    order = np.lexsort((seconds, memory))
    best = np.minimum.accumulate(seconds[order])
    first = np.ones(len(order), np.bool_)
    first[1:] = best[1:] < best[:-1]
    return order[first & np.isfinite(seconds[order])].astype(np.int64)
