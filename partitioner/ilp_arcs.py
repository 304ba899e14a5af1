"""`Arcs`: options in front of nodes; the plans that a programme over options chooses from, as paths.

A node is a state and the replicas behind it, so that an arc knows how many microbatches its stage has in flight. In
front of states before which memory never binds the replicas are not told apart. Replicas, devices and seconds of what
is before and behind a node bound every path through an arc, and most arcs are on no path that can matter::

    node        (0, 6)            (3, 4)         (7, 3)           (last, 0)
    arc           |----- d = 2 ----->|--- d = 1 --->|----- d = 3 ---->|
                    before the arc     the arc        behind the arc
                    busy of the arc + least latency of all three  <=  a plan at hand
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpart.partitioner.options import Floats, Integers
from dpart.partitioner.pareto import Column
from dpart.partitioner.sorted_options import SortedOptions

Mask = npt.NDArray[np.bool_]

_FEW = 500
"""Arcs that are no trouble."""

_INTERVALS = 12
_PRICES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2)
"""Of a device, in shares of the limit for all devices."""


@dataclass(frozen=True)
class Arcs:
    """Sorted by the state they start from; an arc's nodes are ``state * span + replicas behind``.

    Attributes:
        options: What the arcs are made from.
        option: [A]: of each arc, a row of `options`.
        tail: [A]: the node that holds the arc's stage, too.
        head: [A]: the node behind the stage.
        span: More than any plan has replicas.
    """

    options: SortedOptions
    option: Integers
    tail: Integers
    head: Integers
    span: int

    def __len__(self) -> int:
        """How many there are."""
        return len(self.option)

    def of(self, column: Column) -> Column:
        """A column of the options, by arc."""
        taken: Column = column[self.option]
        return taken

    def only(self, chosen: Mask) -> "Arcs":
        """Those of them, in the same order."""
        if chosen.all():
            return self
        return replace(self, option=self.option[chosen], tail=self.tail[chosen], head=self.head[chosen])

    def _by_state(self) -> list[slice]:
        """The arcs of each state that has any."""
        states = np.arange(self.options.num_states + 1)
        firsts = np.searchsorted(self.of(self.options.start), states).tolist()
        return [slice(begin, end) for begin, end in itertools.pairwise(firsts) if begin < end]

    @property
    def behind(self) -> Integers:
        """[A]: replicas behind each arc's stage, where they are told apart."""
        return self.head % self.span

    def before(self, weight: Column) -> Floats:
        """[N]: the least sum of weights of arcs from state 0 to each node; infinite where there are none."""
        least = self._nowhere()
        least[: self.span] = 0.0
        for own in self._by_state():
            np.minimum.at(least, self.head[own], least[self.tail[own]] + weight[own])
        return least

    def after(self, weight: Column) -> Floats:
        """[N]: the least sum of weights of arcs from each node to the last state."""
        least = self._nowhere()
        least[self.options.last * self.span] = 0.0
        for own in reversed(self._by_state()):
            np.minimum.at(least, self.tail[own], least[self.head[own]] + weight[own])
        return least

    def through(self, weight: Column) -> Floats:
        """[A]: the least sum of weights of a whole path, by the arc that it has; infinite where there is none."""
        return self.before(weight)[self.tail] + weight + self.after(weight)[self.head]

    def least(self, weight: Column) -> float:
        """The least sum of weights of a whole path; infinite where there is none."""
        return float(self.after(weight)[: self.span].min())

    def _nowhere(self) -> Floats:
        return np.full(self.options.num_states * self.span, np.inf)


