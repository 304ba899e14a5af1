"""Ideals of a graph that branches, and the search over pairs of them that are worth a look.

An ideal is a set of layers closed under predecessors. A contiguous plan is a row of nested ideals, and a device
takes the difference of two neighbours::

    {} ⊂ I1 ⊂ I2 ⊂ ... ⊂ everything        device s takes I_s less I_(s-1)

All pairs of ideals are too many (36,596 ideals of Inception-v3 have hundreds of millions). For a trial bottleneck
T few are needed. Ideals are kept in the order of their worth (`load_bounds`), and from each ideal I that some
devices cover the search looks at those J behind it that pass, cheapest test first:

- *window*: J is worth at most what one device covers more than I. Exact: a load is never less than the work.
- *waste*: what J leaves is worth at most what the unused devices cover. Exact for the same reason, and the test that
  counts: if all devices together can waste little, J lies in a narrow window for each number of devices.
- *improvement*: J is not yet covered by as few devices. Exact: nothing but the number of devices matters later.
- *key*: the work and all that crosses behind J, less all that crosses behind I, is at most T. Exact: only transfers
  that cross behind I can be paid for less than once by J less I where they cross behind J.
- *inclusion*, *memory* and the *load* itself, by the count of each net's layers in J.

An ideal I that is covered is passed over if I and one layer v more is covered by as few devices, for a v that is
*light*: the transfers that can cross because v is taken out of a device cost no more than the work of v. Exact: in
any plan that goes on from I, take v out of the device that has it; all other loads stay, and that one does not rise.
Without transfers all layers are light. A larger ideal as such proves nothing: loads are not monotone.
"""

import itertools
import time
from collections.abc import Container, Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dpart.partitioner.load_bounds import Worth
from dpart.partitioner.loads import Indices, LoadProblem, Mask, SharedPlan, Vector, share
from dpart.partitioner.trials import NO_PLAN, Columns, OutOfTimeError

Counts = npt.NDArray[np.int16]
Number = TypeVar("Number", np.int64, np.uint64, np.float64)

_MAX_BYTES = 400e6
"""Of the tables of ideals: nets and layers by ideals."""

_IDEALS_PER_CLOCK = 64

_STALE_ORDERS = 16


def count_limit(problem: LoadProblem, max_ideals: int) -> int:
    """The cap on ideals, lowered such that the tables stay within memory."""
    per_ideal = 2 * len(problem.nets.cost) + problem.num_layers + 2 * len(Columns.of(problem).used) + 64
    return max(2, min(max_ideals, int(_MAX_BYTES / per_ideal)))


def all_ideals(predecessors: Sequence[Sequence[int]], max_ideals: int) -> list[int] | None:
    """Bit masks by size, each grown from a smaller one by a layer that is ready; None above the cap."""
    needs = [sum(1 << p for p in set(before)) for before in predecessors]
    followers: list[list[int]] = [[] for _ in predecessors]
    for layer, before in enumerate(predecessors):
        for p in dict.fromkeys(before):
            followers[p].append(layer)
    ready_of = {0: tuple(layer for layer, need in enumerate(needs) if not need)}
    found = [0]
    while ready_of:
        grown: dict[int, tuple[int, ...]] = {}
        for mask, ready in ready_of.items():
            for layer in ready:
                larger = mask | 1 << layer
                if larger not in grown:
                    freed = (f for f in followers[layer] if not needs[f] & ~larger)
                    grown[larger] = (*(other for other in ready if other != layer), *freed)
            if len(found) + len(grown) > max_ideals:
                return None
        found.extend(grown)
        ready_of = grown
    return found


def prefixes(orders: Iterable[Sequence[int]], max_ideals: int) -> list[int]:
    """The ideals on some orders, until the cap is reached or several orders in a row have none that is new."""
    found: dict[int, None] = {}
    stale = 0
    for order in orders:
        before = len(found)
        mask = 0
        found[mask] = None
        for layer in order:
            mask |= 1 << layer
            found[mask] = None
        stale = stale + 1 if len(found) == before else 0
        if len(found) + len(order) >= max_ideals or stale == _STALE_ORDERS:
            break
    return list(found)


