"""The sweep of a label search: from the last state to the first, every state's labels from those behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpart.partitioner.options import Floats, Integers
from dpart.partitioner.pareto import Column, undominated
from dpart.partitioner.sorted_options import SortedOptions

Allowed = Callable[[int, list[Column]], npt.NDArray[np.bool_]]
Promise = Callable[[int, list[Column]], Floats]


@dataclass(frozen=True)
class Quantity:
    """A coordinate of labels: its value per option, and whether a plan has the largest or the sum of it."""

    per_option: Column
    largest: bool = False

    def extended(self, label: Column, option: Integers) -> Column:
        """Of labels with one more stage in front."""
        added = self.per_option[option]
        return np.maximum(label, added) if self.largest else label + added


class LabelTable:
    """All labels, those of later states first, and in a state by the replicas behind it.

    Label 0 is that of the last state: nothing stands behind it.

    Attributes:
        columns: One per quantity.
        option: That a label has put in front of the label `parent`.
        complete: Whether no label was given up for lack of room.
    """

    def __init__(self, quantities: Sequence[Quantity], last: int, span: int):
        self._last, self._span = last, span
        self._count = 1
        self.behind = np.zeros(1 << 12, np.int64)
        self._key = np.zeros(1 << 12, np.int64)
        self.option = np.zeros(1 << 12, np.int64)
        self.parent = np.zeros(1 << 12, np.int64)
        self.columns = [_zeros(1 << 12, quantity.per_option) for quantity in quantities]
        self.complete = True

    def find(self, states: Integers, behind: Integers) -> Integers:
        """Where the labels of a state begin that have more than so many replicas behind."""
        return np.searchsorted(self._key[: self._count], (self._last - states) * self._span + behind, side="right")

    def of(self, state: int) -> Integers:
        """The labels of a state."""
        bounds = self.find(np.array([state, state]), np.array([-1, self._span - 2]))
        return np.arange(bounds[0], bounds[1])

    def append(self, state: int, behind: Integers, columns: list[Column], option: Integers, parent: Integers) -> None:
        """The labels of one more state, in ascending order of `behind`."""
        begin, end = self._count, self._count + len(behind)
        if end > len(self._key):
            size = max(end, 2 * len(self._key))
            self.behind, self._key, self.option, self.parent, *self.columns = (
                np.concatenate([column, np.zeros(size - len(column), column.dtype)])
                for column in (self.behind, self._key, self.option, self.parent, *self.columns)
            )
        self.behind[begin:end] = behind
        self._key[begin:end] = (self._last - state) * self._span + behind
        self.option[begin:end] = option
        self.parent[begin:end] = parent
        for mine, new in zip(self.columns, columns, strict=True):
            mine[begin:end] = new
        self._count = end


def _zeros(count: int, like: Column) -> Column:
    return np.zeros(count, np.int64) if like.dtype.kind == "i" else np.zeros(count, np.float64)


def sweep(
    options: SortedOptions,
    quantities: Sequence[Quantity],
    *,
    allowed: Allowed | None,
    apart: bool,
    free_before: int,
    promise: Promise | None = None,
    max_labels: int | None = None,
) -> LabelTable:
    """All undominated labels of all states.

    Args:
        options: To choose from.
        quantities: What labels count, the one with most different values last.
        allowed: Which of a state's labels may be part of a plan within the limits; None if all.
        apart: Labels with a different first quantity do not compare.
        free_before: In earlier states it does not matter how many replicas are behind.
        promise: The least a plan can cost that has these labels.
        max_labels: Per state; past it the most promising ones stay.
    """
    span = int(options.at_most.max(initial=0) + options.replicas.max(initial=0)) + 2
    table = LabelTable(quantities, options.last, span)
    firsts = options.firsts()
    for state in np.unique(options.start)[::-1].tolist():
        own = slice(firsts[state], firsts[state + 1])
        begin = table.find(options.stop[own], options.above[own])
        counts = np.maximum(table.find(options.stop[own], options.at_most[own]) - begin, 0)
        option = np.repeat(np.arange(own.start, own.stop), counts)
        if not len(option):
            continue
        parent = np.arange(len(option)) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
        columns = [
            quantity.extended(mine[parent], option) for quantity, mine in zip(quantities, table.columns, strict=True)
        ]
        if allowed is not None:
            fits = np.flatnonzero(allowed(state, columns))
            option, parent, columns = option[fits], parent[fits], [column[fits] for column in columns]
        behind = table.behind[parent] + options.replicas[option]
        if state < free_before:
            behind = np.zeros_like(behind)
        stays = undominated([behind, *columns[apart:-1]], columns[-1], columns[0].astype(np.int64) if apart else None)
        if max_labels is not None and promise is not None and len(stays) > max_labels:
            table.complete = False
            bounds = promise(state, [column[stays] for column in columns])
            stays = stays[np.sort(np.argpartition(bounds, max_labels)[:max_labels])]
        table.append(state, behind[stays], [column[stays] for column in columns], option[stays], parent[stays])
    return table
