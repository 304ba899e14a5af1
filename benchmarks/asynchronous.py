"""Asynchronous pipelines on hosts of equal devices: the value of a plan, and the best plan of all.

Stages stand side by side on the devices in their order; each has one run of them. A plan's period is the largest of

    computing / replicas        sending / replicas        all-reduce / replicas

over its stages. A stage sends activations forward and gradients back, each at the speed of the link that joins it to
that neighbour: the host's where both lie in one host, else the network's. So a stage's value depends on its two
neighbours, but only through one bit at each of its ends::

    hosts     | 0  1  2  3 | 4  5  6  7 |        at b = 2: in one host, since A begins and B ends in it
    stages      A  A | B  B   C | D ...          at b = 4: not
               0     b     c   d

`best_plan` goes from device to device with the bit in its state, and is exact over all cuts, replicas and places of
this form, on all devices or on the first few. Memory is no part of it: the published profiles do not say what the
backward keeps.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

import numpy as np

from dpart.partitioner.bounds import Pipeline, Transfer
from dpart.partitioner.contraction import contract
from dpart.partitioner.cost import all_reduce_seconds
from dpart.partitioner.formulas import asynchronous_period
from dpart.partitioner.quantities import measure
from dpart.partitioner.search import FoundStage, Mask, Matrix
from dpart.partitioner.timing import StageTime
from dpart.partitioner.topology import Level, Topology
from dpart.partitioner.units import format_bytes
from dpart.profiler.profile import Profile
from dpart.runtime.schedule import SCHEDULES, Replica

Plan = tuple[FoundStage, ...]

Span = tuple[int, int]
"""The first device of a stage, and the first behind it."""

_HOST, _NETWORK = 0, 1

_MAX_STATES = 1000


@dataclass(frozen=True)
class Costs:
    """Of every pair of states, [S, S] matrices.

    Attributes:
        member: [S, L]: whether layer l is in state s; row 0 is empty, the last row is full.
        units: [U, L]: layers that no cut separates, in an order in which they can run.
        complete: Whether the states are all ideals of the graph.
        heaviest_seconds: Of the heaviest layer.
        seconds: Forward and backward; infinite where the pair is no stage.
        trainable_bytes: All-reduced among replicas.
        sent_bytes: Activations to later stages.
        returned_bytes: Gradients to earlier stages.
    """

    member: Mask
    units: Mask
    complete: bool
    heaviest_seconds: float
    seconds: Matrix
    trainable_bytes: Matrix
    sent_bytes: Matrix
    returned_bytes: Matrix


def costs_of(profile: Profile) -> Costs:
    """The costs over every cut, or where there are too many over those of one order of the layers."""
    cuts = contract(profile, max_states=_MAX_STATES)
    quantities = measure(profile, cuts.member)
    rows = cuts.member.astype(np.float64)
    nested = (rows @ rows.T == rows.sum(axis=1)[:, None]) & ~np.eye(len(rows), dtype=np.bool_)
    return Costs(
        member=cuts.member,
        units=cuts.units,
        complete=cuts.complete,
        heaviest_seconds=max(cost.forward_seconds + cost.backward_seconds for cost in profile.costs),
        seconds=np.where(nested, quantities.forward_seconds + quantities.backward_seconds, np.inf),
        trainable_bytes=quantities.trainable_bytes,
        sent_bytes=quantities.sent_bytes,
        returned_bytes=quantities.returned_bytes,
    )


def evaluate(costs: Costs, topology: Topology, plan: Plan) -> float:
    """The period of a plan."""
    replicas = [stage.num_replicas for stage in plan]
    schedule = SCHEDULES["pipedream"](replicas, max(replicas))
    return asynchronous_period(
        _pipeline(costs, topology, plan), [schedule.microbatches_per_update(s) for s in range(len(plan))]
    )


def _pipeline(costs: Costs, topology: Topology, plan: Plan) -> Pipeline:
    replicas = [stage.num_replicas for stage in plan]
    schedule = SCHEDULES["pipedream"](replicas, max(replicas))
    spans = list(_spans(replicas))
    links = [topology.level_of(range(a[0], b[1])) for a, b in pairwise(spans)]
    return Pipeline(
        stages=[_stage_time(costs, topology, stage, span) for stage, span in zip(plan, spans, strict=True)],
        num_replicas=replicas,
        in_flight=[schedule.peak_in_flight(Replica(s, 0)) for s in range(len(plan))],
        num_microbatches=max(replicas),
        forward=[_transfer(costs.sent_bytes, stage, link) for stage, link in zip(plan[:-1], links, strict=True)],
        backward=[_transfer(costs.returned_bytes, stage, link) for stage, link in zip(plan[1:], links, strict=True)],
    )


def _stage_time(costs: Costs, topology: Topology, stage: FoundStage, span: Span) -> StageTime:
    pair = stage.start, stage.stop
    return StageTime(float(costs.seconds[pair]), 0.0, float(_all_reduce(costs, topology, span)[pair]))


def _transfer(size: Matrix, stage: FoundStage, link: Level) -> Transfer:
    return Transfer(link.latency_seconds, float(size[stage.start, stage.stop]) / link.bandwidth_bytes_per_second)


def bindings(costs: Costs, topology: Topology, plan: Plan) -> list[str]:
    """What each stage would hold the plan up with, in words, the most first."""
    pipeline = _pipeline(costs, topology, plan)
    found = []
    for s, (stage, time) in enumerate(zip(plan, pipeline.stages, strict=True)):
        r, place = stage.num_replicas, f"stage {s} of {len(plan)}" if len(plan) > 1 else "the one stage"
        if time.forward_seconds <= costs.heaviest_seconds * (1 + 1e-9):
            place += ", no more than the heaviest layer"
        many = f", shared by {r} replicas" if r > 1 else ""
        size = format_bytes(int(costs.trainable_bytes[stage.start, stage.stop]))
        hops = (*pipeline.forward[s : s + 1], *pipeline.backward[max(s - 1, 0) : s])
        sending = sum(hop.send_seconds for hop in hops if hop is not None)
        found += [
            (time.forward_seconds / r, f"the computing of {place}{many}"),
            (sending / r, f"what {place} sends to its neighbours"),
            (time.all_reduce_seconds / r, f"the all-reduce of {place}, {size} among {r} replicas"),
        ]
    return [f"{words} ({1e3 * seconds:.3f} ms)" for seconds, words in sorted(found, reverse=True)]


def keeps_to_hosts(topology: Topology, plan: Plan) -> bool:
    """Whether all replicas of every stage stand in one host."""
    spans = _spans([stage.num_replicas for stage in plan])
    return all(topology.level_of(range(*span)) == topology.levels[0] for span in spans)


def _spans(replicas: Sequence[int]) -> Iterator[Span]:
    """Of stages side by side from device 0 on."""
    return pairwise((0, *accumulate(replicas)))


def in_a_row(replicas: Sequence[int]) -> set[Span]:
    """The spans that leave no other replicas to `best_plan` than these."""
    return set(_spans(replicas))


def _all_reduce(costs: Costs, topology: Topology, span: Span) -> Matrix:
    return all_reduce_seconds(costs.trainable_bytes, topology.levels, topology.ring_sizes(range(*span)))


def even_split(costs: Costs, topology: Topology) -> Plan:
    """The best plan on all devices, or as many as divide, with as many units and replicas in every stage."""
    state = {row.tobytes(): i for i, row in enumerate(costs.member)}
    best: tuple[float, Plan] | None = None
    for depth in range(1, min(topology.num_devices, len(costs.units)) + 1):
        parts = np.array_split(np.arange(len(costs.units)), depth)
        cuts = [state[costs.units[: part[-1] + 1].any(axis=0).tobytes()] for part in parts]
        replicas = topology.num_devices // depth
        plan = tuple(FoundStage(i, j, replicas) for i, j in pairwise((0, *cuts)))
        value = evaluate(costs, topology, plan)
        if best is None or value < best[0]:
            best = value, plan
    assert best is not None
    return best[1]


def best_plan(costs: Costs, topology: Topology, spans: Collection[Span] | None = None) -> Plan | None:
    """The plan of smallest period, on the fewest devices where periods tie; None if there is none.

    Args:
        topology: Of two levels.
        spans: Devices that a stage may have, the last device among them; None for any, on all devices or fewer.
    """
    assert len(topology.levels) == 2 and topology.is_uniform, "hosts of equal devices"
    count, host, last = topology.num_devices, topology.group_sizes[0], len(costs.seconds) - 1
    value = np.full((count + 1, 2, last + 1), np.inf)
    value[0, _NETWORK, 0] = 0.0
    came = np.zeros((count + 1, 2, last + 1, 3), dtype=np.intp)
    for b, c in sorted(spans) if spans is not None else combinations(range(count + 1), 2):
        held = np.maximum(costs.seconds, _all_reduce(costs, topology, (b, c)))
        # In one host with the stage before: that begins in it (see below), and this one ends in it.
        before = [_NETWORK] + [_HOST] * (b % host > 0 and c <= b - b % host + host)
        after = [_NETWORK] + [_HOST] * (c % host > 0 and b >= c - c % host)
        for i in before:
            back = costs.returned_bytes / topology.levels[i].bandwidth_bytes_per_second
            for o in after:
                sending = back + costs.sent_bytes / topology.levels[o].bandwidth_bytes_per_second
                reached = np.maximum(value[b, i][:, None], np.maximum(held, sending) / (c - b))
                start = reached.argmin(axis=0)
                least = reached[start, np.arange(last + 1)]
                better = least < value[c, o]
                value[c, o, better] = least[better]
                came[c, o, better] = np.stack([np.full(last + 1, b), np.full(last + 1, i), start], axis=1)[better]
    least = value[:, _NETWORK, last]
    used = int(least.argmin()) if spans is None else max(stop for _, stop in spans)
    return _read_back(came, used, last) if least[used] < np.inf else None


def _read_back(came: np.ndarray, used: int, last: int) -> Plan:
    stages: list[FoundStage] = []
    c, o, j = used, _NETWORK, last
    while c:
        b, i, start = came[c, o, j].tolist()
        stages.append(FoundStage(start, j, c - b))
        c, o, j = b, i, start
    return tuple(reversed(stages))