class IdealSearch:
    """Trials over a set of ideals, the empty one and everything among them."""

    def __init__(self, problem: LoadProblem, worth: Worth, masks: Sequence[int]) -> None:
        """Tables of all ideals.

        Args:
            problem: In topological order.
            worth: Of its layers.
            masks: Ideals as bit masks, each once.
        """
        self._problem = problem
        self._columns = Columns.of(problem)
        self._per_load = worth.per_load
        bits, member = _tables(masks, problem.num_layers)
        worths = _total(member, worth.layers)
        order = np.lexsort((member.sum(axis=0), worths))
        self._worth = worths[order]
        self._bits = np.ascontiguousarray(bits[:, order])
        member = np.ascontiguousarray(member[:, order])
        nets = problem.nets
        self._ends = _count_ends(problem, member)
        self._crossing_cost = np.zeros(len(masks))
        open_nets, open_ideals = [], []
        for net, (ends, full) in enumerate(zip(self._ends, nets.size, strict=True)):
            crossing = (ends > 0) & (ends < full)
            self._crossing_cost += nets.cost[net] * crossing
            open_ideals.append(np.flatnonzero(crossing))
            open_nets.append(np.full(len(open_ideals[-1]), net))
        self._open = _rows(open_ideals, open_nets, len(masks))
        self._larger = self._with_a_light_layer(member)
        self._memory = _total(member, problem.memory_bytes)
        self._work = [_total(member, np.where(np.isfinite(k.work), k.work, 0.0)) for k in problem.classes]
        self._barred = [_total(member, np.isinf(k.work).astype(np.int64)) for k in problem.classes]

    def _with_a_light_layer(self, member: Mask) -> list[list[int]]:
        """For each ideal those that have one light layer more."""
        keys = np.random.default_rng(0).integers(1, 2**62, len(member), np.uint64)
        hashes = _total(member, keys)
        order = np.argsort(hashes)
        sorted_hashes = hashes[order]
        smaller, larger = [], []
        for layer in np.flatnonzero(_light(self._problem)):
            ready = ~member[layer]
            for before in self._problem.predecessors[layer]:
                ready &= member[before]
            ideals = np.flatnonzero(ready)
            wanted = hashes[ideals] + keys[layer]
            place = np.searchsorted(sorted_hashes, wanted).clip(0, len(order) - 1)
            known = sorted_hashes[place] == wanted
            smaller.append(ideals[known])
            larger.append(order[place[known]])
        return _rows(smaller, larger, member.shape[1])

    def trial(self, threshold: float, deadline: float = np.inf) -> SharedPlan | None:
        """A contiguous plan over these ideals with loads of at most the threshold, None if there is none.

        Raises:
            OutOfTimeError: The deadline (of `time.perf_counter`) passed.
        """
        columns, size = self._columns, len(self._worth)
        fewest = np.full((len(columns.used), size), NO_PLAN, np.int16)
        fewest[0, 0] = 0
        behind = {kind: self._behind(kind, threshold) for kind in columns.steps}
        least = self._least(threshold)
        for start in range(size - 1):
            here = fewest[:, start]
            if here.min() == NO_PLAN:
                continue
            if not start % _IDEALS_PER_CLOCK and time.perf_counter() > deadline:
                raise OutOfTimeError
            larger = self._larger[start]
            alive = [
                c for c, used in enumerate(here.tolist()) if used < NO_PLAN and not (fewest[c, larger] <= used).any()
            ]
            if alive:
                for kind in columns.steps:
                    self._extend(start, int(behind[kind][start]), kind, threshold, alive, fewest, least)
                if fewest[:, -1].min() < NO_PLAN:
                    break
        column = int(fewest[:, -1].argmin())
        if fewest[column, -1] == NO_PLAN:
            return None
        return self._read_back(fewest, column, threshold)

    def _behind(self, kind: int, threshold: float) -> Indices:
        """For each ideal the first one that is worth more than a device of the class covers behind it."""
        reach = self._worth + (self._per_load[kind] * threshold + 1)
        behind: Indices = np.searchsorted(self._worth, reach, "right")
        return behind

    def _least(self, threshold: float) -> list[list[int]]:
        """By column and number used of the lead: the first ideal that leaves no more than the unused devices cover."""
        columns = self._columns
        covered = threshold * self._per_load * (1 + 1e-12)
        counts = [min(kind.count, self._problem.num_layers) for kind in self._problem.classes]
        least = []
        for used in columns.used:
            unused = [count - u for count, u in zip(counts, used, strict=True)]
            rest = np.dot(unused, covered) - covered[columns.lead] * np.arange(columns.lead_count + 1)
            least.append(np.searchsorted(self._worth, self._worth[-1] - rest - 1, "left").tolist())
        return least

    def _extend(
        self,
        start: int,
        stop: int,
        kind: int,
        threshold: float,
        alive: Container[int],
        fewest: Counts,
        least: list[list[int]],
    ) -> None:
        """One more device of a class behind an ideal, in some columns."""
        more = int(kind == self._columns.lead)
        targets = []
        for before, after in self._columns.steps[kind]:
            used = int(fewest[before, start]) + more
            if before not in alive or used > self._columns.lead_count:
                continue
            low = max(start + 1, least[after][used])
            if low < stop:
                improved = np.flatnonzero(fewest[after, low:stop] > used)
                if len(improved):
                    targets.append((after, used, improved + low))
        if not targets:
            return
        ends = targets[0][2] if len(targets) == 1 else np.unique(np.concatenate([ends for *_, ends in targets]))
        ends = self._fitting(start, ends, kind, threshold)
        if len(ends):
            for after, used, _ in targets:
                row = fewest[after]
                row[ends] = np.minimum(row[ends], used)

    def _fitting(self, start: int, ends: Indices, kind: int, threshold: float) -> Indices:
        """Those of the ideals that make a load of at most the threshold with what they have more than `start`."""
        device = self._problem.classes[kind]
        scale = device.transfer_scale
        work = self._work[kind]
        load = work[ends] - work[start]
        if scale:
            load += scale * self._crossing_cost[ends]
            ends, load = _keep(load <= threshold + scale * self._crossing_cost[start], ends, load)
        else:
            ends, load = _keep(load <= threshold, ends, load)
        for word, bits in enumerate(self._bits[:, start]):
            if bits and len(ends):
                ends, load = _keep((self._bits[word, ends] & bits) == bits, ends, load)
        if device.memory_bytes < np.inf:
            ends, load = _keep(self._memory[ends] - self._memory[start] <= device.memory_bytes, ends, load)
        barred = self._barred[kind]
        if barred[-1]:
            ends, load = _keep(barred[ends] == barred[start], ends, load)
        if scale and len(ends):
            nets = self._problem.nets
            for net in self._open[start]:
                counts = self._ends[net][ends]
                cost = scale * nets.cost[net]
                # Paid where its layers are in the difference: not if none of them is, and not counted in the
                # crossing of the larger ideal if that has them all.
                load -= cost * (counts == self._ends[net][start])
                load += cost * (counts == nets.size[net])
            ends = ends[load <= threshold]
        return ends

    def _read_back(self, fewest: Counts, column: int, threshold: float) -> SharedPlan:
        shares = []
        stop = len(self._worth) - 1
        while stop:
            start, kind, column = self._before(fewest, stop, column, threshold)
            difference = self._bits[:, stop] & ~self._bits[:, start]
            layers = np.flatnonzero(np.unpackbits(difference.view(np.uint8), bitorder="little"))
            shares.append(share(self._problem, layers.tolist(), kind))
            stop = start
        return SharedPlan(tuple(reversed(shares)))

    def _before(self, fewest: Counts, stop: int, column: int, threshold: float) -> tuple[int, int, int]:
        """(ideal, class, column): what comes before the last device of the fewest that cover an ideal."""
        for kind, steps in self._columns.steps.items():
            more = int(kind == self._columns.lead)
            for before, after in steps:
                if after == column:
                    for start in np.flatnonzero(fewest[before, :stop] == fewest[after, stop] - more):
                        if len(self._fitting(int(start), np.array([stop]), kind, threshold)):
                            return int(start), kind, before
        raise AssertionError("an ideal is covered and no device covers it")


