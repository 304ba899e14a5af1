"""Equal layers cost the same: measured noise is averaged out before a plan is searched.

A model repeats its blocks, and a profile measures each of them. Layers of one kind that read and make values of the
same shapes, with parameters of the same shapes, do the same work. Where their times differ by no more than the
spread over the repeats explains, they are averaged: the blocks of a model are then exactly equal, a stage of the
k-th to the n-th block costs what any n - k + 1 blocks cost, and a search has to look at each such *signature* once.
"""

from collections import defaultdict
from dataclasses import replace
from statistics import fmean, median

from dpart.compiler.graph import Layer, ModelGraph
from dpart.profiler.profile import LayerCost, Profile, SplitCost

_SPREADS = 4.0
"""Layers further apart than so many times their median spread do differ."""

_TIMES = ("forward_seconds", "backward_seconds", "weight_backward_seconds")


def fold(profile: Profile) -> Profile:
    """The profile with the times of equal layers averaged, at every degree at which all of them are known."""
    classes: dict[object, list[int]] = defaultdict(list)
    for i, (layer, cost) in enumerate(zip(profile.graph.layers, profile.costs, strict=True)):
        classes[_signature(profile.graph, layer, cost)].append(i)
    costs = list(profile.costs)
    for members in classes.values():
        if len(members) > 1 and _is_noise([profile.costs[i] for i in members]):
            for i, cost in zip(members, _averaged([profile.costs[i] for i in members]), strict=True):
                costs[i] = cost
    return replace(profile, costs=tuple(costs))


def _is_noise(costs: list[LayerCost]) -> bool:
    """Whether the times differ by no more than the spread explains."""
    for name in ("forward", "backward"):
        seconds = [getattr(cost, f"{name}_seconds") for cost in costs]
        spread = median(getattr(cost, f"{name}_spread_seconds") for cost in costs)
        if max(seconds) - min(seconds) > _SPREADS * spread:
            return False
    return True


def _signature(graph: ModelGraph, layer: Layer, cost: LayerCost) -> object:
    """What two layers must share to do the same work."""
    values = tuple(
        tuple((graph.value[name].shape, graph.value[name].dtype, graph.value[name].differentiable) for name in names)
        for names in (layer.inputs, layer.outputs)
    )
    parameters = tuple(
        (graph.parameter[name].shape, graph.parameter[name].dtype, graph.parameter[name].trainable)
        for name in layer.parameters
    )
    sizes = (cost.parameter_bytes, cost.output_bytes, cost.stash_bytes, cost.workspace_bytes)
    splits = tuple((s.degree, s.split, s.parameter_bytes, s.stash_bytes, s.workspace_bytes) for s in cost.splits)
    return layer.kind, values, parameters, sizes, splits


def _averaged(costs: list[LayerCost]) -> list[LayerCost]:
    forward, backward, weight = (_mean([getattr(cost, name) for cost in costs]) for name in _TIMES)
    splits = [_averaged_splits([cost.splits[k] for cost in costs]) for k in range(len(costs[0].splits))]
    return [
        replace(
            cost,
            forward_seconds=forward,
            backward_seconds=backward,
            weight_backward_seconds=weight,
            splits=tuple(of_degree[i] for of_degree in splits),
        )
        for i, cost in enumerate(costs)
    ]


def _averaged_splits(splits: list[SplitCost]) -> list[SplitCost]:
    forward, backward, weight = (_mean([getattr(split, name) for split in splits]) for name in _TIMES)
    return [
        replace(split, forward_seconds=forward, backward_seconds=backward, weight_backward_seconds=weight)
        for split in splits
    ]


def _mean(values: list[float]) -> float:
    """Of equal values that value, to the last digit."""
    return values[0] if min(values) == max(values) else fmean(values)
