"""The rows of the programme over options: `ilp_options.py` says what they mean."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pulp

from dpart.partitioner.ilp_arcs import Arcs, Mask
from dpart.partitioner.ilp_narrow import Asked
from dpart.partitioner.options import Integers

_MAX_TERMS = 1_000_000
"""Of the rows of the cuts; where there were more, only some cuts have a row."""

_Term = tuple[pulp.LpVariable, float]


def programme(made: Arcs, asked: Asked, unit_seconds: float) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """The rows, in units of time; and a variable for each arc."""
    options = made.options
    values, latency = made.of(options.value) / unit_seconds, made.of(options.latency_seconds) / unit_seconds
    floor = float(values.min())
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    x = [pulp.LpVariable(f"x{a}", cat=pulp.LpBinary) for a in range(len(made))]
    top = pulp.LpVariable("B", lowBound=floor)
    model += pulp.LpAffineExpression([(top, 1.0), *zip(x, latency.tolist(), strict=True)])
    _add_path(model, made, x)
    # One arc crosses each cut: what they all have is no part of the sums.
    more = values - floor
    for crossing in _cuts(made, more > 0):
        terms = [(x[a], float(more[a])) for a in crossing.tolist()]
        model += pulp.LpAffineExpression([*terms, (top, -1.0)]) <= -floor
    for kind, most in enumerate(asked.budgets or (asked.num_devices,)):
        used = made.of(options.devices_of(kind) if asked.budgets else options.devices)
        mine = np.flatnonzero(used).tolist()
        model += pulp.LpAffineExpression([(x[a], int(used[a])) for a in mine]) <= most
        work = [(x[a], float(used[a] * values[a])) for a in mine]
        model += pulp.LpAffineExpression([*work, (top, -float(most))]) <= 0
    _add_asked(model, made, asked, x)
    return model, x


def _add_path(model: pulp.LpProblem, made: Arcs, x: Sequence[pulp.LpVariable]) -> None:
    """The path leaves state 0 once, and every node that it enters."""
    begins: list[_Term] = []
    balance: dict[int, list[_Term]] = defaultdict(list)
    last = made.options.last * made.span
    for variable, tail, head in zip(x, made.tail.tolist(), made.head.tolist(), strict=True):
        if tail < made.span:
            begins.append((variable, 1))
        else:
            balance[tail].append((variable, -1))
        if head != last:
            balance[head].append((variable, 1))
    model += pulp.LpAffineExpression(begins) == 1
    for terms in balance.values():
        model += pulp.LpAffineExpression(terms) == 0


def _add_asked(model: pulp.LpProblem, made: Arcs, asked: Asked, x: Sequence[pulp.LpVariable]) -> None:
    """How many stages there are, and how many of them end before a pinned layer."""
    every = pulp.LpAffineExpression([(variable, 1) for variable in x])
    for count in asked.exact_stages:
        model += every == count
    if asked.max_stages is not None:
        model += every <= asked.max_stages
    stop = made.of(made.options.stop)
    for pin in asked.pins:
        ahead = np.flatnonzero(~pin.holds[stop]).tolist()
        if ahead:
            model += pulp.LpAffineExpression([(x[a], 1) for a in ahead]) == pin.stage
        elif pin.stage:
            # No stage can end before the layer: this says that there is no plan.
            model += pulp.LpAffineExpression([(x[0], 1)]) >= 2


def _cuts(made: Arcs, counts: Mask) -> list[Integers]:
    """The arcs that cross from one number of states to the next; those only that count in the sums."""
    start, stop = made.of(made.options.start), made.of(made.options.stop)
    crossing = [np.flatnonzero((start <= place) & (stop > place) & counts) for place in np.unique(start).tolist()]
    every = max(1, -(-sum(map(len, crossing)) // _MAX_TERMS))
    return [cut for cut in crossing[::every] if len(cut)]