def _keep(chosen: Mask, ends: Indices, load: Vector) -> tuple[Indices, Vector]:
    return ends[chosen], load[chosen]


def _tables(masks: Sequence[int], num_layers: int) -> tuple[npt.NDArray[np.uint64], Mask]:
    """[words, N] of 64 layers each, and [L, N]."""
    words = max(1, (num_layers + 63) // 64)
    packed = np.frombuffer(b"".join(mask.to_bytes(8 * words, "little") for mask in masks), np.uint8)
    packed = packed.reshape(len(masks), 8 * words)
    member = np.unpackbits(packed, axis=1, count=num_layers, bitorder="little")
    return packed.view("<u8").T, np.ascontiguousarray(member.T).view(np.bool_)


def _total(member: Mask, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """[N]: sum of the values of each ideal's layers."""
    total = np.zeros(member.shape[1], values.dtype)
    for row, value in zip(member, values, strict=True):
        if value:
            total += row * value
    return total


def _light(problem: LoadProblem) -> Mask:
    """[L]: layers whose work on any class is at least the cost of the transfers that they can be the first layer of."""
    ancestors = [0] * problem.num_layers
    for layer, before in enumerate(problem.predecessors):
        for p in before:
            ancestors[layer] |= ancestors[p] | 1 << p
    first = np.zeros(problem.num_layers)
    for layers, cost in zip(problem.nets.layers, problem.nets.cost, strict=True):
        ends = sum(1 << layer for layer in layers)
        for layer in layers:
            if not ancestors[layer] & ends:
                first[layer] += cost
    light = np.ones(problem.num_layers, np.bool_)
    for kind in problem.classes:
        if kind.count:
            light &= kind.transfer_scale * first <= kind.work
    return light


def _count_ends(problem: LoadProblem, member: Mask) -> list[npt.NDArray[np.uint16]]:
    """For each net [N]: how many of its layers each ideal has."""
    ends = []
    for layers in problem.nets.layers:
        count = np.zeros(member.shape[1], np.uint16)
        for layer in layers:
            count += member[layer]
        ends.append(count)
    return ends


def _rows(rows: list[Indices], values: list[Indices], size: int) -> list[list[int]]:
    """For each of `size` rows its values, from parallel lists of both."""
    row, value = (np.concatenate([np.empty(0, np.intp), *parts]) for parts in (rows, values))
    order = np.argsort(row, kind="stable")
    starts = np.searchsorted(row[order], np.arange(size + 1)).tolist()
    ordered = value[order].tolist()
    return [ordered[start:stop] for start, stop in itertools.pairwise(starts)]
