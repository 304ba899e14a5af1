"""`Schedule`: for every worker its actions in order, and what they hold. Plain data, without devices or processes.

A worker is named by the replica of the first stage it runs. Most schedules give a worker one stage; interleaved
ones give it several, and its row has the actions of all of them::

    Replica(0, 0)   0F0 0F1 2F0 2F1 ...       a worker with stages 0 and 2
    Replica(1, 0)   1F0 1F1 3F0 3B0 ...       a worker with stages 1 and 3
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Phase(StrEnum):
    """What is computed: outputs, gradients, or in zero-bubble schedules gradients of parameters apart.

    Where a schedule has weight backwards, its backwards compute the gradients of inputs alone.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT_BACKWARD = "W"


class Weights(StrEnum):
    """When weights change, and how many versions of them that takes.

    FLUSHED: after all microbatches, so one version; the schedule is synchronous.
    STASHED: after each microbatch of every replica; a backward uses the version of its forward (PipeDream, 2019).
    DOUBLE_BUFFERED: after each batch; a batch uses what the batch before the last one left (PipeDream-2BW, 2021).
    """

    FLUSHED = "flushed"
    STASHED = "stashed"
    DOUBLE_BUFFERED = "double-buffered"


@dataclass(frozen=True, slots=True)
class Action:
    """One stage computing one microbatch in one phase."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Replica:
    """One of the interchangeable copies of a stage."""

    stage: int
    index: int


@dataclass(frozen=True)
class Schedule:
    """For every worker, its actions in the order it performs them.

    Attributes:
        rows: By the replica of the worker's first stage.
        weights: When weights change.
        batch: Microbatches between two changes of weights where they are double-buffered, else 0.
    """

    rows: Mapping[Replica, tuple[Action, ...]]
    weights: Weights = Weights.FLUSHED
    batch: int = 0

    @property
    def synchronous(self) -> bool:
        """Whether the pipeline drains before weights change; only then is a step what one process computes."""
        return self.weights is Weights.FLUSHED

    def peak_in_flight(self, replica: Replica) -> int:
        """The most microbatches whose stash the worker holds at one time, counted once for each of its stages."""
        return self.peak_bytes(replica, None)

    def peak_bytes(self, replica: Replica, stash_bytes: Sequence[int] | None) -> int:
        """The most bytes of stashes that the worker holds at one time.

        Args:
            stash_bytes: Of each stage for one microbatch, held from its forward to the last of its backwards.
                None counts every stash as 1.
        """
        row = self.rows[replica]
        last = Phase.WEIGHT_BACKWARD if any(a.phase is Phase.WEIGHT_BACKWARD for a in row) else Phase.BACKWARD
        held = peak = 0
        for action in row:
            size = 1 if stash_bytes is None else stash_bytes[action.stage]
            if action.phase is Phase.FORWARD:
                held += size
                peak = max(peak, held)
            elif action.phase is last:
                held -= size
        return peak

    def microbatches_per_update(self, stage: int) -> int:
        """After how many microbatches a stage changes its weights, those of all its replicas counted.

        An asynchronous schedule all-reduces the gradients of a stage's replicas that often.
        """
        if self.weights is Weights.FLUSHED:
            return self._num_microbatches
        return max(self.batch, self._replicas[stage])

    def awaited_update(self, stage: int, microbatch: int) -> int:
        """The update of its stage's weights, counted from 0, that a forward cannot start without; -1 if none.

        With stashed weights the all-reduce of an update runs while each replica computes one more microbatch:
        a forward needs the update before the one that its own worker has just made its part of.
        """
        if self.weights is Weights.FLUSHED:
            return -1
        update = microbatch // self.microbatches_per_update(stage)
        behind = 2 if self.weights is Weights.DOUBLE_BUFFERED else self._in_flight[stage] + 1
        return max(-1, update - behind)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows.values())

    @cached_property
    def _num_microbatches(self) -> int:
        return 1 + max((action.microbatch for row in self.rows.values() for action in row), default=-1)

    @cached_property
    def _replicas(self) -> dict[int, int]:
        stages = sorted(replica.stage for replica in self.rows)
        return {stage: len(list(same)) for stage, same in itertools.groupby(stages)}

    @cached_property
    def _in_flight(self) -> dict[int, int]:
        return {replica.stage: self.peak_in_flight(replica) for replica in self.rows if replica.index == 0}


def weight_versions(schedule: Schedule, stage: int) -> int:
    """Versions of its weights that a replica of the stage keeps, the newest included."""
    if schedule.weights is Weights.FLUSHED:
        return 1
    if schedule.weights is Weights.DOUBLE_BUFFERED:
        return 2
    return max(1, schedule.peak_in_flight(Replica(stage, 0)))
