"""What a stage is made of: seconds and bytes of every pair of states at once, before any device or link.

A stage is a pair (i, j) of nested sets of layers; its layers are those of j that are not in i. What adds up
over layers is a difference of two numbers. What a stage pays once however many of its layers use it (a shared
parameter, a value on its way through) is a *chain*: the layers that hold it, in stages that pass it on::

    value x:    made in stage 0 ──x──> read in stage 1 ──x──> read in stage 3
                            <──grad──            <──grad──

Stage (i, j) holds a chain where j has more of its holders than i; it receives it where i has some already,
and passes it on where j has not all. "More" is a comparison of every pair for every chain; but i inside j has
no more of them than j, so "more" is "not the same number", and that is a product of matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from dpart.compiler.graph import ModelGraph
from dpart.partitioner.search import Mask, Matrix
from dpart.profiler.profile import LayerCost, Profile, SplitCost


@dataclass(frozen=True)
class Chain:
    """Something that travels along the stages that hold it.

    Attributes:
        holders: Layers, in execution order: a value's producer and consumers, or the users of a parameter.
        forward_bytes: Per microbatch, towards later stages.
        backward_bytes: Per microbatch, towards earlier stages.
        closing_bytes: Once a step, towards later stages.
    """

    holders: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    closing_bytes: int


@dataclass(frozen=True)
class Quantities:
    """Per microbatch and stage, for one rank of its tensor-parallel group; [S, S], garbage where (i, j) is no stage.

    Attributes:
        parameter_bytes: Parameters and buffers, shared ones once.
        trainable_bytes: Those of them that receive a gradient.
        forward_reduces: All-reduces among the ranks of a tensor-parallel group; 0 at degree 1.
        forward_reduce_bytes: Their sizes, added up.
        workspace_bytes: The largest of the stage's layers.
        largest_parameter_bytes: The largest of the stage's layers.
        received_bytes: Activations from earlier stages.
        returned_bytes: Gradients to earlier stages, those of shared parameters included.
        sent_bytes: Activations to later stages.
        accepted_bytes: Gradients from later stages.
    """

    forward_seconds: Matrix
    backward_seconds: Matrix
    weight_backward_seconds: Matrix
    forward_reduces: Matrix
    forward_reduce_bytes: Matrix
    backward_reduces: Matrix
    backward_reduce_bytes: Matrix
    parameter_bytes: Matrix
    trainable_bytes: Matrix
    stash_bytes: Matrix
    workspace_bytes: Matrix
    largest_parameter_bytes: Matrix
    received_bytes: Matrix
    returned_bytes: Matrix
    sent_bytes: Matrix
    accepted_bytes: Matrix

    def consecutive(self) -> "Quantities":
        """Of the stages (0, 1), (1, 2), ... alone; vectors of length S - 1."""
        return Quantities(*(np.diagonal(getattr(self, f.name), offset=1) for f in fields(self)))


def chains(graph: ModelGraph) -> tuple[Chain, ...]:
    """Every value that a layer makes and another reads, and every trainable parameter of several layers.

    Inputs of the model are none: each worker reads them from its own batch.
    """
    values = [
        Chain((v.producer, *v.consumers), v.size_bytes, v.size_bytes if v.differentiable else 0, 0)
        for v in graph.values
        if v.producer is not None and v.consumers
    ]
    users = _users(graph)
    shared = [
        Chain(tuple(users[p.name]), 0, p.size_bytes, p.size_bytes)
        for p in graph.parameters
        if p.trainable and len(users[p.name]) > 1
    ]
    return (*values, *shared)


def degrees(profile: Profile) -> tuple[int, ...]:
    """The tensor-parallel degrees at which every layer's cost is known: 1, and those that all layers have."""
    known = [{split.degree for split in cost.splits} for cost in profile.costs]
    return (1, *sorted(set.intersection(*known))) if known else (1,)


@dataclass(frozen=True)
class LayerCosts:
    """Of all layers, on one rank of a tensor-parallel group; vectors in the order of the graph's layers."""

    forward_seconds: Matrix
    backward_seconds: Matrix
    forward_reduces: Matrix
    forward_reduce_bytes: Matrix
    stash_bytes: Matrix


def layer_costs(profile: Profile, degree: int) -> LayerCosts:
    """The costs of single layers at a degree."""
    costs = [on_rank(cost, degree) for cost in profile.costs]
    return LayerCosts(*(np.array([float(getattr(c, f.name)) for c in costs]) for f in fields(LayerCosts)))


def on_rank(cost: LayerCost, degree: int) -> SplitCost:
    """What a layer costs on one rank of a tensor-parallel group."""
    if degree > 1:
        return next(split for split in cost.splits if split.degree == degree)
    return SplitCost(
        degree=1,
        split="whole",
        forward_seconds=cost.forward_seconds,
        backward_seconds=cost.backward_seconds,
        weight_backward_seconds=cost.weight_backward_seconds,
        parameter_bytes=cost.parameter_bytes,
        trainable_bytes=cost.trainable_bytes,
        stash_bytes=cost.stash_bytes,
        workspace_bytes=cost.workspace_bytes,
        forward_reduces=0,
        forward_reduce_bytes=0,
        backward_reduces=0,
        backward_reduce_bytes=0,
    )


