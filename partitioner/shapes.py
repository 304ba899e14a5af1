"""The best plan of every shape: for each count of stages and of devices, or for given replicas of each stage.

The dynamic programme of PipeDream on a single level of links, with the count of stages in its state: devices and
stages are counted from the end, so what stands behind a stage is known, and with it what the stage holds::

    best(k, n)[i] = min over r and j of max( stage(i, j; r, after = n - r), best(k - 1, n - r)[j] )

k stages on n devices for the layers that state i leaves. Any value of a stage may be minimised so: its seconds,
for plans of a shape that was asked for, or its bytes, for how far from fitting the best plan is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpart.partitioner.search import FoundStage, Matrix

Value = Callable[[int, int], Matrix]
"""[S, S] of stage (i, j), infinite where there is none, for its replicas and the devices behind it."""


@dataclass(frozen=True)
class ShapeFound:
    """The plan of a shape whose largest stage value is the smallest."""

    stages: tuple[FoundStage, ...]
    value: float


@dataclass(frozen=True)
class _Tails:
    """For every state: the best value from there to the end, its first stage's replicas and end."""

    value: npt.NDArray[np.float64]
    replicas: npt.NDArray[np.intp]
    stop: npt.NDArray[np.intp]


def best_of_each_shape(value: Value, num_devices: int, max_stages: int) -> dict[tuple[int, int], ShapeFound]:
    """By (stages, devices) for all up to the given ones; those that have a plan only.

    Takes about ``num_devices**2 / 2 * max_stages`` passes over an [S, S] matrix.
    """
    best: dict[tuple[int, int], _Tails] = {}
    for n in range(1, num_devices + 1):
        for r in range(1, n + 1):
            stage = value(r, n - r)
            best.setdefault((0, 0), _end(len(stage)))
            for k in range(1, min(max_stages, n - r + 1) + 1):
                if (k - 1, n - r) in best:
                    tails = _in_front(stage, best[k - 1, n - r], r)
                    best[k, n] = _better(best[k, n], tails) if (k, n) in best else tails
    return {
        key: ShapeFound(_read(best, *key), float(tails.value[0]))
        for key, tails in best.items()
        if key != (0, 0) and np.isfinite(tails.value[0])
    }


def best_of_replicas(value: Value, replicas: Sequence[int]) -> ShapeFound | None:
    """The best cuts for stages with these replicas; None if there are none that fit."""
    best: dict[tuple[int, int], _Tails] = {}
    behind = 0
    for k, r in enumerate(reversed(replicas), start=1):
        stage = value(r, behind)
        best.setdefault((0, 0), _end(len(stage)))
        best[k, behind + r] = _in_front(stage, best[k - 1, behind], r)
        behind += r
    tails = best[len(replicas), behind]
    if not np.isfinite(tails.value[0]):
        return None
    return ShapeFound(_read(best, len(replicas), behind), float(tails.value[0]))


def _end(num_states: int) -> _Tails:
    value = np.full(num_states, np.inf)
    value[-1] = 0.0
    nothing = np.zeros(num_states, dtype=np.intp)
    return _Tails(value, nothing, nothing)


def _in_front(stage: Matrix, tails: _Tails, replicas: int) -> _Tails:
    joined = np.maximum(stage, tails.value[None, :])
    stop = joined.argmin(axis=1)
    value = np.take_along_axis(joined, stop[:, None], axis=1)[:, 0]
    return _Tails(value, np.full(len(stop), replicas, dtype=np.intp), stop)


def _better(one: _Tails, other: _Tails) -> _Tails:
    take = other.value < one.value
    return _Tails(
        np.where(take, other.value, one.value),
        np.where(take, other.replicas, one.replicas),
        np.where(take, other.stop, one.stop),
    )


def _read(best: Mapping[tuple[int, int], _Tails], stages: int, devices: int) -> tuple[FoundStage, ...]:
    found, start = [], 0
    for k in range(stages, 0, -1):
        tails = best[k, devices]
        replicas, stop = int(tails.replicas[start]), int(tails.stop[start])
        found.append(FoundStage(start, stop, replicas))
        start, devices = stop, devices - replicas
    return tuple(found)
