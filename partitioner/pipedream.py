"""`method="pipedream"`: the antichain dynamic programme of Narayanan et al., "PipeDream" (SOSP 2019).

Levels of the topology are solved inside out: the best value of a stage on one machine of a level is its
compute time on the level above. Within a level the paper splits the last stage off, A(i, j, m) = min over k,
r of max(A(i, k, m - r), stage(k, j, r)). We split the first stage off instead, which covers the same plans:
machines are then counted from the end, so what stands behind a stage, and with it the microbatches it holds,
is known whatever the total, and one pass answers for every count of machines::

    tail(k, j, u) = min( stage(k, j, u),   min over l, r of max(stage(k, l, r), tail(l, j, u - r)) )
    best(i, j, u) = min( unsplit(i, j, u), min over k, r of max(unsplit(i, k, r), tail(k, j, u - r)) )

Inner levels need this for every (i, j), about S^3 / 6 steps for each pair (u, r); the outermost level only
for the whole graph, S^2. Plans are read back from the tables; nothing but the values is stored for inner
levels.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpart.partitioner.search import Found, LevelStage, Matrix, Problem, flatten

_Row = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.intp]


def search(problem: Problem) -> Found | None:
    """The plan with the smallest bottleneck, of the fewest machines where counts tie; None if none fits."""
    counts = range(1, problem.machines[-1] + 1) if problem.use_fewer else (problem.machines[-1],)
    found = _search_counts(problem, counts)
    return min(found.values(), key=lambda f: f.bottleneck_seconds, default=None)


def search_each(problem: Problem) -> dict[int, Found]:
    """The best plan for each exact count of the outermost level's machines, by count; those that fit only."""
    return _search_counts(problem, range(1, problem.machines[-1] + 1))


def solve_level(problem: Problem, level: int, inner: Matrix) -> Matrix:
    """The best value of every (i, j) on one machine of the level above: on all machines of this level."""
    return _solve_inner(problem, level, inner).best


def split_level(
    problem: Problem, level: int, inner: Matrix, pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], tuple[LevelStage, ...]]:
    """Best plans of some (i, j), each feasible, on all machines of an inner level."""
    return _read_back(problem, level, _solve_inner(problem, level, inner), pairs)


def _search_counts(problem: Problem, counts: Sequence[int]) -> dict[int, Found]:
    began = time.perf_counter()
    solved: list[_Inner] = []
    inner = problem.compute_seconds()
    for level in range(len(problem.machines) - 1):
        solved.append(_solve_inner(problem, level, inner))
        inner = solved[-1].best
    outermost = _solve_outermost(problem, inner, counts)
    plans = {count: [stages] for count, (_, stages) in outermost.items()}
    for level in reversed(range(len(solved))):
        pairs = sorted({(s.start, s.stop) for plan in plans.values() for s in plan[-1]})
        split = _read_back(problem, level, solved[level], pairs)
        for plan in plans.values():
            plan.append(tuple(part for s in plan[-1] for part in split[s.start, s.stop]))
    seconds = time.perf_counter() - began
    return {
        count: Found(flatten(plans[count]), value, True, value, seconds, tuple(plans[count]))
        for count, (value, _) in outermost.items()
    }


def _solve_outermost(
    problem: Problem, inner: Matrix, counts: Sequence[int]
) -> dict[int, tuple[float, tuple[LevelStage, ...]]]:
    """By count of machines: the value of the whole graph and the stages of this level."""
    level, last = len(problem.machines) - 1, len(inner) - 1
    tails: dict[int, _Row] = {}
    choices: dict[int, list[_Indices]] = {}
    for used in range(1, max(counts)):
        tails[used], *choice = _first_of(
            lambda r, after: problem.stage_seconds(level, r, after, inner), used, tails, last
        )
        choices[used] = choice
    found = {}
    for count in counts:
        value, replicas, stop = _first_of(
            lambda r, after: problem.unsplit_seconds(level, r, after, inner)[:1], count, tails, last
        )
        if np.isinf(value[0]):
            continue
        used = count - int(replicas[0])
        stages = [LevelStage(0, int(stop[0]), int(replicas[0]), used)]
        while used:
            start = stages[-1].stop
            num_machines, end = (int(choice[start]) for choice in choices[used])
            used -= num_machines
            stages.append(LevelStage(start, end, num_machines, used))
        found[count] = (float(value[0]), tuple(stages))
    return found


