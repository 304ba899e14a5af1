"""Lower bounds on the largest load, whatever the plan.

Balance: let a unit of load on class c be worth p_c, and a layer be worth the least that it costs at these prices,
v_l = min over c of p_c work_c(l). Then a device with load T holds layers worth at most p_c T, so

    T >= sum of v_l / sum of count_c p_c          for all prices p >= 0,

and the best prices give the value of the linear programme that may cut layers in pieces, whose dual this is. With
one class it is the total work over the devices. Two devices of unlike classes, three layers::

    work on the fast one   2  2  2      prices 1 and 1/2: v = 2 2 2, T >= 6 / 1.5 = 4: two layers here, one there
    work on the slow one   4  4  4

Heaviest layer: some device has it whole. Transfers are left out of both: with the same fraction of every layer on
each device, the linear programme pays for none.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpart.partitioner.loads import LoadProblem, Vector

_UNITS = 2.0**45
"""Worth of all layers: whole numbers, so that sums are exact in any order."""

_ROUNDS = 8


@dataclass(frozen=True)
class Worth:
    """Prices of classes and worths of layers, in units.

    Attributes:
        layers: [L].
        per_load: [C]: what one unit of load on a device of the class covers at most.
        bound: The lower bound that these prices prove.
    """

    layers: npt.NDArray[np.int64]
    per_load: Vector
    bound: float


def balance(problem: LoadProblem) -> Worth:
    """The best prices, by ascent on one price at a time: exact for two classes, a valid bound for more."""
    counts = np.array([kind.count for kind in problem.classes], np.float64)
    work = np.array([kind.work for kind in problem.classes])
    prices = _first_prices(work, counts)
    best = _bound(work, counts, prices)
    for _ in range(_ROUNDS if (counts > 0).sum() > 1 else 0):
        before = best
        for kind in np.flatnonzero(counts):
            trial = prices.copy()
            trial[kind] = _best_price(work, counts, prices, int(kind))
            bound = _bound(work, counts, trial)
            if bound > best:
                prices, best = trial, bound
        if best <= before * (1 + 1e-9):
            break
    worth = _worth(work, prices)
    total = worth.sum()
    scale = _UNITS / total if 0 < total < np.inf else 0.0
    # Rounding down keeps each layer's worth at most what it costs; the bound gives way by the rounding of sums.
    units = np.floor(worth * scale) if scale else np.zeros(len(worth))
    return Worth(units.astype(np.int64), prices * scale, best * (1 - 1e-12))


def heaviest(problem: LoadProblem) -> float:
    """The largest work of a layer on the class that runs it fastest; infinite where none can hold it."""
    least = np.full(problem.num_layers, np.inf)
    for kind in problem.classes:
        if kind.count:
            least = np.minimum(least, np.where(problem.memory_bytes <= kind.memory_bytes, kind.work, np.inf))
    return float(least.max(initial=0.0))


def lower_bound(problem: LoadProblem) -> float:
    """The larger of balance and heaviest layer; infinite where memory alone leaves no plan."""
    limit = sum(kind.count * kind.memory_bytes for kind in problem.classes if kind.count)
    if problem.memory_bytes.sum() > limit * (1 + 1e-12):
        return np.inf
    return max(balance(problem).bound, heaviest(problem))


def _first_prices(work: Vector, counts: Vector) -> Vector:
    """Each class at the speed it has over the layers that it can run; 0 for classes without devices."""
    prices = np.zeros(len(counts))
    present = np.flatnonzero(counts)
    least = work[present].min(axis=0, initial=np.inf)
    for kind in present:
        runs = np.isfinite(work[kind])
        total = work[kind][runs].sum()
        prices[kind] = least[runs].sum() / total if total > 0 else 1.0
    return prices


def _worth(work: Vector, prices: Vector) -> Vector:
    priced = np.full(work.shape, np.inf)
    np.multiply(work, prices[:, None], out=priced, where=np.isfinite(work))
    least: Vector = priced.min(axis=0)
    return least


def _bound(work: Vector, counts: Vector, prices: Vector) -> float:
    capacity = float(counts @ prices)
    total = float(_worth(work[counts > 0], prices[counts > 0]).sum()) if (counts > 0).any() else np.inf
    return total / capacity if capacity > 0 else (np.inf if total > 0 else 0.0)


def _best_price(work: Vector, counts: Vector, prices: Vector, kind: int) -> float:
    """The best price of one class beside the others': the bound bends only where a layer costs the same on both."""
    others = counts > 0
    others[kind] = False
    rest = _worth(work[others], prices[others])
    own = work[kind]
    bends = np.isfinite(own) & np.isfinite(rest) & (own > 0)
    if not bends.any():
        return float(prices[kind])
    price = rest[bends] / own[bends]
    order = np.argsort(price)
    price, flat, slope = price[order], rest[bends][order], own[bends][order]
    always = rest[~np.isfinite(own)].sum()
    sloped = own[np.isfinite(own) & ~np.isfinite(rest)].sum()
    total = always + np.cumsum(flat) + price * (sloped + slope.sum() - np.cumsum(slope))
    capacity = float(counts[others] @ prices[others]) + counts[kind] * price
    usable = capacity > 0
    bound = np.full(len(price), -np.inf)
    np.divide(total, capacity, out=bound, where=usable)
    return float(price[int(bound.argmax())])
