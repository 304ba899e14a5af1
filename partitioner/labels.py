"""Label search: the best row of stages, its memory and its devices counted to the unit.

From the last state to the first, every state keeps *labels*: what running all that stands behind it takes in
replicas, in devices, in seconds, each the sum (or the largest) over the stages chosen so far. An option puts one
more stage in front. How many microbatches that one has in flight depends on the replicas behind it alone, so
whether it fits is a bound on the label it extends: where y microbatches fit and the stage has d replicas,
``1 + ceil(behind / d) <= y``, which is ``behind <= (y - 1) * d``::

    state       0              3            7          last
                |--- d = 2 ----|-- d = 1 ---|-- d = 3 --|
    behind      6              4            3           0      the middle stage fits if 3 <= (y - 1) * 1

Less of everything is never worse for the stages to come, so a state keeps only undominated labels. The answer is
exact, and the work does not grow with the number of devices but with the ways to trade one quantity for another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpart.partitioner.label_sweep import Allowed, LabelTable, Quantity, sweep
from dpart.partitioner.options import Floats, Options
from dpart.partitioner.pareto import Column
from dpart.partitioner.sorted_options import SortedOptions

DEFAULT_MAX_LABELS = 20_000


@dataclass(frozen=True)
class Path:
    """A row of stages.

    Attributes:
        chosen: Per stage, first to last, an index into the options searched.
        value: What was minimised.
        devices: Their sum over the stages.
        busy_seconds: The largest of the stages'.
        latency_seconds: Their sum.
    """

    chosen: tuple[int, ...]
    value: float
    devices: int
    busy_seconds: float
    latency_seconds: float


@dataclass(frozen=True)
class Exact:
    """Answer of a search that may have been cut short.

    Attributes:
        path: The best one found; None if none is better than the upper bound given.
        complete: Whether all labels were kept, so that no path is better.
    """

    path: Path | None
    complete: bool


@dataclass(frozen=True)
class Limits:
    """What a plan may use at most, all stages together; None: no limit."""

    devices: int | None = None
    replicas: int | None = None
    stages: int | None = None


class LabelSearch:
    """Options, sorted once, to be searched under several weights and limits."""

    def __init__(self, options: Options):
        """Sort them, and leave out what cannot be part of any plan or is no better than another one."""
        self._options = options
        self._all = SortedOptions.sort(options)
        self._useful = self._all.trimmed(self._all.devices, self._all.latency_seconds)
        binding = self._all.stop[self._all.at_most < self._all.most_behind()[self._all.stop]]
        self._free_before = int(binding.min(initial=options.num_states))

    def least(
        self,
        *,
        device_weight: float = 1.0,
        latency_weight: float = 0.0,
        max_devices: int | None = None,
        max_replicas: int | None = None,
        num_stages: int | None = None,
        max_stages: int | None = None,
    ) -> Path | None:
        """The path of least ``device_weight * devices + latency_weight * latency``, exact; None if there is none.

        Labels are (replicas behind, weighted value), and a third number if both `latency_weight` and `max_devices`
        are given: without `max_devices` this is the relaxation in which devices have a price.

        Args:
            device_weight: Not negative; with a `latency_weight` of 0 the fewest devices are meant.
            latency_weight: Not negative.
            max_devices: All stages together.
            max_replicas: All stages together.
            num_stages: Exactly so many.
            max_stages: At most so many.
        """
        assert device_weight >= 0 and latency_weight >= 0
        limits = Limits(max_devices, max_replicas, max_stages if num_stages is None else num_stages)
        value: Column = self._useful.devices
        if latency_weight:
            value = device_weight * self._useful.devices + latency_weight * self._useful.latency_seconds
        options = replace(self._useful, value=value)
        options = options.trimmed(value, *([options.devices] if max_devices is not None else []))
        options = _within(options, limits)
        quantities = [Quantity(options.value)]
        device_column = 0
        if max_devices is not None and latency_weight:
            quantities.insert(0, Quantity(options.devices))
        if limits.stages is not None:
            quantities.insert(0, Quantity(np.ones(len(options.start), np.int64)))
            device_column = 1
        table = sweep(
            options, quantities, allowed=_allowed(options, limits, device_column),
            apart=num_stages is not None, free_before=0 if max_replicas is not None else self._free_before,
        )  # fmt: skip
        path = self._best(options, table, num_stages, [table.columns[-1]])
        if path is None:
            return None
        weighted = device_weight * path.devices + latency_weight * path.latency_seconds
        return replace(path, value=weighted)

    def exact(
        self,
        max_devices: int,
        *,
        upper_bound: float = np.inf,
        least_busy_seconds: float = 0.0,
        device_price: float = 0.0,
        max_replicas: int | None = None,
        num_stages: int | None = None,
        max_stages: int | None = None,
        max_labels: int = DEFAULT_MAX_LABELS,
        budgets: Sequence[int] = (),
    ) -> Exact:
        """The path of least ``largest busy + sum of latency`` with at most `max_devices`.

        Args:
            max_devices: All stages together.
            upper_bound: Only what is better is looked for.
            least_busy_seconds: A proven lower bound of the bottleneck of any plan; the closer, the quicker.
            device_price: Seconds per device, any number not below 0. With the multiplier of the relaxation, what
                cannot beat the upper bound is known early.
            max_replicas: All stages together.
            num_stages: Exactly so many.
            max_stages: At most so many.
            max_labels: Per state. Past it the most promising ones stay, and the answer is no proof.
            budgets: Devices of each kind at most, where options take unlike ones.
        """
        kinds = range(max(1, len(budgets)))
        limits = Limits(max_devices, max_replicas, max_stages if num_stages is None else num_stages)
        options = self._all
        if not len(options.start):
            return Exact(None, True)
        bottleneck = float(options.before(options.busy_seconds, largest=True)[-1])
        floor = max(least_busy_seconds, bottleneck)
        options = replace(options, value=np.maximum(options.busy_seconds, floor))
        options = options.trimmed(options.value, *map(options.devices_of, kinds), options.latency_seconds)
        options = _within(options, limits)
        prices = sorted({0.0, device_price})
        for price in prices:
            cost = options.latency_seconds + price * options.devices
            through = options.before(cost)[options.start] + cost + options.after(cost)[options.stop]
            options = options.only(options.value + through - price * max_devices < upper_bound)
        rest = [options.before(options.latency_seconds + price * options.devices) for price in prices]

        def promise(state: int, columns: list[Column]) -> Floats:
            busy, latency = columns[-2:]
            devices = np.sum(columns[-2 - len(kinds) : -2], axis=0)
            bounds = [r[state] + p * (devices - max_devices) for p, r in zip(prices, rest, strict=True)]
            return np.asarray(busy + latency + np.maximum.reduce(bounds), np.float64)

        quantities = [
            *(Quantity(options.devices_of(kind)) for kind in kinds),
            Quantity(options.value, largest=True),
            Quantity(options.latency_seconds),
        ]
        counted = limits.stages is not None
        if counted:
            quantities.insert(0, Quantity(np.ones(len(options.start), np.int64)))
        fits = _allowed(options, limits, 1 if counted else 0, budgets)

        def allowed(state: int, columns: list[Column]) -> npt.NDArray[np.bool_]:
            assert fits is not None
            return fits(state, columns) & (promise(state, columns) < upper_bound)

        table = sweep(
            options, quantities, allowed=allowed, apart=num_stages is not None,
            free_before=0 if max_replicas is not None else self._free_before,
            promise=promise, max_labels=max_labels,
        )  # fmt: skip
        return Exact(self._best(options, table, num_stages, table.columns[-2:]), table.complete)

    def _best(
        self, options: SortedOptions, table: LabelTable, num_stages: int | None, costs: Iterable[Column]
    ) -> Path | None:
        """The path behind the label of state 0 with the least sum of costs."""
        ends = table.of(0)
        if num_stages is not None:
            ends = ends[table.columns[0][ends] == num_stages]
        if not len(ends):
            return None
        label = int(ends[np.argmin(sum(cost[ends] for cost in costs))])
        rows = []
        while label:
            rows.append(table.option[label])
            label = int(table.parent[label])
        chosen = options.index[np.array(rows, np.int64)]
        busy = float(self._options.busy_seconds[chosen].max())
        latency = float(self._options.latency_seconds[chosen].sum())
        devices = int(self._options.devices[chosen].sum())
        return Path(tuple(chosen.tolist()), busy + latency, devices, busy, latency)


def _within(options: SortedOptions, limits: Limits) -> SortedOptions:
    """Options that some plan within each of the limits may have."""
    for name, most in (("devices", limits.devices), ("replicas", limits.replicas)):
        if most is not None:
            weight = getattr(options, name)
            through = options.before(weight)[options.start] + weight + options.after(weight)[options.stop]
            options = options.only(through <= most)
    if limits.replicas is None:
        return options
    room = limits.replicas - options.replicas - options.before(options.replicas)[options.start].astype(np.int64)
    at_most = np.minimum(options.at_most, room)
    return replace(options, at_most=at_most).only(at_most > options.above)


def _allowed(options: SortedOptions, limits: Limits, device_column: int, budgets: Sequence[int] = ()) -> Allowed | None:
    """Whether what stands before a state can still be put in front of a label.

    Args:
        device_column: The first quantity that is devices.
        budgets: Of each kind of devices, which have a quantity each.
    """
    bounds = [
        (device_column + kind, most - options.before(options.devices_of(kind))) for kind, most in enumerate(budgets)
    ]
    if limits.devices is not None and not budgets:
        bounds.append((device_column, limits.devices - options.before(options.devices)))
    if limits.stages is not None:
        bounds.append((0, limits.stages - options.before(np.ones(len(options.start)))))
    if not bounds:
        return None

    def allowed(state: int, columns: list[Column]) -> npt.NDArray[np.bool_]:
        fits = np.ones(len(columns[0]), np.bool_)
        for column, most in bounds:
            fits &= columns[column] <= most[state]
        return fits

    return allowed