def _first_of(
    costs: Callable[[int, int], Matrix], used: int, tails: dict[int, _Row], last: int
) -> tuple[_Row, _Indices, _Indices]:
    """For each start, up to the last state on `used` machines: best value, its first stage's machines and end.

    Ties go to a single stage, else to the plan whose remainder is the faster: the evener of the two.
    """
    value = costs(used, 0)[:, last].copy()
    rest = np.zeros_like(value)
    replicas = np.full(len(value), used)
    stop = np.full(len(value), last)
    rows = np.arange(len(value))
    for r in range(1, used):
        tail = tails[used - r]
        joined = np.maximum(costs(r, used - r), tail)
        least = joined.min(axis=1)
        end = np.where(joined == least[:, None], tail, np.inf).argmin(axis=1)
        better = (least < value) | ((least == value) & (tail[end] < rest))
        chosen = rows[better]
        value[chosen], rest[chosen] = least[chosen], tail[end[chosen]]
        replicas[chosen], stop[chosen] = r, end[chosen]
    return value, replicas, stop


@dataclass(frozen=True)
class _Inner:
    """An inner level, solved: `best` on all its machines, and `tails` on fewer of them at its end."""

    inner: Matrix
    tails: dict[int, Matrix]
    best: Matrix


def _solve_inner(problem: Problem, level: int, inner: Matrix) -> _Inner:
    machines = problem.machines[level]
    tails: dict[int, Matrix] = {}
    for used in range(1, machines):
        tail = problem.stage_seconds(level, used, 0, inner).copy()
        for r in range(1, used):
            _join(tail, problem.stage_seconds(level, r, used - r, inner), tails[used - r])
        tails[used] = tail
    best = problem.unsplit_seconds(level, machines, 0, inner).copy()
    for r in range(1, machines):
        _join(best, problem.unsplit_seconds(level, r, machines - r, inner), tails[machines - r])
    return _Inner(inner, tails, best)


def _join(value: Matrix, head: Matrix, tail: Matrix) -> None:
    """Lower value[i, j] to the least over k of max(head[i, k], tail[k, j]), in place; i < k < j."""
    for k in range(1, len(value) - 1):
        column = head[:k, k]
        (rows,) = np.nonzero(column < np.inf)
        if not len(rows):
            continue
        low = int(rows[0])
        part = value[low:k, k + 1 :]
        np.minimum(part, np.maximum(column[low:, None], tail[k, k + 1 :]), out=part)


def _read_back(
    problem: Problem, level: int, solved: _Inner, pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], tuple[LevelStage, ...]]:
    """The stages of this level that attain best[i, j], for each pair.

    All pairs are followed at once from many machines to few, so that each cost matrix is asked for once.
    """
    plans: dict[tuple[int, int], tuple[LevelStage, ...]] = {}
    machines = problem.machines[level]
    open_at: dict[int, list[tuple[tuple[int, int], tuple[LevelStage, ...]]]] = defaultdict(list)
    open_at[machines] = [(pair, ()) for pair in pairs]
    for used in range(machines, 0, -1):
        if not open_at[used]:
            continue
        options: dict[tuple[int, int], tuple[float, float, LevelStage]] = {}
        for r in range(used, 0, -1):
            ask = problem.stage_seconds if used < machines else problem.unsplit_seconds
            costs = ask(level, r, used - r, solved.inner)
            for pair, done in open_at[used]:
                start = done[-1].stop if done else pair[0]
                option = _best_first(costs, solved.tails.get(used - r), start, pair[1], r, used - r)
                if pair not in options or option[:2] < options[pair][:2]:
                    options[pair] = option
        for pair, done in open_at[used]:
            stage = options[pair][2]
            if stage.after:
                open_at[stage.after].append((pair, (*done, stage)))
            else:
                plans[pair] = (*done, stage)
    return plans


def _best_first(
    costs: Matrix, tail: Matrix | None, start: int, stop: int, num_machines: int, after: int
) -> tuple[float, float, LevelStage]:
    """(value, value of what follows, first stage) of the best plan from `start` to `stop` that begins so."""
    if tail is None:
        return float(costs[start, stop]), 0.0, LevelStage(start, stop, num_machines, after)
    rest = tail[start + 1 : stop, stop]
    if not len(rest):
        return np.inf, np.inf, LevelStage(start, stop, num_machines, after)
    joined = np.maximum(costs[start, start + 1 : stop], rest)
    end = int(np.lexsort((rest, joined))[0])
    stage = LevelStage(start, start + 1 + end, num_machines, after)
    return float(joined[end]), float(rest[end]), stage
