"""Formulas for the seconds of simple pipelines, each with the conditions under which the simulator says the same.

What they are for: to understand a timeline, and to rate asynchronous schedules. Plans are ranked by the simulator.
With f, b, c of a stage's forward, backward and message, m microbatches over p stages of v chunks::

    1f1b          period = max over s <= e of ( sum (f + b) + 2 sum c ) / (1 + w_s - w_e)
    gpipe         sum (f + b) + (m - 1) (max f + max b) + 2 sum c
    interleaved   (v m + p - 1) (f + b)
    zb-h1         m (f + b) + (p - 1) (f + b - 2 weight backward)
    pipedream     period = max of computing, sending, all-reducing
"""

import math
from collections.abc import Sequence

from dpart.partitioner.bounds import Pipeline, exposed_seconds
from dpart.partitioner.timing import StageTime


def steady_period(pipeline: Pipeline) -> float:
    """Seconds from one microbatch to the next in the steady state of 1F1B, all stages having as many replicas.

    Between two stages s <= e a microbatch goes forth and back while at most 1 + w_s - w_e of them are on the way.
    Exact where messages do not queue (`send_seconds` 0), for strict 1F1B and for deeper warm-ups; any other
    traffic takes longer.
    """
    return _column_period(pipeline) / _columns(pipeline)


def upper_bound(pipeline: Pipeline) -> float:
    """At most this many seconds does a step of 1F1B take, strict or deeper, all stages having as many replicas.

    Holds where messages do not queue (`send_seconds` 0) and none goes past a stage. It is the time of a run that is
    never early: warm-ups go at the pace of the slowest forward so far, and then everything happens once a steady
    period P. What is sought are the earliest such times that respect rows and messages, namely of every stage the
    first backward B and the first forward F after the warm-up of w forwards; a fixed point of

        B  >=  warm-up done,  B of the next stage + its b + c,  F + f - P
        F  >=  B + b,         F of the stage before + its f + c - P (w of the stage before - w)

    The simpler (m - 1) P + sum (f + b) + 2 sum c is no bound: stages whose forwards and backwards are slow at
    different places can exceed it.
    """
    period, stages = _column_period(pipeline), pipeline.stages
    n = math.ceil(pipeline.num_microbatches / _columns(pipeline))
    backward, forward = _warm_ups(pipeline, n)
    for _ in range(2 * len(stages)):  # No path of constraints passes one of the 2 p times twice.
        moved = False
        for s, time in enumerate(stages):
            early = [backward[s] + time.backward_seconds]
            if (hop := pipeline.forward[s - 1] if s else None) is not None:
                lag = period * (pipeline.in_flight[s - 1] - pipeline.in_flight[s])
                early.append(forward[s - 1] + stages[s - 1].forward_seconds + hop.seconds(1.0) - lag)
            forward[s], moved = _later(forward[s], max(early), moved)
        for s in reversed(range(len(stages))):
            early = [forward[s] + stages[s].forward_seconds - period]
            if (hop := pipeline.backward[s] if s + 1 < len(stages) else None) is not None:
                early.append(backward[s + 1] + stages[s + 1].backward_seconds + hop.seconds(1.0))
            backward[s], moved = _later(backward[s], max(early), moved)
        if not moved:
            break
    step = 0.0
    for time, first in zip(stages, backward, strict=True):
        last = pipeline.last_microbatch * time.backward_seconds
        exposed = exposed_seconds(time.all_reduce_seconds, last, pipeline.num_buckets)
        step = max(step, (n - 1) * period + first + time.backward_seconds + exposed)
    return step


def _warm_ups(pipeline: Pipeline, n: int) -> tuple[list[float], list[float]]:
    """When the first backward, and the first forward after the warm-up, could start for what comes before them."""
    backward, forward = [], []
    head = pace = 0.0
    for s, (time, w) in enumerate(zip(pipeline.stages, pipeline.in_flight, strict=True)):
        if s:
            hop = pipeline.forward[s - 1]
            head += pipeline.stages[s - 1].forward_seconds + (hop.seconds(1.0) if hop else 0.0)
        forward.append(head + w * pace)
        pace = max(pace, time.forward_seconds)
        backward.append(head + (min(w, n) - 1) * pace + time.forward_seconds)
    return backward, forward


