"""Prices of unlike devices: the multipliers of ``dual.py`` where there is one for each pool.

At any prices the cheapest plan gives a bound, and says how it changes with the prices: by the devices of each pool
that it has too many or too few. So every plan met is a plane over the prices, the bound is the least of all planes,
and the next prices to try are where the planes met so far are highest (Kelley's cutting planes, 1960)::

    bound          .
                 .   .            two plans, one of too many devices and one of few: where their lines cross
               .-------.          the next prices are tried, and a third plan is found, below the crossing
             .           .  price
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dpart.partitioner.counted import Path
from dpart.partitioner.options import Floats

Solve = Callable[[Sequence[float], float], Path | None]
"""The cheapest plan by weights of a device of each pool, and of latency."""

_MAX_ITERATIONS, _MAX_TRIALS = 40, 10
_SHARP = 0.1
_HIGHEST = 1e4
"""No price is higher: so many times what is at stake, for each device."""


def best_multipliers(
    solve: Solve,
    budgets: Sequence[int],
    start: Sequence[float],
    *,
    wanted_seconds: float,
    tolerance_seconds: float,
) -> tuple[float, tuple[float, ...]]:
    """(bound of the latency, prices): the best, or the first whose bound is all that is wanted.

    Args:
        budgets: Devices of each pool.
        start: Prices that were good before; empty for none.
        tolerance_seconds: So close to the best is close enough.
    """
    fast = solve([0.0] * len(budgets), 1.0)
    if fast is None:
        return np.inf, (0.0,) * len(budgets)
    stake = max(fast.latency_seconds, wanted_seconds if np.isfinite(wanted_seconds) else 0.0, 1e-12)
    planes = _Planes(budgets, stake, _HIGHEST * stake)
    best, at = planes.add(fast, 1.0), planes.zero
    trial = np.array(start) if len(start) else planes.zero
    for _ in range(_MAX_ITERATIONS):
        if trial.any():
            found = solve(trial.tolist(), 1.0)
            assert found is not None, "there is a plan at other prices"
            planes.add(found, 1.0)
            value = found.latency_seconds + float(trial @ planes.excess(found))
            if value > best:
                best, at = value, trial
        highest, trial = planes.highest()
        # Where what is wanted is out of reach, a bound need not be sharper than by a part of what is missing.
        enough = max(tolerance_seconds, 1e-12 * stake, _SHARP * min(wanted_seconds - best, stake))
        if best >= wanted_seconds or highest - best <= enough or not trial.any():
            break
    return best, tuple(at.tolist())


def proof_of_too_few(solve: Solve, budgets: Sequence[int], start: Sequence[float]) -> tuple[float, ...] | None:
    """Weights by which every plan has more devices than there are; None if there are none, or none were found.

    Args:
        start: Weights to try first, such as those that proved it for another limit.
    """
    planes = _Planes(budgets, 1.0, 1.0)
    trial = np.array(start)
    for _ in range(_MAX_TRIALS):
        found = solve(trial.tolist(), 0.0)
        if found is None or trial @ planes.excess(found) > 1e-9:
            return tuple(trial.tolist())
        planes.add(found, 0.0)
        highest, trial = planes.highest()
        if highest <= 1e-9:
            return None
    return None


@dataclass
class _Planes:
    """The planes met so far, of which a few are kept; prices are counted in what is at stake for all of a pool."""

    budgets: Sequence[int]
    stake: float
    most: float
    _rows: list[Floats] = field(default_factory=list)
    _heights: list[float] = field(default_factory=list)

    @property
    def zero(self) -> Floats:
        """No price on any device."""
        return np.zeros(len(self.budgets))

    def excess(self, path: Path) -> Floats:
        """Devices of each pool that a plan has too many; negative where it has fewer."""
        excess: Floats = np.array(path.by_pool, dtype=np.float64) - np.array(self.budgets)
        return excess

    def add(self, path: Path, latency_weight: float) -> float:
        """Adds the plane of a plan; its height where nothing has a price."""
        height = latency_weight * path.latency_seconds
        self._rows.append(self.excess(path) * self._unit)
        self._heights.append(height)
        return height

    def highest(self) -> tuple[float, Floats]:
        """(height, prices) where the least of all planes is highest."""
        p = len(self.budgets)
        # v <= height + row @ x for every plane, 0 <= x <= highest, as rows of [row, 1] (x, v) <= height.
        planes = np.hstack([-np.array(self._rows), np.ones((len(self._rows), 1))])
        bounds = np.hstack([np.vstack([-np.eye(p), np.eye(p)]), np.zeros((2 * p, 1))])
        rows = np.vstack([planes, bounds])
        limits = np.concatenate([self._heights, np.zeros(p), self.most / self._unit])
        chosen = np.array(list(itertools.combinations(range(len(rows)), p + 1)))
        chosen = chosen[chosen[:, 0] < len(planes)]
        systems = rows[chosen]
        sizes = np.linalg.norm(systems, axis=2).prod(axis=1)
        regular = np.abs(np.linalg.det(systems)) > 1e-12 * np.maximum(sizes, 1e-300)
        chosen, systems = chosen[regular], systems[regular]
        corners = np.linalg.solve(systems, limits[chosen][:, :, None])[:, :, 0]
        slack = limits[None, :] - corners @ rows.T
        scale = np.abs(limits)[None, :] + np.abs(corners) @ np.abs(rows).T + 1e-300
        inside = (slack >= -1e-9 * scale).all(axis=1)
        assert inside.any(), "prices are between nothing and the most"
        top = np.flatnonzero(inside)[np.argmax(corners[inside, -1])]
        self._keep(set(chosen[top].tolist()))
        return float(corners[top, -1]), np.maximum(corners[top, :-1], 0.0) * self._unit

    @property
    def _unit(self) -> Floats:
        return self.stake / np.maximum(np.array(self.budgets, dtype=np.float64), 1.0)

    def _keep(self, needed: set[int]) -> None:
        """The planes that hold the highest point up, and the latest: corners are few then."""
        most = max(len(self.budgets) + 2, 18 - 2 * len(self.budgets))
        idle = [i for i in range(len(self._rows)) if i not in needed]
        for i in idle[: max(0, len(self._rows) - most)][::-1]:
            del self._rows[i], self._heights[i]