def arcs(options: SortedOptions, num_devices: int, *, apart: bool = False) -> Arcs:
    """All arcs of plans within the devices.

    Args:
        options: Trimmed; their `above` and `at_most` say in front of which nodes they stand.
        apart: Whether replicas are to be told apart in front of all states.
    """
    most = np.clip(options.most_behind(), 0, num_devices)
    binding = options.stop[options.at_most < most[options.stop]]
    free_before = 0 if apart else int(binding.min(initial=options.num_states))
    free_state = np.arange(options.num_states) < free_before
    # Without the replicas behind it is not known where another option serves.
    above = np.where(free_state[options.stop], -1, np.minimum(options.above, num_devices))
    span = num_devices + 1
    nodes: list[Integers] = [np.zeros(0, np.int64)] * options.num_states
    nodes[options.last] = np.zeros(1, np.int64)
    begin, counts = np.zeros(options.num_states, np.int64), np.zeros((options.num_states, span + 1), np.int64)
    counts[options.last, 1:] = 1
    listed = nodes[options.last]
    firsts = options.firsts()
    parts: list[tuple[Integers, Integers]] = []
    for state in np.unique(options.start)[::-1].tolist():
        own = np.arange(firsts[state], firsts[state + 1])
        stop = options.stop[own]
        low = counts[stop, above[own] + 1]
        high = counts[stop, np.minimum(options.at_most[own], num_devices) + 1]
        number = np.maximum(high - low, 0)
        option = np.repeat(own, number)
        place = np.arange(len(option)) - np.repeat(np.cumsum(number) - number, number)
        behind = listed[np.repeat(begin[stop] + low, number) + place]
        fits = behind + options.replicas[option] <= num_devices
        option, behind = option[fits], behind[fits]
        parts.append((option, behind))
        here = np.unique(behind + options.replicas[option])
        if free_state[state]:
            here = np.minimum(here[:1], 0)
        begin[state] = len(listed)
        listed = np.concatenate([listed, here])
        counts[state, 1:] = np.searchsorted(here, np.arange(span), side="right")
    option = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in reversed(parts))])
    behind = np.concatenate([np.zeros(0, np.int64), *(part[1] for part in reversed(parts))])
    held = np.where(free_state[options.start[option]], 0, behind + options.replicas[option])
    made = Arcs(options, option, options.start[option] * span + held, options.stop[option] * span + behind, span)
    return within(made, num_devices)


def relaxed(options: SortedOptions) -> Arcs:
    """The options as arcs between states alone, as if memory never bound."""
    return Arcs(options, np.arange(len(options.start)), options.start, options.stop, 1)


def within(made: Arcs, num_devices: int) -> Arcs:
    """Those on a path of so many devices."""
    return made.only(made.through(made.of(made.options.devices)) <= num_devices)


def least_busy_seconds(made: Arcs, num_devices: int) -> float:
    """The least bottleneck of any path within the devices, exact; infinite where there is none.

    By halving over the busy times that there are: what is the fewest devices of paths without busier arcs?
    """
    busy = made.of(made.options.busy_seconds)
    values = np.unique(busy)

    def enough(limit: float) -> bool:
        some = made.only(busy <= limit)
        return some.least(some.of(some.options.devices)) <= num_devices

    if not len(values) or not enough(float(values[-1])):
        return np.inf
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(float(values[middle])) else (middle + 1, high)
    return float(values[high])


def cheap(made: Arcs, limit: float) -> Arcs:
    """Those with which some path, on any number of devices, has an objective up to the limit by what is known here."""
    if not np.isfinite(limit):
        return made
    return made.only(made.of(made.options.value) + made.through(made.of(made.options.latency_seconds)) <= limit)


def worthwhile(made: Arcs, num_devices: int, limit: float) -> Arcs:
    """Those that a path of objective up to the limit may have.

    The bottleneck B is in one of some intervals. Of paths with B from low to high, no arc is busier than high, and B is
    low or more; and with any price p of devices, a path within the devices has an objective of at least
    ``B + sum of (latency + p devices) - p num_devices``.
    """
    if not len(made) or not np.isfinite(limit):
        return made
    made = cheap(made, limit)
    if len(made) <= _FEW:
        return made
    value = made.of(made.options.value)
    low, high = float(value.min()), float(value.max())
    steps = np.linspace(low, high, _INTERVALS + 1) if high > low else np.array([low])
    kept = np.zeros(len(made), np.bool_)
    for begin, end in zip(steps, steps[1:] if len(steps) > 1 else steps, strict=False):
        rows = np.flatnonzero(value <= end)
        for factor in _PRICES:
            some = made.only(_mask(rows, len(made)))
            price = factor * limit / num_devices
            devices = some.of(some.options.devices).astype(np.float64)
            cost = some.of(some.options.latency_seconds) + price * devices
            bound = np.maximum(value[rows], begin) + some.through(cost) - price * num_devices
            rows = rows[bound <= limit]
        kept[rows] = True
    return made.only(kept)


def _mask(rows: npt.NDArray[np.intp], count: int) -> Mask:
    mask = np.zeros(count, np.bool_)
    mask[rows] = True
    return mask
