"""Pipeline schedules: which replica computes which microbatch, and in what order.

A schedule is plain data, built without devices or process groups. The executor walks it, the simulator
times it, the cost model counts stashes in it, the tests check it: nothing else describes 1F1B.

1F1B over 4 stages and 6 microbatches, one row a replica (``2F0`` is stage 2, forward, microbatch 0)::

    0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
    3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The direction of a computation."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One stage computing one microbatch in one direction."""

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


@dataclass(frozen=True, slots=True)
class Schedule:
    """For every replica, its actions in the order it performs them."""

    rows: Mapping[Replica, tuple[Action, ...]]

    def peak_in_flight(self, replica: Replica) -> int:
        """The most microbatches whose stash the replica holds at one time."""
        in_flight = peak = 0
        for action in self.rows[replica]:
            in_flight += 1 if action.phase is Phase.FORWARD else -1
            peak = max(peak, in_flight)
        return peak

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows.values())


def one_f_one_b(num_replicas: Sequence[int], num_microbatches: int) -> Schedule:
    """1F1B with a flush, stage ``s`` having ``num_replicas[s]`` replicas (Narayanan et al., PipeDream, 2019).

    Replica ``q`` of a stage with ``r`` takes microbatches ``q, q + r, q + 2r, ...`` (round robin).
    After its warm-up it alternates one forward and one backward.
    """
    return _schedule(
        num_replicas,
        num_microbatches,
        lambda stage: math.ceil(sum(num_replicas[stage:]) / num_replicas[stage]) - 1,
    )


def gpipe(num_replicas: Sequence[int], num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order (Huang et al., GPipe, 2019).

    Over 2 stages and 3 microbatches::

        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
    """
    return _schedule(num_replicas, num_microbatches, lambda stage: num_microbatches)


SCHEDULES = {"1f1b": one_f_one_b, "gpipe": gpipe}


def _schedule(num_replicas: Sequence[int], num_microbatches: int, warm_up: Callable[[int], int]) -> Schedule:
    """Each replica's row; `warm_up` gives the forwards that a replica of a stage does before it alternates."""
    if num_microbatches < 1 or any(r < 1 for r in num_replicas):
        raise ValueError(
            "A schedule needs at least one microbatch and one replica a stage, got "
            f"num_microbatches={num_microbatches}, num_replicas={tuple(num_replicas)}."
        )
    return Schedule(
        {
            Replica(stage, q): tuple(_row(stage, range(q, num_microbatches, r), warm_up(stage)))
            for stage, r in enumerate(num_replicas)
            for q in range(r)
        }
    )


def _row(stage: int, microbatches: Sequence[int], warm_up: int) -> Iterator[Action]:
    warm_up = min(warm_up, len(microbatches))
    for m in microbatches[:warm_up]:
        yield Action(stage, Phase.FORWARD, m)
    for i, m in enumerate(microbatches):
        if warm_up + i < len(microbatches):
            yield Action(stage, Phase.FORWARD, microbatches[warm_up + i])
        yield Action(stage, Phase.BACKWARD, m)
