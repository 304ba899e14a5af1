"""Bounds of a step's seconds that need no schedule: what a searcher prunes with. None is ever above the simulator.

Stages stand in a chain. Follow a microbatch: to reach stage s it takes ``head``, from there to the last stage and
back ``trip``, from its backward there to the end of the step ``after``::

    stage 0  F─┐ head                     ┌─B  all-reduce
    stage s    └─F─┐ trip            ┌─B──┘ after
    stage p        └──F──────────B───┘

Replica 0 of stage s has n = ceil(m / r) microbatches, w of their forwards before its first backward. The step takes
at least each of

    head + n (f + b) + after                                its own work
    head + f + trip + n b + (n - w) f + after               the first microbatch's trip before any backward
    head + n f + (n - w) b + trip + b + after               the last microbatch's trip behind all forwards
    head + f + n (messages out) + latency + after           its port

Strict 1F1B has w = ceil((replicas from s on) / r), GPipe n. Where weight backwards run apart, b in paths is the
backward without them. Formulas that are exact for simple pipelines are in `formulas`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dpart.partitioner.timing import StageTime


@dataclass(frozen=True)
class Transfer:
    """A message of a full microbatch between two neighbours, one way: the fastest that any two replicas have.

    Attributes:
        send_seconds: How long it holds the sender's port: bytes / bandwidth.
    """

    latency_seconds: float
    send_seconds: float = 0.0

    def seconds(self, size: float) -> float:
        """From the sender's end to the receiver's start, for a microbatch of that share of the rows."""
        return self.latency_seconds + size * self.send_seconds


@dataclass(frozen=True)
class Pipeline:
    """A synchronous step of a plan whose stages form a chain.

    Attributes:
        num_replicas: Of each stage.
        in_flight: Of replica 0 of each stage at the peak, as the schedule has it. For zb-h1 that of 1F1B will do
            and bounds better: forwards before the first backward are what counts.
        forward: From each stage to the next one; None where that does not wait for it. Stages that exchange
            values over others only add to the time, and need not be told.
        backward: From each stage's successor back to it.
        last_microbatch: Rows of the last microbatch as a share of a full one.
        num_buckets: Parts of an all-reduce.
        weights_apart: Whether the schedule has weight backwards (zb-h1).
    """

    stages: Sequence[StageTime]
    num_replicas: Sequence[int]
    in_flight: Sequence[int]
    num_microbatches: int
    forward: Sequence[Transfer | None]
    backward: Sequence[Transfer | None]
    last_microbatch: float = 1.0
    num_buckets: int = 1
    weights_apart: bool = False


class Paths:
    """For a microbatch of one size, its seconds before, behind and after every stage."""

    def __init__(self, pipeline: Pipeline, size: float) -> None:
        stages, count = pipeline.stages, len(pipeline.stages)
        self.backward = [t.backward_seconds - pipeline.weights_apart * t.weight_backward_seconds for t in stages]
        self.head, self.trip = [0.0] * count, [0.0] * count
        self.after = [_closing(pipeline, s, size) for s in range(count)]
        for s in range(1, count):
            forward, backward = pipeline.forward[s - 1], pipeline.backward[s - 1]
            if forward is not None:
                self.head[s] = self.head[s - 1] + size * stages[s - 1].forward_seconds + forward.seconds(size)
            if backward is not None:
                back = backward.seconds(size) + size * self.backward[s - 1] + self.after[s - 1]
                self.after[s] = max(self.after[s], back)
        for s in reversed(range(count - 1)):
            forward, backward = pipeline.forward[s], pipeline.backward[s]
            if forward is not None and backward is not None:
                computing = size * (stages[s + 1].forward_seconds + self.backward[s + 1])
                self.trip[s] = forward.seconds(size) + computing + self.trip[s + 1] + backward.seconds(size)


def _closing(pipeline: Pipeline, s: int, size: float) -> float:
    """What stage s has still to do after a backward of the given size that is the last, or an earlier one."""
    time = pipeline.stages[s]
    apart = size * time.weight_backward_seconds if pipeline.weights_apart else 0.0
    last = apart if pipeline.weights_apart else size * time.backward_seconds
    return apart + exposed_seconds(time.all_reduce_seconds, last, pipeline.num_buckets)


def exposed_seconds(all_reduce: float, last: float, num_buckets: int) -> float:
    """How long an all-reduce goes on after the backward of `last` seconds that it is overlapped with."""
    return max(all_reduce / num_buckets, all_reduce - (1 - 1 / num_buckets) * last)


def step_lower_bound(pipeline: Pipeline) -> float:
    """At least this many seconds does a step take with ``1f1b`` of any depth, ``gpipe`` or ``zb-h1``.

    Also with any other schedule that has one stage a worker and the microbatches in order.
    """
    full, final = Paths(pipeline, 1.0), Paths(pipeline, pipeline.last_microbatch)
    bound = 0.0
    for s, r in enumerate(pipeline.num_replicas):
        # Replica 0 has as many microbatches as any; the one with the last, smaller microbatch may be another.
        for q in {0, (pipeline.num_microbatches - 1) % r}:
            bound = max(bound, _replica_bound(pipeline, s, q, full, final))
    return bound


def _replica_bound(pipeline: Pipeline, s: int, q: int, full: Paths, final: Paths) -> float:
    m, r, time = pipeline.num_microbatches, pipeline.num_replicas[s], pipeline.stages[s]
    n = len(range(q, m, r))
    ends = q + (n - 1) * r == m - 1
    last_size, last = (pipeline.last_microbatch, final) if ends else (1.0, full)
    first_size, first = (last_size, last) if n == 1 else (1.0, full)
    f, b = time.forward_seconds, full.backward[s]
    all_sizes, w = n - 1 + last_size, min(n, pipeline.in_flight[s])
    late_sizes = n - w - 1 + last_size if n > w else 0.0
    head = first.head[s]
    bounds = [
        head + all_sizes * (f + b) + last.after[s],
        head + first_size * f + first.trip[s] + all_sizes * b + late_sizes * f + last.after[s],
        head + all_sizes * f + (n - w) * b + last.trip[s] + last_size * b + last.after[s],
        head + first_size * f + _sending(pipeline, s, (first_size, all_sizes, last_size), last),
    ]
    if pipeline.weights_apart:
        weights = time.weight_backward_seconds
        exposed = exposed_seconds(time.all_reduce_seconds, last_size * weights, pipeline.num_buckets)
        bounds.append(head + all_sizes * (f + b + weights) + exposed)
    return max(bounds)


def _sending(pipeline: Pipeline, s: int, sizes: tuple[float, float, float], last: Paths) -> float:
    """From the end of a replica's first forward to the end of the step, by what leaves through its port.

    Args:
        sizes: Of the replica's first microbatch, of all together, of the last one.
    """
    first_size, all_sizes, last_size = sizes
    forward = pipeline.forward[s] if s + 1 < len(pipeline.stages) else None
    backward = pipeline.backward[s - 1] if s else None
    seconds = all_sizes * sum(way.send_seconds for way in (forward, backward) if way)
    if forward is None:
        seconds += first_size * last.backward[s]
    if backward is not None:
        return seconds + backward.latency_seconds + last_size * last.backward[s - 1] + last.after[s - 1]
    if forward is not None:
        return seconds + forward.latency_seconds + last_size * pipeline.stages[s + 1].forward_seconds
    return seconds


def interleaved_lower_bound(pipeline: Pipeline, chunks: int) -> float:
    """At least this many seconds does a step of the interleaved schedule take, with `chunks` stages a worker.

    A worker's first microbatch reaches the lowest of its stages by ``head``; then it computes all of them; what it
    does last is a backward, from which the step takes ``after``.
    """
    full, final = Paths(pipeline, 1.0), Paths(pipeline, pipeline.last_microbatch)
    num_workers, m, r = len(pipeline.stages) // chunks, pipeline.num_microbatches, pipeline.num_replicas[0]
    bound = 0.0
    for w, q in itertools.product(range(num_workers), {0, (m - 1) % r}):
        n = len(range(q, m, r))
        ends = q + (n - 1) * r == m - 1
        sizes = n - 1 + (pipeline.last_microbatch if ends else 1.0)
        head = (final if ends and n == 1 else full).head[w]
        hosted = range(w, len(pipeline.stages), num_workers)
        work = sum(pipeline.stages[s].forward_seconds + pipeline.stages[s].backward_seconds for s in hosted)
        bound = max(bound, head + sizes * work + min(path.after[s] for path in (full, final) for s in hosted))
    return bound
