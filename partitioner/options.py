"""`Options`: every way to run every stage, as arrays; what the searcher for the fewest devices chooses from.

A stage is a pair (start, stop) of states, nested ideals of the layer graph. An option is a stage with everything
about it decided: its replicas, its tensor-parallel degree, what it recomputes, how its optimizer state is
sharded. Stages are counted from the end, so what stands behind one is known when it is chosen::

    replicas   2    1    3                      stage 0 has 4 replicas behind it: a replica holds the
    behind     4    3    0                      stashes of ceil((2 + 4) / 2) = 3 microbatches

The objective of a plan is the step time of a synchronous pipeline: what its busiest stage takes for all but the
first of its microbatches, and the way of one microbatch through all stages::

    objective = max over stages of busy + sum over stages of latency
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

UNLIMITED = 1 << 40
"""Microbatches in flight of an option whose memory does not bind."""


@dataclass(frozen=True)
class Options:
    """One entry per option, in every array; no order is promised.

    Attributes:
        num_states: State 0 is empty, state num_states - 1 is everything; a subset stands before what holds it.
        start: The stage's layers are those of state `stop` that are not in state `start`; start < stop.
        stop: See start.
        replicas: At least 1.
        devices: Replicas times tensor-parallel degree.
        max_in_flight: The most microbatches in flight that fit in memory, at least 1; with `behind` replicas in
            later stages the stage has ceil((replicas + behind) / replicas) in flight.
        busy_seconds: What the bottleneck is the largest of.
        latency_seconds: What adds up over the stages.
        variant: For whoever made the options: what else is decided, besides the stage and its replicas.
        pool: Which kind of devices it takes; None where they are all alike.
    """

    num_states: int
    start: Integers
    stop: Integers
    replicas: Integers
    devices: Integers
    max_in_flight: Integers
    busy_seconds: Floats
    latency_seconds: Floats
    variant: Integers
    pool: Integers | None = None

    def take(self, chosen: npt.NDArray[np.bool_] | Integers) -> "Options":
        """Some of them: a mask, or indices."""
        return Options(
            self.num_states,
            self.start[chosen],
            self.stop[chosen],
            self.replicas[chosen],
            self.devices[chosen],
            self.max_in_flight[chosen],
            self.busy_seconds[chosen],
            self.latency_seconds[chosen],
            self.variant[chosen],
            None if self.pool is None else self.pool[chosen],
        )


class OptionProblem(Protocol):
    """Where options come from: a cost model."""

    @property
    def num_devices(self) -> int:
        """Devices a plan may use."""
        ...

    def options(self, limit_seconds: float) -> Options:
        """All options with ``busy_seconds <= limit_seconds`` that a best plan may need.

        An option may be left out where another one of the same stage has no more devices, no more replicas, no
        more busy and latency seconds, and holds at least as many microbatches per replica and behind it.
        """
        ...
