"""The planner for graphs that branch: a contiguous plan with the least largest load, or a good one and its gap.

1. Merge what must share a device, and the cycles that this makes (`loads`).
2. Lower bound: balance and heaviest layer (`load_bounds`).
3. Upper bound: pieces of depth-first orders (`orders`); often the optimum already.
4. All ideals, if they are not too many; else those on many orders, which can only lower the upper bound. Trials
   just below the best value, and in the middle, until there is no plan left (`ideals`, `trials`).

It may be stopped at any time after the first order: the value and the lower bound hold whenever they are reported.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dpart.partitioner.ideals import IdealSearch, all_ideals, count_limit, prefixes
from dpart.partitioner.load_bounds import balance, lower_bound
from dpart.partitioner.loads import LoadProblem, SharedPlan, contract
from dpart.partitioner.orders import Chain, depth_first_orders
from dpart.partitioner.trials import Descent

DEFAULT_MAX_IDEALS = 200_000

_ORDERS = 8

_ROUNDS, _ROUND_SHARE = 6, 20
"""Above the cap: so many times so much less than the cap."""


@dataclass(frozen=True)
class Balanced:
    """The answer.

    Attributes:
        plan: In layers of the problem that was asked; None if none is known.
        lower_bound: No contiguous plan has a smaller value; infinite if there is none at all.
        num_ideals: Of the contracted graph; None above the cap, or where nothing was left to search for.
        seconds: What the search took.
    """

    plan: SharedPlan | None
    lower_bound: float
    num_ideals: int | None
    seconds: float

    @property
    def value(self) -> float | None:
        """The largest load of the plan."""
        return None if self.plan is None else self.plan.value

    @property
    def gap(self) -> float:
        """How far the value may lie above the optimum, relative to the value; 1e-9 and less is rounding."""
        if self.plan is None:
            return 0.0 if self.lower_bound == np.inf else np.inf
        return max(0.0, 1 - self.lower_bound / self.plan.value) if self.plan.value else 0.0


def search(
    problem: LoadProblem,
    *,
    together: Iterable[Sequence[int]] = (),
    time_limit_seconds: float = 60.0,
    tolerance: float = 0.0,
    max_ideals: int = DEFAULT_MAX_IDEALS,
    progress: Callable[[float, float], None] | None = None,
) -> Balanced:
    """A contiguous plan of least value, to within the tolerance, the time limit and the cap.

    Args:
        problem: Layers in any order; cycles are merged.
        together: Groups of layers that must share a device.
        time_limit_seconds: After which the best plan so far is returned. The first order is always tried.
        tolerance: Relative gap at which to stop; 0 goes on until no better plan is left.
        max_ideals: Above which only the ideals on some orders are searched; 0 tries pieces of single orders only.
        progress: Called with the value and the lower bound whenever one of them changes.
    """
    began = time.perf_counter()
    deadline = began + time_limit_seconds
    contraction = contract(problem, together)
    merged = contraction.problem
    descent = Descent(lower_bound(merged), tolerance=tolerance, deadline=deadline, progress=progress)
    num_ideals: int | None = None
    if descent.bound < np.inf:
        _try_orders(merged, descent)
    if descent.open and max_ideals > 0:
        num_ideals = _try_ideals(merged, descent, max_ideals)
    plan = None if descent.best is None else contraction.expand(problem, descent.best)
    return Balanced(plan, descent.bound, num_ideals, time.perf_counter() - began)


def _try_orders(problem: LoadProblem, descent: Descent) -> None:
    """Pieces of a few orders; the first order whatever the time."""
    for order in itertools.islice(depth_first_orders(problem), _ORDERS):
        descent.lower(Chain(problem, order).trial, problem.largest_load(), proves=False)
        if not descent.open:
            return


def _try_ideals(problem: LoadProblem, descent: Descent, max_ideals: int) -> int | None:
    """All ideals, or in some rounds those on many orders; returns how many there are of all."""
    limit = count_limit(problem, max_ideals)
    masks = all_ideals(problem.predecessors, limit)
    if masks is not None:
        _search(problem, masks, descent, proves=True)
        return len(masks)
    generator = random.Random(0)
    for _ in range(_ROUNDS):
        orders = depth_first_orders(problem, generator.random())
        if descent.best is not None:
            orders = itertools.chain([[layer for part in descent.best.shares for layer in part.layers]], orders)
        _search(problem, prefixes(orders, limit // _ROUND_SHARE), descent, proves=False)
        if not descent.open:
            break
    return None


def _search(problem: LoadProblem, masks: Sequence[int], descent: Descent, *, proves: bool) -> None:
    ideals = IdealSearch(problem, balance(problem), masks)
    descent.lower(lambda threshold: ideals.trial(threshold, descent.deadline), problem.largest_load(), proves=proves)
