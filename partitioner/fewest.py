"""The least bottleneck: the smallest limit on every stage's busy seconds under which the devices suffice.

Instead of carrying the devices along, ask for the fewest under a trial limit T: the less a stage may take, the
more devices are needed. Whether T is too low is then a label search, and between what is proven too low and what
is found there are only finitely many busy times to try::

    too low  |........x.....x..x.......|  found        x: busy times of some stage in between
                            ^ next trial, at the median

When none is left, the bottleneck found is exactly the least, and the highest limit proven too low tells why.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dpart.partitioner.labels import LabelSearch, Path
from dpart.partitioner.options import Floats, OptionProblem, Options

NARROW = 1 + 1e-3
"""So close together, the busy times in between are listed."""


class BottleneckProblem(OptionProblem, Protocol):
    """A cost model that also lists its busy times.

    Options may be left out where another one of the same stage is within the limit too and needs no more, even if
    that one is busier: only the limit counts.
    """

    def busy_between(self, above: float, below: float) -> Floats:
        """All busy seconds strictly between that an option may have, in ascending order."""
        ...


@dataclass(frozen=True)
class FixedOptions:
    """Options at hand, all of them, as a problem."""

    every: Options
    num_devices: int

    def options(self, limit_seconds: float) -> Options:
        """Those within the limit."""
        return self.every.take(self.every.busy_seconds <= limit_seconds)

    def busy_between(self, above: float, below: float) -> Floats:
        """All busy seconds strictly between."""
        busy = self.every.busy_seconds
        return np.unique(busy[(busy > above) & (busy < below)])


@dataclass(frozen=True)
class Bottleneck:
    """The least bottleneck, a plan that has it, and why no plan has a lower one.

    Attributes:
        seconds: The bottleneck.
        path: The plan with that bottleneck and the fewest devices.
        options: What the path chooses from.
        infeasible_seconds: The highest limit under which the devices were proven too few, or a limit below the lower
            bound given. No stage has a busy time between it and `seconds`.
        trials: Limits tried.
    """

    seconds: float
    path: Path
    options: Options
    infeasible_seconds: float
    trials: int


def least_bottleneck(
    problem: BottleneckProblem,
    *,
    lower_bound: float = 0.0,
    upper_bound: float = np.inf,
    max_replicas: int | None = None,
) -> Bottleneck | None:
    """The plan of least bottleneck, exact; None if no plan within `upper_bound` fits.

    Args:
        problem: Where the options come from.
        lower_bound: No plan is below this, proven elsewhere.
        upper_bound: Plans above do not count.
        max_replicas: All stages together.
    """
    bracket = _Bracket(problem, max_replicas, float(np.nextafter(lower_bound, 0)) if lower_bound else 0.0)
    if not bracket.admits(upper_bound):
        return None
    step = 0.05
    while 0 < bracket.low * (1 + step) < bracket.high and not bracket.admits(bracket.low * (1 + step)):
        step *= 2
    while 0 < bracket.low * NARROW < bracket.high:
        bracket.admits(float(np.sqrt(bracket.low * bracket.high)))
    busy = problem.busy_between(bracket.low, bracket.high)
    while len(busy):
        bracket.admits(float(busy[len(busy) // 2]))
        busy = busy[(busy > bracket.low) & (busy < bracket.high)]
    assert bracket.path is not None and bracket.options is not None
    return Bottleneck(bracket.high, bracket.path, bracket.options, bracket.low, bracket.trials)


class _Bracket:
    """What is proven too low, and the best plan found."""

    def __init__(self, problem: BottleneckProblem, max_replicas: int | None, low: float):
        self._problem, self._max_replicas = problem, max_replicas
        self.low, self.high = low, np.inf
        self.path: Path | None = None
        self.options: Options | None = None
        self.trials = 0

    def admits(self, limit: float) -> bool:
        """Whether the devices suffice under a limit."""
        self.trials += 1
        options = self._problem.options(limit)
        path = LabelSearch(options).least(max_devices=self._problem.num_devices, max_replicas=self._max_replicas)
        if path is None:
            self.low = limit
            return False
        self.path, self.options, self.high = path, options, path.busy_seconds
        return True
