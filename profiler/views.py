"""Where a view puts a dimension that the ranks of a group share out."""

import math


def place_in_view(before: tuple[int, ...], after: tuple[int, ...], dim: int, degree: int) -> int | None:
    """Where a view puts the dimension that is shared out; None where its parts are no part of the view.

    A dimension that is taken apart is shared out by the outermost of its parts that the degree divides: which of its
    indices a rank has is free, as long as all ranks have as many.
    """
    for ins, outs in _groups(before, after):
        if dim not in ins:
            continue
        outer = math.prod(before[d] for d in ins if d < dim)
        for out in outs:
            inside = math.prod(after[d] for d in outs if d < out)
            if inside == outer and after[out] == before[dim]:
                return out
        if outer != 1 or before[dim] % degree:
            return None
        for out in outs:
            inside = math.prod(after[d] for d in outs if d < out)
            if after[out] % degree == 0 and inside < before[dim]:
                return out
    return None


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions that hold as many elements before as after."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins: list[int] = []
        outs: list[int] = []
        sizes_in = sizes_out = 1
        while not ins or not outs or sizes_in != sizes_out:
            if i < len(before) and (not ins or sizes_in < sizes_out or j == len(after)):
                sizes_in *= before[i]
                ins.append(i)
                i += 1
            elif j < len(after):
                sizes_out *= after[j]
                outs.append(j)
                j += 1
            else:
                break
        groups.append((ins, outs))
    return groups
