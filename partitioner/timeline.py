"""`Timeline`: a step as it is predicted to run, in seconds from its start. What the simulator returns."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dpart.runtime.schedule import Action, Phase, Replica, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it ran, in seconds from the start of the step."""

    action: Action
    start_seconds: float
    end_seconds: float


class Message(NamedTuple):
    """What one worker sends another when an action has ended, so that the same microbatch goes on there.

    Attributes:
        start_seconds: When it begins to leave; it may have waited for the sender's earlier messages.
        end_seconds: When it has arrived.
    """

    source: Action
    target: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """A step as it is predicted to run.

    Attributes:
        schedule: What was played.
        spans: Of every worker, in the order of its row.
        messages: Between workers, those of one sender in the order in which they leave.
        all_reduce: Start and end of every stage's all-reduce, equal where there is none. In an asynchronous
            schedule, of the last one.
        buckets: Of every stage, start and end of each part that was all-reduced by itself, in order.
        exposed_seconds: Of every stage, how long its all-reduce goes on after its last backward.
        step_seconds: Until the last worker is done.
    """

    schedule: Schedule
    spans: Mapping[Replica, tuple[Span, ...]]
    messages: tuple[Message, ...]
    all_reduce: tuple[tuple[float, float], ...]
    buckets: tuple[tuple[tuple[float, float], ...], ...]
    exposed_seconds: tuple[float, ...]
    step_seconds: float

    @cached_property
    def bubble(self) -> float:
        """Share of the workers' time spent neither computing nor in an all-reduce after it, between 0 and 1."""
        busy = sum(span.end_seconds - span.start_seconds for row in self.spans.values() for span in row)
        for worker, row in self.spans.items():
            stages = {worker.stage} | {action.stage for action in self.schedule.rows[worker]}
            last = row[-1].end_seconds if row else 0.0
            for stage in stages:
                busy += sum(max(0.0, end - max(start, last)) for start, end in self.buckets[stage])
        total = self.step_seconds * len(self.spans)
        return min(1.0, max(0.0, 1.0 - busy / total)) if total else 0.0

    @cached_property
    def peak_in_flight(self) -> Mapping[Replica, int]:
        """The most stashes every worker holds at one time."""
        return {worker: self.schedule.peak_in_flight(worker) for worker in self.spans}

    def peak_stash_bytes(self, stash_bytes: Sequence[int]) -> Mapping[Replica, int]:
        """The most bytes of stashes every worker holds at one time.

        Args:
            stash_bytes: Of each stage for one microbatch.
        """
        return {worker: self.schedule.peak_bytes(worker, stash_bytes) for worker in self.spans}

    @cached_property
    def period_seconds(self) -> float:
        """Seconds from one microbatch to the next once the pipeline is full: what an asynchronous schedule is rated by.

        Read off at the last stage, where no microbatch finds the pipeline draining. If the later half of its
        backwards repeats itself after some microbatches, this is exact; else it is the mean over that half, cut to
        whole turns of the replicas.
        """
        last_stage = max((action.stage for row in self.schedule.rows.values() for action in row), default=0)
        ends = sorted(
            (span.action.microbatch, span.end_seconds)
            for row in self.spans.values()
            for span in row
            if span.action.stage == last_stage and span.action.phase is Phase.BACKWARD
        )
        # The last microbatch may be smaller than the others; replicas may finish out of order.
        done = list(itertools.accumulate((end for _, end in ends[:-1]), max))
        if len(done) < 3:
            return self.step_seconds / max(1, len(ends))
        later = done[len(done) // 2 :]
        for repeat in range(1, len(later) // 2 + 1):
            steps = [after - before for before, after in zip(later, later[repeat:], strict=False)]
            if all(math.isclose(step, steps[-1], rel_tol=1e-9) for step in reversed(steps)):
                return steps[-1] / repeat
        turn = math.lcm(*Counter(worker.stage for worker in self.spans).values())
        stretch = (len(later) - 1) // turn * turn or len(later) - 1
        return (later[-1] - later[-1 - stretch]) / stretch
