"""Units: layers that no plan separates, so that the search is over fewer cuts than there are layers.

Where a graph has few ideals every layer is its own unit, and all ideals are searched. Where it has more than a
search can afford, layers are taken in one depth-first order and cut only at the places where least has to cross::

    layers       ln  attn  add | ln  mlp  add | ln  attn  add |        crossing a residual block: two tensors,
    crossing        2     2    1    2    2    1    2     2    1        between blocks: one

What is left out is said: the plan's proof is over the cuts that were looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpart.compiler.graph import ModelGraph
from dpart.partitioner.quantities import chains
from dpart.partitioner.search import Mask
from dpart.partitioner.states import depth_first_order, list_states
from dpart.profiler.profile import Profile

DEFAULT_MAX_STATES = 300
"""All pairs of them are priced at every tensor-parallel degree."""


@dataclass(frozen=True)
class Contraction:
    """The places where a plan may cut.

    Attributes:
        member: [S, L]: whether layer l is in state s; row 0 is empty, the last row is full.
        units: [U, L]: the layers of each unit, in an order in which they can run.
        num_places: Cuts that were allowed: all ideals but the empty and the full one, or where those are too many
            the places of the one order that was searched.
        complete: Whether every allowed ideal of the graph is a state.
        one_order: Whether only the cuts of one order of the layers were considered.
    """

    member: Mask
    units: Mask
    num_places: int
    complete: bool
    one_order: bool

    @property
    def num_cuts(self) -> int:
        """Cuts that the search considers."""
        return len(self.member) - 2


def contract(
    profile: Profile, *, max_states: int = DEFAULT_MAX_STATES, together: Sequence[Sequence[str]] = ()
) -> Contraction:
    """The states to search.

    Args:
        max_states: Cuts beyond so many are thinned out.
        together: Sets of layers that no cut may separate.
    """
    graph = profile.graph
    index = {layer.name: i for i, layer in enumerate(graph.layers)}
    before = [sorted(index[p] for p in graph.digraph.predecessors(layer.name)) for layer in graph.layers]
    wanted = [[index[name] for name in names] for names in together]
    states = list_states(before, 16 * max_states)
    ideals = _keeping(states.member, wanted)
    if states.complete and len(ideals) <= max_states:
        order = np.argsort(ideals.sum(axis=0), kind="stable")[::-1]
        return Contraction(ideals, _units_of(ideals, order), len(ideals) - 2, True, False)
    order = np.array(depth_first_order(before))
    prefixes = np.zeros((len(order) + 1, len(order)), dtype=np.bool_)
    prefixes[:, order] = np.tri(len(order) + 1, len(order), -1, dtype=np.bool_)
    is_chain = states.complete and len(states.member) == len(prefixes)
    places = _keeping(prefixes, wanted)
    chosen = places if len(places) <= max_states else places[_thinned(profile, graph, places, max_states)]
    units = chosen[1:] & ~chosen[:-1]
    return Contraction(chosen, units, len(places) - 2, is_chain and len(chosen) == len(places), not is_chain)


def _keeping(member: Mask, together: Sequence[Sequence[int]]) -> Mask:
    """The states that have all or none of each set."""
    keep = np.ones(len(member), dtype=np.bool_)
    for layers in together:
        inside = member[:, list(layers)].sum(axis=1)
        keep &= (inside == 0) | (inside == len(layers))
    return member[keep]


def _units_of(ideals: Mask, order: np.ndarray) -> Mask:
    """Layers that stand in exactly the same states, grouped; `order` is one in which layers can run."""
    groups: dict[bytes, list[int]] = {}
    for layer in order:
        groups.setdefault(ideals[:, layer].tobytes(), []).append(int(layer))
    units = np.zeros((len(groups), ideals.shape[1]), dtype=np.bool_)
    for unit, layers in zip(units, groups.values(), strict=True):
        unit[layers] = True
    return units


def _thinned(profile: Profile, graph: ModelGraph, places: Mask, max_states: int) -> np.ndarray:
    """Indices of at most so many places: first by least crossing bytes, then evenly spaced in time."""
    crossing = _crossing_bytes(graph, places)
    inner = np.arange(1, len(places) - 1)
    low = (crossing[inner] <= crossing[inner - 1]) & (crossing[inner] <= crossing[inner + 1])
    kept = [0, *inner[low].tolist(), len(places) - 1]
    if len(kept) > max_states:
        seconds = places[kept] @ np.array([c.forward_seconds + c.backward_seconds for c in profile.costs])
        wanted = np.linspace(0.0, seconds[-1], max_states)[1:-1]
        nearest = np.abs(seconds[:, None] - wanted[None, :]).argmin(axis=0)
        kept = sorted({0, len(places) - 1} | {kept[i] for i in nearest.tolist()})
    return np.array(kept)


def _crossing_bytes(graph: ModelGraph, places: Mask) -> np.ndarray:
    """Bytes that cross each place in both directions; the two ends count as nothing."""
    column = {layer.name: i for i, layer in enumerate(graph.layers)}
    crossing = np.zeros(len(places))
    for chain in chains(graph):
        inside = places[:, [column[name] for name in set(chain.holders)]]
        crosses = inside.any(axis=1) & ~inside.all(axis=1)
        crossing[crosses] += chain.forward_bytes + chain.backward_bytes
    return crossing
