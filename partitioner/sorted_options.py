"""`SortedOptions`: options by where they start, each with the replicas behind it for which it is of use.

An option is of use from `above` (excluded) to `at_most` replicas behind it. Up to `above`, another option of the
same stage fits that is as good in all that counts; past `at_most` its own memory is full::

    replicas behind   0 . . . 4 . . . . . 10 . . . .
    d = 1, y = 5      |-------|                         at most (5 - 1) * 1 = 4
    d = 2, y = 6               |----------|             (6 - 1) * 2 = 10, above 4 where d = 1 is too much memory
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from dpart.partitioner.options import UNLIMITED, Floats, Integers, Options
from dpart.partitioner.pareto import Column

MAX_SHIFT = 16
"""Neighbours among the options of a stage that are compared with each other."""


@dataclass(frozen=True)
class SortedOptions:
    """Sorted by start, stop, replicas, devices. Columns as in `Options`, and these.

    Attributes:
        index: Of the option in the `Options` it comes from.
        value: What is minimised, for searches that do.
        above: Of no use for so many replicas behind, or fewer.
        at_most: Replicas that may be behind.
        pool: Which kind of devices it takes.
    """

    num_states: int
    index: Integers
    start: Integers
    stop: Integers
    replicas: Integers
    devices: Integers
    busy_seconds: Floats
    latency_seconds: Floats
    value: Column
    above: Integers
    at_most: Integers
    pool: Integers

    @classmethod
    def sort(cls, options: Options) -> "SortedOptions":
        """Those that are on a way from the first state to the last."""
        stage = options.start * options.num_states + options.stop
        order = np.lexsort((options.devices, options.replicas, stage)).astype(np.int64)
        taken = options.take(order)
        all_sorted = cls(
            options.num_states, order, taken.start, taken.stop, taken.replicas, taken.devices,
            taken.busy_seconds, taken.latency_seconds, taken.devices,
            above=np.full(len(order), -1, np.int64),
            at_most=(np.minimum(taken.max_in_flight, UNLIMITED) - 1) * taken.replicas,
            pool=np.zeros(len(order), np.int64) if taken.pool is None else taken.pool,
        )  # fmt: skip
        most = all_sorted.most_behind()[all_sorted.stop]
        reached = np.isfinite(all_sorted.before(np.zeros(len(order))))[all_sorted.start]
        whole = np.where(most >= 0, most, 0).astype(np.int64)
        limited = replace(all_sorted, at_most=np.minimum(all_sorted.at_most, whole))
        return limited.only((most >= 0) & reached)

    @property
    def last(self) -> int:
        """The state that is everything."""
        return self.num_states - 1

    def firsts(self) -> Integers:
        """[S + 1]: where the options of each state begin."""
        return np.searchsorted(self.start, np.arange(self.num_states + 1)).astype(np.int64)

    def devices_of(self, pool: int) -> Integers:
        """Devices that each option takes of one kind."""
        return np.where(self.pool == pool, self.devices, 0)

    def only(self, chosen: npt.NDArray[np.bool_]) -> "SortedOptions":
        """Those, in the same order."""
        if chosen.all():
            return self
        columns = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name != "num_states"}
        return replace(self, **columns)

    def before(self, weight: Column, largest: bool = False) -> Floats:
        """[S]: the least weight (sum, or largest) of stages from state 0 to each; inf where there are none."""
        least = np.full(self.num_states, np.inf)
        least[0] = 0
        firsts = self.firsts()
        for state in np.unique(self.start).tolist():
            if least[state] < np.inf:
                own = slice(firsts[state], firsts[state + 1])
                added = np.maximum(weight[own], least[state]) if largest else weight[own] + least[state]
                np.minimum.at(least, self.stop[own], added)
        return least

    def after(self, weight: Column) -> Floats:
        """[S]: the least sum of weights of stages from each state to the last; inf where there are none."""
        least = np.full(self.num_states, np.inf)
        least[-1] = 0
        firsts = self.firsts()
        for state in np.unique(self.start)[::-1].tolist():
            own = slice(firsts[state], firsts[state + 1])
            least[state] = (weight[own] + least[self.stop[own]]).min()
        return least

    def most_behind(self) -> Floats:
        """[S]: the most replicas that stages from each state to the last may have; -inf where there are none."""
        return -self.after(-self.replicas)

    def trimmed(self, *columns: Column) -> "SortedOptions":
        """Without what another option of the same stage makes superfluous: no more replicas, nor more of `columns`.

        Compares neighbours only: what stays may still hold some that are superfluous.
        """
        above = np.full_like(self.above, -1)
        stage = self.start * self.num_states + self.stop
        for shift in range(1, MAX_SHIFT + 1):
            pair = np.flatnonzero(stage[shift:] == stage[:-shift])
            if not len(pair):
                break
            left, right = pair, pair + shift
            left_serves, right_serves = _no_more(columns, left, right), _no_more(columns, right, left)
            right_serves &= ~left_serves & (self.replicas[left] == self.replicas[right])
            above[right] = np.maximum(above[right], np.where(left_serves, self.at_most[left], -1))
            above[left] = np.maximum(above[left], np.where(right_serves, self.at_most[right], -1))
        return replace(self, above=above).only(above < self.at_most)


def _no_more(columns: Sequence[Column], these: Integers, those: Integers) -> npt.NDArray[np.bool_]:
    no_more = np.ones(len(these), np.bool_)
    for column in columns:
        no_more &= column[these] <= column[those]
    return no_more