def _later(now: float, wanted: float, moved: bool) -> tuple[float, bool]:
    """A time that is pushed back, and whether it, or one before it, has moved by more than rounding."""
    return (wanted, True) if wanted > now + 1e-12 * abs(now) else (now, moved)


def _column_period(pipeline: Pipeline) -> float:
    """Of one replica of every stage, which exchange messages with one another alone."""
    work = [time.forward_seconds + time.backward_seconds for time in pipeline.stages]
    hops = [
        forward.seconds(1.0) + backward.seconds(1.0) if forward and backward else 0.0
        for forward, backward in zip(pipeline.forward, pipeline.backward, strict=True)
    ]
    period = 0.0
    for s, w in enumerate(pipeline.in_flight):
        trip = 0.0
        for e in range(s, len(work)):
            trip += work[e] + (hops[e - 1] if e > s else 0.0)
            period = max(period, trip / (1 + w - pipeline.in_flight[e]))
    return period


def gpipe_seconds(pipeline: Pipeline) -> float:
    """A step of GPipe, all stages having as many replicas, all-reduces included.

    Exact where messages do not queue (`send_seconds` 0), all microbatches are full and the replicas have equally
    many; messages that queue add to it.
    """
    repeats = pipeline.num_microbatches // _columns(pipeline) - 1
    stages = pipeline.stages
    now = sum(time.forward_seconds for time in stages) + repeats * max(time.forward_seconds for time in stages)
    now += sum(hop.seconds(1.0) for hop in pipeline.forward if hop)
    slowest = step = 0.0
    for s in reversed(range(len(stages))):
        time = stages[s]
        slowest = max(slowest, time.backward_seconds)
        now += time.backward_seconds
        exposed = exposed_seconds(time.all_reduce_seconds, time.backward_seconds, pipeline.num_buckets)
        step = max(step, now + repeats * slowest + exposed)
        back = pipeline.backward[s - 1] if s else None
        now += back.seconds(1.0) if back else 0.0
    return step


def interleaved_seconds(
    num_workers: int, chunks: int, num_microbatches: int, forward_seconds: float, backward_seconds: float
) -> float:
    """A step of the interleaved schedule, one replica a stage, all stages alike and messages free.

    Exact for a multiple of `num_workers` microbatches; with others a step takes longer.
    """
    return (chunks * num_microbatches + num_workers - 1) * (forward_seconds + backward_seconds)


def zb_h1_seconds(num_stages: int, num_microbatches: int, time: StageTime) -> float:
    """A step of zb-h1, one replica a stage, all stages alike and messages free.

    Exact where there are at least as many microbatches as stages and a weight backward takes no longer than a
    forward, nor than the rest of the backward; else a step takes longer.
    """
    bubble = time.forward_seconds + time.backward_seconds - 2 * time.weight_backward_seconds
    return num_microbatches * (time.forward_seconds + time.backward_seconds) + (num_stages - 1) * bubble


def asynchronous_period(pipeline: Pipeline, microbatches_per_update: Sequence[int]) -> float:
    """At least this many seconds from one microbatch to the next in ``pipedream`` and ``2bw``.

    The slowest of all stages' computing, sending and all-reducing. Exact where messages are free, all stages have
    as many replicas r, and (2bw) an all-reduce takes no more than batch - r (w - 1) periods, with w in flight: then
    it is done when the batch that needs it begins. Latencies that a strict warm-up does not hide come on top
    (`steady_period`).

    Args:
        microbatches_per_update: Of each stage (`Schedule.microbatches_per_update`).
    """
    period = 0.0
    for s, (time, r) in enumerate(zip(pipeline.stages, pipeline.num_replicas, strict=True)):
        ways = (pipeline.forward[s : s + 1], pipeline.backward[s - 1 : s] if s else ())
        sending = sum(hop.send_seconds for way in ways for hop in way if hop)
        computing = time.forward_seconds + time.backward_seconds
        period = max(period, computing / r, sending / r, time.all_reduce_seconds / microbatches_per_update[s])
    return period


def _columns(pipeline: Pipeline) -> int:
    """How many pipelines stand side by side: replica q of every stage works for replica q of the others alone."""
    if len(set(pipeline.num_replicas)) != 1 or None in (*pipeline.forward, *pipeline.backward):
        raise ValueError(
            "This formula is for stages that all have as many replicas and exchange messages in both directions, "
            f"got num_replicas={tuple(pipeline.num_replicas)}; take the simulator."
        )
    return pipeline.num_replicas[0]
