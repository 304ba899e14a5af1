"""Piper's recompute rule: which layers of a stage recompute, for every number of microbatches in flight at once.

The rule is greedy: the faster variant of each layer where that fits, else the slower variants that cost the
fewest seconds for the bytes they save, one after another until it fits. So a stage gets slower by steps::

    seconds            ________          a step: so many layers recompute, and so many
      |       ________|                  microbatches in flight fit with that
      |______|
      +---------------------------> in flight

The order in which layers are taken depends on what is in flight, but changes at few places: between two of them
a running sum over the layers in that order gives the steps of all stages.

The best choice is a knapsack. Layers that save equal bytes differ in seconds only, so of each kind the cheapest are
taken, and with few kinds all numbers of each can be tried.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from peers_piper_graph import Integers, Mask, Variants, Vector

ENTRIES_AT_A_TIME = 1 << 17

MAX_CHOICES = 4096
"""Numbers of layers of every kind, tried for each stage."""


@dataclass(frozen=True)
class Stages:
    """Pairs of ideals.

    Attributes:
        member: [S, L]: layers of each ideal.
        start: [P]: index of the ideal before the stage.
        stop: [P]: index of the ideal with it.
        room: [P]: devices that a stage may have.
        most: [P]: microbatches in flight that are met, or more.
    """

    member: Mask
    start: Integers
    stop: Integers
    room: Integers
    most: Integers

    def take(self, chosen: Integers) -> "Stages":
        """Some of them."""
        return Stages(self.member, *(column[chosen] for column in (self.start, self.stop, self.room, self.most)))

    def total(self, per_layer: Vector) -> Vector:
        """[P]: sums over the layers of each stage."""
        totals = self.member @ per_layer
        return np.asarray(totals[self.stop] - totals[self.start], np.float64)

    def layers(self, chosen: Integers) -> Mask:
        """[p, L]: the layers of some of them."""
        return self.member[self.stop[chosen]] & ~self.member[self.start[chosen]]


@dataclass(frozen=True)
class Steps:
    """How stages get slower with what they have in flight, all at one degree.

    Attributes:
        row: The stage, ascending.
        in_flight: The most microbatches that fit, ascending in a row.
        extra_seconds: Of one microbatch, ascending in a row.
    """

    row: Integers
    in_flight: Integers
    extra_seconds: Vector


def recompute_steps(variants: Variants, place: Integers, stages: Stages, memory_bytes: float) -> Steps:
    """The steps of all stages up to `stages.most` in flight; stages that never fit have none.

    Where the rule is faster for more in flight (it may be: it takes nothing back), less in flight takes that too.
    """
    stash, static = stages.total(variants.stash_bytes), stages.total(variants.static_bytes)
    present = stages.total((~variants.present).astype(np.float64)) == 0
    fast = _most_in_flight(stash, static, memory_bytes, stages.most)
    rows = [np.flatnonzero(present & (fast > 0))]
    in_flight, extra = [fast[rows[0]]], [np.zeros(len(rows[0]))]
    full = np.flatnonzero(present & (fast < stages.most))
    for least, upto, order in _orders(variants, place, int(stages.most[full].max(initial=1))):
        saved = np.maximum(0, variants.saved_stash_bytes * least + variants.saved_static_bytes)
        fits = stash * least + static - stages.total(saved) <= memory_bytes
        hard = full[(fits & (fast < upto))[full]]
        size = max(1, ENTRIES_AT_A_TIME // (len(order) + 1))
        for begin in range(0, len(hard), size):
            some = hard[begin : begin + size]
            most = np.minimum(stages.most[some], upto)
            row, fit, seconds = _greedy(
                variants, order, stages.layers(some)[:, order], (stash[some], static[some]), memory_bytes, (least, most)
            )
            rows.append(some[row])
            in_flight.append(fit)
            extra.append(seconds)
    return _ascending(np.concatenate(rows), np.concatenate(in_flight), np.concatenate(extra))


def _greedy(
    variants: Variants,
    order: Integers,
    inside: Mask,
    memory: tuple[Vector, Vector],
    memory_bytes: float,
    range_: tuple[int, Integers],
) -> tuple[Integers, Integers, Vector]:
    """Steps that begin within a range of microbatches in flight, taking layers in one order.

    Args:
        variants: Of all layers.
        order: The layers that save memory.
        inside: [p, ...]: which of them each stage has.
        memory: [p] each: stash per microbatch and static bytes without recomputing.
        memory_bytes: Of a device.
        range_: Its first, and per stage its last.

    Returns:
        Row of `inside`, most in flight and extra seconds of each step.
    """
    stash, static, seconds = (
        np.cumsum(np.concatenate([base[:, None], inside * part[order]], axis=1), axis=1)
        for base, part in (
            (memory[0], -variants.saved_stash_bytes),
            (memory[1], -variants.saved_static_bytes),
            (np.zeros(len(inside)), variants.extra_seconds),
        )
    )
    least, most = range_
    fit = _most_in_flight(stash, static, memory_bytes, most[:, None])
    new = fit >= least
    new[:, 1:] &= fit[:, 1:] > np.maximum.accumulate(fit, axis=1)[:, :-1]
    return np.nonzero(new)[0], fit[new], seconds[new]


def exact_steps(variants: Variants, stages: Stages, memory_bytes: float) -> Steps | None:
    """The steps of all stages with the best choice for each; None if that would take too long."""
    kinds = _kinds(variants, np.arange(len(variants.seconds)))
    if math.prod(len(kind) + 1 for kind in kinds) > MAX_CHOICES:
        return None
    choices = list(_choices(kinds))
    numbers = np.array(choices, np.int64).reshape(len(choices), len(kinds))
    firsts = np.array([kind[0] for kind in kinds], np.int64)
    saved_stash = numbers @ variants.saved_stash_bytes[firsts]
    saved_static = numbers @ variants.saved_static_bytes[firsts]
    stash, static = stages.total(variants.stash_bytes), stages.total(variants.static_bytes)
    present = np.flatnonzero(stages.total((~variants.present).astype(np.float64)) == 0)
    rows, in_flight, extra = [], [], []
    size = max(1, ENTRIES_AT_A_TIME // len(numbers))
    for begin in range(0, max(1, len(present)), size):
        some = present[begin : begin + size]
        inside = stages.layers(some)
        seconds = np.zeros((len(some), len(numbers)))
        for column, kind in enumerate(kinds):
            cost = np.sort(np.where(inside[:, kind], variants.extra_seconds[kind], np.inf), axis=1)
            seconds += np.cumsum(np.pad(cost, ((0, 0), (1, 0))), axis=1)[:, numbers[:, column]]
        fit = _most_in_flight(
            stash[some, None] - saved_stash, static[some, None] - saved_static, memory_bytes, stages.most[some, None]
        )
        new = np.isfinite(seconds) & (fit > 0)
        rows.append(some[np.nonzero(new)[0]])
        in_flight.append(fit[new])
        extra.append(seconds[new])
    return _ascending(np.concatenate(rows), np.concatenate(in_flight), np.concatenate(extra))


def exactly_recomputing(variants: Variants, layers: Integers, memory_bytes: float, in_flight: int) -> Integers:
    """Those of a stage's layers that recompute, with the best choice."""
    kinds = _kinds(variants, layers)
    memory = variants.stash_bytes * in_flight + variants.static_bytes
    save = variants.saved_stash_bytes * in_flight + variants.saved_static_bytes
    choices = []
    for numbers in _choices(kinds):
        taken = [layer for kind, number in zip(kinds, numbers, strict=True) for layer in kind[:number]]
        if memory[layers].sum() - save[taken].sum() <= memory_bytes:
            choices.append((float(variants.extra_seconds[taken].sum()), taken))
    assert choices, "the stage does not fit"
    return np.array(min(choices)[1], np.int64)


