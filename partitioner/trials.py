"""Trial bottlenecks: instead of the best plan, ask for a plan whose loads are at most T, and lower T.

For a trial T it is enough to know, for every ideal, the fewest devices that cover it: the more there are of one
class the less that matters, so the class with most devices is counted in a number and only the others' use
makes a *column* of its own::

    6 accelerators, 1 processor        column 0   processor unused      fewest accelerators for every ideal
                                       column 1   processor used        fewest accelerators for every ideal
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dpart.partitioner.loads import LoadProblem, SharedPlan

NO_PLAN = 1 << 14
"""More devices than any count: the ideal cannot be covered."""

BELOW = 1 - 1e-9
"""Of a value: what is as good as no better; rounding of loads is far smaller."""


class OutOfTimeError(RuntimeError):
    """The time limit passed before a trial came to an answer."""


@dataclass(frozen=True)
class Columns:
    """How many devices of each class are used.

    Attributes:
        lead: The class that is counted in numbers.
        lead_count: Its devices.
        used: Per column, devices used of each class; 0 of the lead.
        steps: Of each class with devices, (from, to): the column before and after one more device is used.
    """

    lead: int
    lead_count: int
    used: tuple[tuple[int, ...], ...]
    steps: dict[int, tuple[tuple[int, int], ...]] = field(repr=False)

    @classmethod
    def of(cls, problem: LoadProblem) -> "Columns":
        """Columns of a problem; a count above the number of layers is one device per layer."""
        counts = [min(kind.count, problem.num_layers, NO_PLAN - 1) for kind in problem.classes]
        lead = max(range(len(counts)), key=counts.__getitem__)
        ranges = [range(1 if kind == lead else count + 1) for kind, count in enumerate(counts)]
        used = tuple(itertools.product(*ranges))
        column = {counts_used: number for number, counts_used in enumerate(used)}
        steps: dict[int, tuple[tuple[int, int], ...]] = {}
        for kind, count in enumerate(counts):
            if kind == lead:
                pairs = [(number, number) for number in column.values()]
            else:
                pairs = [(number, column[more]) for u, number in column.items() if (more := _plus(u, kind)) in column]
            if count:
                steps[kind] = tuple(pairs)
        return cls(lead, counts[lead], used, steps)


def _plus(used: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] + 1, *used[kind + 1 :])


Progress = Callable[[float, float], None]


class Descent:
    """The best plan so far and the proved lower bound, through one row of trials after another.

    Attributes:
        best: The best plan met, if any.
        bound: No plan has a smaller value.
    """

    def __init__(self, bound: float, *, tolerance: float, deadline: float, progress: Progress | None = None) -> None:
        """Starts with no plan.

        Args:
            bound: Proved already.
            tolerance: Relative gap that is good enough.
            deadline: Of `time.perf_counter`.
            progress: Called with the value and the bound whenever one of them changes.
        """
        self.best: SharedPlan | None = None
        self.bound = bound
        self.deadline = deadline
        self._tolerance = tolerance
        self._progress = progress

    @property
    def open(self) -> bool:
        """Whether there is time and something left to find."""
        return time.perf_counter() < self.deadline and self._may_improve(self.bound)

    def lower(self, trial: Callable[[float], SharedPlan | None], worst: float, *, proves: bool) -> None:
        """Lowers T until no plan is left, or the gap is within the tolerance, or the time is over.

        The first trial is just below the best value, since that is often the last one. Then trials in the middle
        and just below take turns.

        Args:
            trial: A plan of value at most T (its argument), None if there is none; it may raise OutOfTimeError.
            worst: No plan has a larger value.
            proves: Whether the trial knows all plans, such that the bound rises where it finds none.
        """
        bound = self.bound
        middle = False
        try:
            while self._may_improve(bound) and (self.best is None or time.perf_counter() < self.deadline):
                below = worst if self.best is None else self.best.value * BELOW
                threshold = min(below, (bound + below) / 2) if middle else below
                middle = self.best is not None and not middle
                found = trial(threshold)
                if found is None:
                    bound = threshold if self.best is not None else math.inf
                    if proves and bound > self.bound:
                        self._report(self.best, bound)
                else:
                    self._report(found, self.bound)
        except OutOfTimeError:
            pass

    def _may_improve(self, bound: float) -> bool:
        if self.best is None:
            return bound < math.inf
        return self.best.value * BELOW > bound * (1 + self._tolerance)

    def _report(self, best: SharedPlan | None, bound: float) -> None:
        self.best, self.bound = best, bound
        if self._progress is not None and best is not None:
            self._progress(best.value, bound)
