"""The exact time of one step: every action of a Schedule played through, with its messages, in O(actions).

A worker performs the actions of its row in order, each as soon as its messages have arrived. When an action
ends, its messages leave one after another (a worker sends one message at a time, for bytes / bandwidth), and
arrive a latency later. Receiving and computing go on meanwhile. Two stages, three microbatches, every action
one second, messages free::

    0F0 0F1  .  0B0 0F2 0B1  .  0B2
     .  1F0 1B0 1F1 1B1 1F2 1B2  .

A stage with several replicas all-reduces its gradients in buckets: each as soon as its share of the last backward
has run on all replicas, one after another; the buckets of all stages of a worker share its network, first come,
first served. One bucket is wholly exposed, more are partly hidden behind that backward. The totals of shared
parameters travel forward at the very end. In an asynchronous schedule every update of the weights has an
all-reduce of its own, and later forwards wait for it (`Schedule.awaited_update`).
"""

from collections.abc import Sequence

from dpart.partitioner.play import Play
from dpart.partitioner.timeline import Message as Message
from dpart.partitioner.timeline import Span as Span
from dpart.partitioner.timeline import Timeline as Timeline
from dpart.partitioner.timing import Flow as Flow
from dpart.partitioner.timing import Link as Link
from dpart.partitioner.timing import Links as Links
from dpart.partitioner.timing import StageTime as StageTime
from dpart.runtime.schedule import Phase, Schedule

Intervals = tuple[tuple[float, float], ...]


def simulate(
    schedule: Schedule,
    stages: Sequence[StageTime],
    flows: Sequence[Flow],
    link: Links,
    *,
    last_microbatch: float = 1.0,
    num_buckets: int = 1,
) -> Timeline:
    """Plays one step; of an asynchronous schedule, all of its microbatches.

    Args:
        flows: At most one for a pair of stages.
        link: Between two workers, in the direction of the message. Stages of one worker exchange for free.
        last_microbatch: Rows of the last microbatch as a share of a full one; its seconds and bytes scale.
        num_buckets: Equal parts of an all-reduce. The all-reduces of an asynchronous schedule, hidden behind the
            microbatches that follow, are not divided.

    Raises:
        ValueError: The schedule cannot run to its end; the message names the actions that wait.
    """
    if num_buckets < 1:
        raise ValueError(f"An all-reduce has at least one bucket, got num_buckets={num_buckets}.")
    play = Play(schedule, stages, flows, link, last_microbatch)
    play.run()
    ended = _ended(play, len(stages))
    if schedule.synchronous:
        buckets = _buckets(play, stages, num_buckets)
    else:
        buckets = [tuple(play.updates[s].done) if s in play.updates else () for s in range(len(stages))]
    # In an asynchronous schedule the earlier all-reduces are over by then, or will be.
    closing = [b if schedule.synchronous else b[-1:] for b in buckets]
    all_reduce = tuple((b[0][0], b[-1][1]) if b else (end, end) for b, end in zip(closing, ended, strict=True))
    return Timeline(
        schedule=schedule,
        spans={worker: tuple(row) for worker, row in zip(play.workers, play.spans, strict=True)},
        messages=tuple(play.messages),
        all_reduce=all_reduce,
        buckets=tuple(buckets),
        exposed_seconds=tuple(max(0.0, end - last) for (_, end), last in zip(all_reduce, ended, strict=True)),
        step_seconds=_closed(play, flows, [end for _, end in all_reduce], link),
    )


def _ended(play: Play, num_stages: int) -> list[float]:
    """When each stage has performed its last action, on all replicas."""
    ended = [0.0] * num_stages
    for row in play.spans:
        for span in row:
            ended[span.action.stage] = max(ended[span.action.stage], span.end_seconds)
    return ended


def _buckets(play: Play, stages: Sequence[StageTime], num_buckets: int) -> list[Intervals]:
    """Start and end of every stage's buckets, the stages of one worker taking turns."""
    last: dict[int, dict[int, tuple[float, float]]] = {}
    for worker, row in enumerate(play.spans):
        for span in row:
            if span.action.phase is not Phase.FORWARD:
                # Rows are in order: what stands at the end is the last backward, or weight backward.
                last.setdefault(span.action.stage, {})[worker] = span.start_seconds, span.end_seconds
    wanted = []
    for stage, backwards in last.items():
        if stages[stage].all_reduce_seconds > 0:
            network = min(backwards)
            for i in range(1, num_buckets + 1):
                # Written so that the last bucket is ready exactly when the backward ends.
                ready = max(end - (1 - i / num_buckets) * (end - start) for start, end in backwards.values())
                wanted.append((ready, -stage, i, network))
    free: dict[int, float] = {}
    done: list[list[tuple[float, float]]] = [[] for _ in stages]
    for ready, minus_stage, _, network in sorted(wanted):
        start = max(ready, free.get(network, 0.0))
        free[network] = start + stages[-minus_stage].all_reduce_seconds / num_buckets
        done[-minus_stage].append((start, free[network]))
    return [tuple(intervals) for intervals in done]


def _closed(play: Play, flows: Sequence[Flow], done: list[float], link: Links) -> float:
    """When the totals of shared parameters have travelled forward, stage by stage, and all is done."""
    first = [play.worker_at[s * play.num_microbatches] for s in range(len(done))]
    for flow in sorted(flows, key=lambda flow: flow.source):
        if flow.closing_bytes is not None:
            seconds, source, target = 0.0, first[flow.source], first[flow.target]
            if source != target:
                path = link(play.workers[source], play.workers[target])
                seconds = path.latency_seconds + flow.closing_bytes / path.bandwidth_bytes_per_second
            done[flow.target] = max(done[flow.target], done[flow.source] + seconds)
    return max(done, default=0.0)