def _kinds(variants: Variants, layers: Integers) -> list[Integers]:
    """Layers that can save memory, by the bytes they save, in each the cheapest first."""
    saves = (variants.saved_stash_bytes[layers] > 0) | (variants.saved_static_bytes[layers] > 0)
    layers = layers[saves]
    layers = layers[np.argsort(variants.extra_seconds[layers], kind="stable")]
    bytes_ = np.stack([variants.saved_stash_bytes[layers], variants.saved_static_bytes[layers]], axis=1)
    kind = np.unique(bytes_, axis=0, return_inverse=True)[1].reshape(-1)
    return [layers[kind == k] for k in range(int(kind.max(initial=-1)) + 1)]


def _choices(kinds: list[Integers]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(kind) + 1) for kind in kinds))


def recomputing(variants: Variants, place: Integers, layers: Integers, memory_bytes: float, in_flight: int) -> Integers:
    """Those of a stage's layers that recompute."""
    need = (variants.stash_bytes * in_flight + variants.static_bytes)[layers]
    save = (variants.saved_stash_bytes * in_flight + variants.saved_static_bytes)[layers]
    savers = np.flatnonzero(save > 0)
    order = savers[np.lexsort((place[layers][savers], variants.extra_seconds[layers][savers] / save[savers]))]
    count = int(np.sum(need.sum() - np.concatenate([[0.0], np.cumsum(save[order])]) > memory_bytes))
    assert count <= len(order), "the stage does not fit"
    return layers[order[:count]]


def _orders(variants: Variants, place: Integers, most: int) -> Iterator[tuple[int, int, Integers]]:
    """Ranges of microbatches in flight (both ends included), and the layers that save memory, best first."""
    by_place = np.argsort(place)
    counts = np.arange(1, most + 1)[:, None]
    save = variants.saved_stash_bytes[by_place] * counts + variants.saved_static_bytes[by_place]
    ratio = np.where(save > 0, variants.extra_seconds[by_place] / np.where(save > 0, save, 1), np.inf)
    order = by_place[np.argsort(ratio, axis=1, kind="stable")]
    savers = (save > 0).sum(axis=1)
    order = np.where(np.arange(order.shape[1]) < savers[:, None], order, -1)
    begins = [0, *(np.flatnonzero((order[1:] != order[:-1]).any(axis=1)) + 1).tolist()]
    for begin, end in zip(begins, [*begins[1:], most], strict=True):
        yield begin + 1, end, order[begin, : savers[begin]]


def _most_in_flight(stash: Vector, static: Vector, memory_bytes: float, most: Integers) -> Integers:
    """How many fit, up to `most`, to the byte in spite of rounding."""
    room = np.where(stash > 0, (memory_bytes - static) / np.where(stash > 0, stash, 1), np.inf)
    fit = np.clip(np.floor(np.where(static > memory_bytes, 0, room)), 0, most).astype(np.int64)
    fit += (fit < most) & (stash * (fit + 1) + static <= memory_bytes)
    fit -= (fit > 0) & (stash * fit + static > memory_bytes)
    return fit


def _ascending(row: Integers, in_flight: Integers, extra: Vector) -> Steps:
    """Sorted, without steps that take no less than one with more in flight."""
    order = np.lexsort((-extra, in_flight, row))
    row, in_flight, extra = row[order], in_flight[order], extra[order]
    while True:
        needed = np.ones(len(row), np.bool_)
        needed[:-1] = (row[:-1] != row[1:]) | (extra[:-1] < extra[1:])
        if needed.all():
            return Steps(row, in_flight, extra)
        row, in_flight, extra = row[needed], in_flight[needed], extra[needed]