def measure(profile: Profile, member: Mask, degree: int = 1) -> Quantities:
    """The quantities of all pairs of `member`'s rows.

    Args:
        profile: Its layers are the columns of `member`.
        member: [S, L]: whether layer l is in state s.
        degree: Of tensor parallelism, one of those that `degrees` lists; a value that crosses stages is whole.
    """
    graph = profile.graph
    costs = [on_rank(cost, degree) for cost in profile.costs]
    states = member.astype(np.float64)
    column = {layer.name: i for i, layer in enumerate(graph.layers)}

    def added(of_layer: Sequence[float]) -> Matrix:
        total = states @ np.asarray(of_layer, dtype=np.float64)
        # A difference of sums may miss zero by a rounding error; a stage never takes less than nothing.
        difference: Matrix = np.maximum(total[None, :] - total[:, None], 0.0)
        return difference

    users = _users(graph)
    used = [p for p in graph.parameters if users[p.name]]
    held = _Holding(states, column, [tuple(users[p.name]) for p in used])
    # Of a parameter a rank has the part that it has of all parameters of the first layer which reads it.
    whole, of_rank = profile.cost, {c.layer: r for c, r in zip(profile.costs, costs, strict=True)}
    firsts = [users[p.name][0] for p in used]
    part = [of_rank[f].parameter_bytes / whole[f].parameter_bytes if whole[f].parameter_bytes else 1.0 for f in firsts]
    carried = chains(graph)
    travel = _Holding(states, column, [chain.holders for chain in carried])
    forward_bytes = [chain.forward_bytes for chain in carried]
    backward_bytes = [chain.backward_bytes for chain in carried]
    return Quantities(
        forward_seconds=added([c.forward_seconds for c in costs]),
        backward_seconds=added([c.backward_seconds for c in costs]),
        weight_backward_seconds=added([c.weight_backward_seconds for c in costs]),
        forward_reduces=added([c.forward_reduces for c in costs]),
        forward_reduce_bytes=added([c.forward_reduce_bytes for c in costs]),
        backward_reduces=added([c.backward_reduces for c in costs]),
        backward_reduce_bytes=added([c.backward_reduce_bytes for c in costs]),
        parameter_bytes=held.held([p.size_bytes * x for p, x in zip(used, part, strict=True)]),
        trainable_bytes=held.held([p.size_bytes * p.trainable * x for p, x in zip(used, part, strict=True)]),
        stash_bytes=added([c.stash_bytes for c in costs]),
        workspace_bytes=_largest(states, [c.workspace_bytes for c in costs]),
        largest_parameter_bytes=_largest(states, [c.parameter_bytes for c in costs]),
        received_bytes=travel.received(forward_bytes),
        returned_bytes=travel.received(backward_bytes),
        sent_bytes=travel.passed_on(forward_bytes),
        accepted_bytes=travel.passed_on(backward_bytes),
    )


class _Holding:
    """Sums of weights over the things each stage holds, receives or passes on.

    With ``n_i`` the holders of a thing in state i, the weights of things with ``n_i = n_j`` are a product of
    one-hot matrices, one column a thing and count; everything else is a difference from that.
    """

    def __init__(self, states: Matrix, column: dict[str, int], holders: Sequence[tuple[str, ...]]) -> None:
        distinct = {key: n for n, key in enumerate(dict.fromkeys(tuple(sorted(set(h))) for h in holders))}
        self._thing = np.array([distinct[tuple(sorted(set(h)))] for h in holders], dtype=np.intp)
        self._num_things = len(distinct)
        owner, count, last, columns = [], [], [], []
        for names, n in distinct.items():
            inside = states[:, [column[name] for name in names]].sum(axis=1)
            for c in range(len(names) + 1):
                owner.append(n)
                count.append(c)
                last.append(c == len(names))
                columns.append(inside == c)
        self._owner = np.array(owner, dtype=np.intp)
        self._is_none = np.array(count, dtype=np.intp) == 0
        self._is_all = np.array(last, dtype=np.bool_)
        self._one_hot = np.array(columns, dtype=np.float64).reshape(len(columns), len(states)).T

    def held(self, weights: Sequence[float]) -> Matrix:
        """Over things with a holder in the stage."""
        weight = self._per_count(weights)
        total: Matrix = (self._one_hot @ weight)[:, None] - self._same(weight)
        return total

    def received(self, weights: Sequence[float]) -> Matrix:
        """Over things with a holder in the stage and one before it."""
        weight = np.where(self._is_none, 0.0, self._per_count(weights))
        total: Matrix = (self._one_hot @ weight)[:, None] - self._same(weight)
        return total

    def passed_on(self, weights: Sequence[float]) -> Matrix:
        """Over things with a holder in the stage and one behind it."""
        weight = np.where(self._is_all, 0.0, self._per_count(weights))
        total: Matrix = (self._one_hot @ weight)[None, :] - self._same(weight)
        return total

    def _per_count(self, weights: Sequence[float]) -> Matrix:
        of_thing = np.bincount(self._thing, np.asarray(weights, dtype=np.float64), minlength=self._num_things)
        per_count: Matrix = of_thing.astype(np.float64)[self._owner]
        return per_count

    def _same(self, weight: Matrix) -> Matrix:
        same: Matrix = (self._one_hot * weight) @ self._one_hot.T
        return same


def _largest(states: Matrix, of_layer: Sequence[float]) -> Matrix:
    """The largest entry of `of_layer` among the layers of each stage."""
    value = np.asarray(of_layer, dtype=np.float64)
    largest = np.zeros((len(states), len(states)))
    for distinct in np.unique(value):
        inside = states[:, value == distinct].sum(axis=1)
        largest[inside[None, :] > inside[:, None]] = distinct
    return largest


def _users(graph: ModelGraph) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {p.name: [] for p in graph.parameters}
    for layer in graph.layers:
        for name in dict.fromkeys(layer.parameters):
            users[name].append(layer.name)
    return users
