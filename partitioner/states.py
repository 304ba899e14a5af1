"""The states of a layer graph: its ideals, the sets of layers closed under predecessors.

A pipeline cuts the graph at a growing row of ideals, and a stage is the difference of two of them. The
antichain of an ideal's last layers names it, so these are the states of PipeDream's antichain graph::

    a -> b -> d        {} < {a} < {a,b} < {a,b,c} < {a,b,c,d}        6 states, of which
      `> c ->'                  < {a,c} <                            {a,b} and {a,c} are not nested

A chain of n layers has n + 1 states; k parallel chains of n have (n + 1)^k. Past a cap only the prefixes of
one depth-first order are kept: a chain of states that leaves plans out, and says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpart.partitioner.search import Mask

DEFAULT_MAX_STATES = 4000
"""Searchers hold matrices of states by states: 128 MB each at this size."""


@dataclass(frozen=True)
class States:
    """Ideals, smallest first.

    Attributes:
        member: [S, L]: whether layer l is in state s; row 0 is empty, the last row is full.
        nested: [S, S]: whether state i is a proper subset of state j; true only for i < j.
        complete: Whether these are all ideals of the graph.
    """

    member: Mask
    nested: Mask
    complete: bool


def list_states(predecessors: Sequence[Sequence[int]], max_states: int = DEFAULT_MAX_STATES) -> States:
    """All ideals, or past the cap those of one depth-first order.

    Takes time in proportion to states times (width of the graph + layers / 8), and for `nested` a product of
    [S, L] by [L, S] matrices.

    Args:
        predecessors: For each layer those it reads from, all of them earlier in the list.
        max_states: The cap, the empty state included.
    """
    assert all(p < layer for layer, before in enumerate(predecessors) for p in before), "not in topological order"
    masks = _all_ideals(predecessors, max_states)
    if masks is not None:
        member = _unpack(masks, len(predecessors))
        return States(member, _nested(member), complete=True)
    order = depth_first_order(predecessors)
    prefix = np.tri(len(order) + 1, len(order), -1, dtype=np.bool_)
    member = np.empty_like(prefix)
    member[:, order] = prefix
    return States(member, ~np.tri(len(member), dtype=np.bool_), complete=False)


def depth_first_order(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """A topological order that follows each branch to where it must wait, before it turns to the next."""
    followers = _followers(predecessors)
    waiting = [len(set(before)) for before in predecessors]
    stack = [layer for layer in reversed(range(len(predecessors))) if not waiting[layer]]
    order = []
    while stack:
        layer = stack.pop()
        order.append(layer)
        for follower in reversed(followers[layer]):
            waiting[follower] -= 1
            if not waiting[follower]:
                stack.append(follower)
    return order


def _all_ideals(predecessors: Sequence[Sequence[int]], max_states: int) -> list[int] | None:
    """Bit masks by size, each grown from a smaller one by a layer that is ready; None if more than the cap."""
    needs = [sum(1 << p for p in set(before)) for before in predecessors]
    followers = _followers(predecessors)
    ready_of = {0: tuple(layer for layer, need in enumerate(needs) if not need)}
    found = [0]
    while ready_of:
        grown: dict[int, tuple[int, ...]] = {}
        for mask, ready in ready_of.items():
            for layer in ready:
                larger = mask | 1 << layer
                if larger in grown:
                    continue
                if len(found) + len(grown) == max_states:
                    return None
                freed = (f for f in followers[layer] if not needs[f] & ~larger)
                grown[larger] = (*(other for other in ready if other != layer), *freed)
        found.extend(grown)
        ready_of = grown
    return found


def _followers(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in predecessors]
    for layer, before in enumerate(predecessors):
        for p in dict.fromkeys(before):
            followers[p].append(layer)
    return followers


def _unpack(masks: Sequence[int], num_layers: int) -> Mask:
    """[S, L] from one bit mask per state."""
    width = (num_layers + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(masks), width), axis=1, count=num_layers, bitorder="little")
    return bits.astype(np.bool_)


def _nested(member: Mask) -> Mask:
    """i is inside j where they share all of i's layers; float32 counts layers exactly up to 2^24."""
    rows = member.astype(np.float32)
    nested: Mask = rows @ rows.T == rows.sum(axis=1)[:, None]
    np.fill_diagonal(nested, False)
    return nested
