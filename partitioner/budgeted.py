"""The fastest plan within a few devices, counted to the unit: where each pipeline has so few that prices are coarse.

With d replicas of every stage a plan has K / d devices for one copy of each, and where that is a small number the
priced bound of ``dual.py`` leaves a gap: no plan takes the broken number of devices that the price would buy. So
the table gets the devices as a further index::

    least(i, n, u) = min over stages (i, j) and degrees t <= u of  latency(i, j, n, t) + least(j, n - 1, u - t)
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpart.partitioner.options import Floats, Integers

Indices = npt.NDArray[np.intp]


class Budgeted:
    """least[n][u][i] of one set of stages."""

    def __init__(
        self, start: Integers, stop: Integers, num_states: int, latency: dict[int, Floats], units: int
    ) -> None:
        """
        Args:
            start: Of each stage, in ascending order.
            stop: Of each stage.
            latency: [N, X] by degree: of each stage by its count from the end; infinite where it is not allowed.
            units: Devices of one copy of the pipeline.
        """
        self._start, self._stop, self._latency, self._units = start, stop, latency, units
        first = np.flatnonzero(np.diff(start, prepend=-1))
        begin = start[first]
        end = np.full((units + 1, num_states), np.inf)
        end[:, -1] = 0.0
        self.least = [end]
        for n in range(1, len(next(iter(latency.values()))) + 1):
            value = np.full((units + 1, num_states), np.inf)
            for degree, of_stage in latency.items():
                if degree <= units and len(first):
                    through = of_stage[n - 1][None, :] + self.least[-1][: units + 1 - degree, stop]
                    best = np.minimum.reduceat(through, first, axis=1)
                    value[degree:, begin] = np.minimum(value[degree:, begin], best)
            if not np.isfinite(value).any():
                break
            self.least.append(value)

    def best(self, counts: Sequence[int]) -> tuple[float, int]:
        """(latency, count of stages) of the fastest plan with one of these counts; infinite if there is none."""
        found = [(float(self.least[n][self._units, 0]), n) for n in counts if n < len(self.least)]
        return min(found, default=(np.inf, 0))

    def follow(self, count: int) -> list[tuple[int, int, int]]:
        """(stage, count from the end, degree) of the fastest plan with so many stages, in order."""
        found, state, units = [], 0, self._units
        for n in range(count, 0, -1):
            here = slice(*np.searchsorted(self._start, [state, state + 1]))
            options = []
            for degree, of_stage in self._latency.items():
                if degree <= units:
                    through = of_stage[n - 1, here] + self.least[n - 1][units - degree, self._stop[here]]
                    best = int(through.argmin())
                    options.append((float(through[best]), degree, here.start + best))
            _, degree, stage = min(options)
            found.append((stage, n, degree))
            state, units = int(self._stop[stage]), units - degree
        return found
