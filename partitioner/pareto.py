"""Pareto filter: of many cost vectors, those that no other one is at least as good as in every respect.

The last coordinate is a number, the others are given ranks, so that they span a grid with few cells. In every
cell only the least value counts, and a cell stays where that is below what all cells before it have::

    second                       a prefix minimum along each axis tells in one pass
      ^   8  .  5  4             what stands in the rectangle towards the origin
      |   9  7  7  .
      +---------------> first    stay: 9, 8, 7 (left), 5, 4

Where the grid would be much larger than the list, the list is compared with itself, block by block.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

SMALL_GRID = 1 << 15
"""Cells that are always cheap enough."""

LARGEST_GRID = 1 << 22

BLOCK = 128


def undominated(ranked: Sequence[Column], value: Column, apart: Integers | None = None) -> Integers:
    """Indices of the vectors (ranked[0][i], ranked[1][i], ..., value[i]) that stay; of equal ones one stays.

    Args:
        ranked: All coordinates but one, by columns. The answer is in ascending order of the first.
        value: The other one.
        apart: Vectors with different numbers here do not compare.
    """
    if not len(value):
        return np.empty(0, np.int64)
    axes = [_ranks(column, len(value)) for column in ([] if apart is None else [apart]) + list(ranked)]
    shape = tuple(size for _, size in axes)
    cells = int(np.prod(shape, dtype=np.float64))
    if cells > SMALL_GRID and (cells > LARGEST_GRID or cells > 64 * len(value)):
        found = _by_comparison([*ranked, value], apart)
    else:
        found = _by_grid(axes, shape, value, first_axis=0 if apart is None else 1)
    if apart is not None or len(ranked) > 1:
        found = found[np.argsort(ranked[0][found], kind="stable")]
    return found


def _ranks(column: Column, count: int) -> tuple[Integers, int]:
    """Every entry's place among the distinct ones (or, for integers that lie close, its distance to the least)."""
    if column.dtype.kind == "i":
        whole = column.astype(np.int64, copy=False)
        low = int(whole.min())
        span = int(whole.max()) - low + 1
        if span <= 4 * count + 64:
            return whole - low, span
    distinct, places = np.unique(column, return_inverse=True)
    return places, len(distinct)


def _by_grid(axes: list[tuple[Integers, int]], shape: tuple[int, ...], value: Column, first_axis: int) -> Integers:
    cell = axes[0][0]
    for ranks, size in axes[1:]:
        cell = cell * size + ranks
    best = np.full(int(np.prod(shape)), np.inf)
    np.minimum.at(best, cell, value.astype(np.float64, copy=False))
    grid = best.reshape(shape)
    prefix = grid.copy()
    for axis in range(first_axis, len(shape)):
        np.minimum.accumulate(prefix, axis=axis, out=prefix)
    stays = np.isfinite(grid)
    for axis in range(first_axis, len(shape)):
        later = (slice(None),) * axis + (slice(1, None),)
        earlier = (slice(None),) * axis + (slice(None, -1),)
        stays[later] &= grid[later] < prefix[earlier]
    attains = np.flatnonzero(stays.reshape(-1)[cell] & (value == best[cell]))
    one = np.empty(len(best), np.int64)
    one[cell[attains]] = attains
    return one[np.flatnonzero(stays)]


def _by_comparison(columns: list[Column], apart: Integers | None) -> Integers:
    """After sorting, only earlier vectors can dominate later ones."""
    order = np.lexsort(columns[::-1])
    if apart is not None:
        order = order[np.argsort(apart[order], kind="stable")]
    groups = np.zeros(len(order), np.int64) if apart is None else apart[order]
    ends = np.flatnonzero(np.diff(groups)) + 1
    vectors = np.stack([column[order].astype(np.float64) for column in columns], axis=1)
    kept = [
        begin + _front(vectors[begin:end])
        for begin, end in zip([0, *ends.tolist()], [*ends.tolist(), len(order)], strict=True)
    ]
    return order[np.concatenate(kept)]


def _front(vectors: npt.NDArray[np.float64]) -> Integers:
    """Of lexicographically sorted rows."""
    kept = np.empty(0, np.int64)
    for begin in range(0, len(vectors), BLOCK):
        rows = np.arange(begin, min(begin + BLOCK, len(vectors)))
        rows = rows[~_covered(vectors[kept], vectors[rows]).any(axis=1)]
        inside = _covered(vectors[rows], vectors[rows])
        kept = np.concatenate([kept, rows[~np.tril(inside, -1).any(axis=1)]])
    return kept


def _covered(some: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """[others, some]: whether the one is no better than the other in any coordinate."""
    covered = np.ones((len(others), len(some)), np.bool_)
    for coordinate in range(some.shape[1]):
        covered &= some[None, :, coordinate] <= others[:, None, coordinate]
    return covered
