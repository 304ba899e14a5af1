"""What to compute again in the backward instead of keeping it: the exact choice for every stage.

A *region* is a unit of the contracted graph. Recomputed, it keeps nothing of a microbatch but the values that enter
it, and its forward runs once more before its backward. So a choice for a stage is a set of its regions, and all that
matters of one is what it costs, what it saves of every microbatch in flight, and the room that its largest region
takes once. For each room there is a row of choices::

    (0 s, 0 B)   (1 ms, 20 MiB)   (2 ms, 40 MiB)   (5 ms, 43 MiB)        more seconds only where more bytes

That row, the Pareto set, is the solution of a knapsack for every limit at once (Nemhauser and Ullmann, 1969). It is
built class by class: equal regions are one class, of which only the number counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpart.compiler.graph import ModelGraph
from dpart.partitioner.search import Mask

Floats = npt.NDArray[np.float64]

_MAX_COMBINATIONS = 256
"""Stages with more combinations of classes take regions in the order of what a saved byte costs: at most one region
more than the best choice would."""


@dataclass(frozen=True)
class Regions:
    """All regions of a graph, at one tensor-parallel degree.

    Attributes:
        member: [R, L]: the layers of each region.
        again_seconds: Its forward, with the collectives inside.
        saved_bytes: Stash it does without, per microbatch in flight; 0 where recomputing saves nothing.
        stash_bytes: Room it needs in its backward.
    """

    member: Mask
    again_seconds: Floats
    saved_bytes: Floats
    stash_bytes: Floats


@dataclass(frozen=True)
class Choices:
    """A row of choices for one stage, ascending in seconds and in bytes; the first entry recomputes nothing.

    Attributes:
        counts: [N, C]: of every class of regions, how many are recomputed.
    """

    again_seconds: Floats
    saved_bytes: Floats
    counts: npt.NDArray[np.int64]


def kept_bytes(graph: ModelGraph, member: Mask) -> Floats:
    """Bytes of the values that enter each set of layers from others; a batch is there anyway."""
    column = {layer.name: i for i, layer in enumerate(graph.layers)}
    kept = np.zeros(len(member))
    for value in graph.values:
        if value.producer is not None and value.consumers:
            reads = member[:, [column[name] for name in value.consumers]].any(axis=1)
            kept[reads & ~member[:, column[value.producer]]] += value.size_bytes
    return kept


class Classes:
    """Regions by what they cost and save, cheapest byte first; what saves nothing is in none."""

    def __init__(self, regions: Regions) -> None:
        useful = np.flatnonzero(regions.saved_bytes > 0)
        keys = [(float(regions.again_seconds[r]), *(float(b[r]) for b in (regions.saved_bytes, regions.stash_bytes)))
                for r in useful]  # fmt: skip
        distinct = sorted(set(keys), key=lambda key: (key[0] / key[1], key))
        self.again_seconds, self.saved_bytes, self.room_bytes = np.array(distinct).reshape(-1, 3).T
        self.members: list[list[int]] = [[] for _ in distinct]
        self.of_region = np.full(len(regions.saved_bytes), -1)
        place = {key: c for c, key in enumerate(distinct)}
        for region, key in zip(useful.tolist(), keys, strict=True):
            self.members[place[key]].append(region)
            self.of_region[region] = place[key]

    def counts(self, inside: Mask) -> npt.NDArray[np.int64]:
        """[..., C] of [..., R]: regions of each class among those of a stage."""
        one_hot = self.of_region[:, None] == np.arange(len(self.members))[None, :]
        counted: npt.NDArray[np.int64] = inside.astype(np.int64) @ one_hot.astype(np.int64)
        return counted


def choices(classes: Classes, counts: Sequence[int]) -> Choices:
    """The Pareto set of a stage with so many regions of each class."""
    if math.prod(count + 1 for count in counts) > _MAX_COMBINATIONS:
        return _by_price(classes, counts)
    seconds, saved = np.zeros(1), np.zeros(1)
    taken = np.zeros((1, len(counts)), dtype=np.int64)
    for c, count in enumerate(counts):
        if not count:
            continue
        times = np.arange(count + 1)
        seconds = (seconds[:, None] + times * classes.again_seconds[c]).ravel()
        saved = (saved[:, None] + times * classes.saved_bytes[c]).ravel()
        taken = np.repeat(taken, count + 1, axis=0)
        taken[:, c] = np.tile(times, len(taken) // (count + 1))
        keep = _pareto(seconds, saved)
        seconds, saved, taken = seconds[keep], saved[keep], taken[keep]
    return Choices(seconds, saved, taken)


def _by_price(classes: Classes, counts: Sequence[int]) -> Choices:
    """One region after the other; classes are in the order of seconds per saved byte."""
    steps = np.repeat(np.arange(len(counts)), counts)
    taken = np.zeros((len(steps) + 1, len(counts)), dtype=np.int64)
    taken[np.arange(1, len(steps) + 1), steps] = 1
    taken = taken.cumsum(axis=0)
    return Choices(taken @ classes.again_seconds, taken @ classes.saved_bytes, taken)


def _pareto(seconds: Floats, saved: Floats) -> npt.NDArray[np.intp]:
    """Indices of those that no other one beats, by seconds, each saving more than all before it."""
    order = np.lexsort((-saved, seconds))
    best = np.maximum.accumulate(saved[order])
    keep = np.ones(len(order), dtype=np.bool_)
    keep[1:] = saved[order][1:] > best[:-1]
    return order[keep]
