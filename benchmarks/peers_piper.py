"""The least bottleneck of Piper's inputs (msr-fiddle/piper, 2021), with a proof that there is none below.

Where a graph has many ideals, a plan for one topological order first bounds the bottleneck T from above, and then
few stages can be part of a better one: all before a stage needs at least work / T devices, so does all behind it.
Past a limit the plan for that one order is the answer, and the bound is all work spread evenly.
"""

import math
import time
from dataclasses import dataclass

import numpy as np
from peers_piper_graph import LayerGraph, Mask, list_ideals, nested_pairs, read_graph
from peers_piper_problem import PiperProblem, Setting, StagePlan
from peers_piper_recompute import Stages

from dpart.partitioner.fewest import Bottleneck, least_bottleneck
from dpart.partitioner.states import depth_first_order

MAX_IDEALS = 40_000

FEW_IDEALS = 400
"""Up to so many, all their pairs are taken at once."""

MAX_STAGES = 3_000_000

ROUNDING = 1e-9


@dataclass(frozen=True)
class Answer:
    """What the search found.

    Attributes:
        value: Seconds per microbatch (in the file's unit of time); None where nothing was found.
        lower_bound: No plan is below this; None where it is proven that there is no plan.
        seconds: From reading the file to the answer.
        stages: First to last.
    """

    value: float | None
    lower_bound: float | None
    seconds: float
    stages: tuple[StagePlan, ...]


def optimize(path: str, setting: Setting, num_layers: int | None = None) -> Answer:
    """Read a file and find the plan of least bottleneck.

    Raises:
        InputError: It is no input of Piper.
        OSError: It cannot be read.
    """
    began = time.perf_counter()
    graph = read_graph(path, num_layers)
    problem, found, bound = _search(graph, setting)
    if problem is None or found is None:
        return Answer(None, bound, time.perf_counter() - began, ())
    return Answer(found.seconds, bound, time.perf_counter() - began, problem.stage_plans(found))


def _search(graph: LayerGraph, setting: Setting) -> tuple[PiperProblem | None, Bottleneck | None, float | None]:
    """The best plan, and the lower bound of all; with neither, there is none."""
    if _too_large(graph, setting):
        return None, None, None
    lower, upper = work_bound(graph, setting), math.inf
    problem, found = None, None
    ideals = list_ideals(graph.predecessors(), MAX_IDEALS)
    if ideals is None or len(ideals) > FEW_IDEALS:
        problem = PiperProblem(graph, setting, _chain(graph, setting))
        found = _solve(problem, setting, lower, upper)
        upper = math.inf if found is None else found.seconds * (1 + ROUNDING)
    stages = None if ideals is None else _promising(graph, setting, ideals, upper)
    if stages is None:
        return problem, found, lower
    problem = PiperProblem(graph, setting, stages)
    found = _solve(problem, setting, lower, upper)
    if setting.exact_recompute and not problem.exact:
        return problem, found, lower
    return problem, found, None if found is None else found.seconds


def _solve(problem: PiperProblem, setting: Setting, lower: float, upper: float) -> Bottleneck | None:
    return least_bottleneck(problem, lower_bound=lower, upper_bound=upper, max_replicas=setting.max_replicas)


def work_bound(graph: LayerGraph, setting: Setting) -> float:
    """What the bottleneck cannot be below: all work, spread evenly over devices, and over replicas."""
    seconds = np.array([np.where(v.present, v.seconds, np.inf) for v in graph.variants])
    per_device = (seconds * np.array(graph.degrees)[:, None]).min(axis=0).sum() / setting.num_devices
    return float(max(per_device, seconds.min(axis=0).sum() / setting.max_replicas)) * (1 - ROUNDING)


def _too_large(graph: LayerGraph, setting: Setting) -> bool:
    """Whether some layer fits on no device, even alone, recomputing and once in flight."""
    saved = [np.maximum(0, v.saved_stash_bytes + v.saved_static_bytes) for v in graph.variants]
    need = [
        np.where(v.present, v.stash_bytes + v.static_bytes - save, np.inf)
        for v, save in zip(graph.variants, saved, strict=True)
    ]
    return bool((np.minimum.reduce(need) > setting.memory_bytes).any())


def _chain(graph: LayerGraph, setting: Setting) -> Stages:
    """All stages of one topological order."""
    order = depth_first_order(graph.predecessors())
    member = np.zeros((len(order) + 1, len(order)), np.bool_)
    member[:, order] = np.tri(len(order) + 1, len(order), -1, dtype=np.bool_)
    start, stop = (ends.astype(np.int64) for ends in np.triu_indices(len(member), 1))
    room, most = (np.full_like(start, number) for number in (setting.num_devices, setting.max_replicas))
    return Stages(member, start, stop, room, most)


def _promising(graph: LayerGraph, setting: Setting, ideals: Mask, upper: float) -> Stages | None:
    """Stages that a plan with a bottleneck up to `upper` may have; None if there are more than `MAX_STAGES`.

    A device does at most `upper` of work, so much is left for a stage. Ideals that no stage needs are left out.
    """
    seconds = np.array([np.where(v.present, v.seconds, np.inf) for v in graph.variants])
    per_layer = (seconds * np.array(graph.degrees)[:, None]).min(axis=0)
    limit = upper * (1 + ROUNDING)
    work = ideals @ per_layer
    front, behind = (np.ceil(part / limit - ROUNDING).astype(np.int64) for part in (work, work[-1] - work))
    useful = np.flatnonzero(front + behind <= setting.num_devices)
    member, front, behind = ideals[useful], front[useful], behind[useful]
    totals = [member @ v.seconds for v in graph.variants]
    divisors = np.append(setting.divisors(), np.iinfo(np.int32).max)
    parts, count = [], 0
    for start, stop in nested_pairs(member, np.arange(len(member))):
        room = setting.num_devices - front[start] - behind[stop]
        fits = np.zeros(len(start), np.bool_)
        for degree, total in zip(graph.degrees, totals, strict=True):
            fewest = np.searchsorted(divisors, (total[stop] - total[start]) / limit - ROUNDING)
            fits |= divisors[fewest] * degree <= room
        parts.append((start[fits], stop[fits], room[fits]))
        count += len(parts[-1][0])
        if count > MAX_STAGES:
            return None
    start, stop, room = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    most = np.minimum(setting.max_replicas, setting.num_devices - front[start])
    return Stages(member, start, stop, room, most)
