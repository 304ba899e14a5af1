"""The one cost model: what a stage on some devices takes, in seconds per microbatch and in bytes.

Everything here is a formula over `Quantities`, so it serves a searcher, which asks for all pairs of states at
once, and the evaluation of one plan alike. With r replicas, m microbatches a step, after(s) devices behind::

    share     = ceil(m / r) / m                               of the microbatches a replica computes
    stage     = max( share * compute + all_reduce / m,  share * transfer in,  share * transfer out )
    in flight = min( ceil((r + after) / r), ceil(m / r) )     1F1B; GPipe holds all of its ceil(m / r)
    bytes     = parameters + gradients + optimizer + in flight * (stash + inputs) + workspace + channels

The stage formula is that of PipeDream (Narayanan et al., SOSP 2019) with a flush: gradients are all-reduced
once a step, and in whole microbatches. A transfer is latency + bytes / bandwidth, activations and gradients
added.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from dpart.partitioner.quantities import Quantities
from dpart.partitioner.search import Mask, Matrix
from dpart.partitioner.states import States
from dpart.partitioner.topology import Level

OPTIMIZER_STATES = {"sgd": 0, "adam": 2}
"""Tensors of a parameter's size that the optimizer keeps for it; sgd has no momentum."""


@dataclass(frozen=True)
class Terms:
    """What a plan is made under.

    Attributes:
        num_microbatches: Per step.
        memory_limit_bytes: Of each device.
    """

    num_microbatches: int
    schedule: Literal["1f1b", "gpipe"]
    optimizer: Literal["sgd", "adam"]
    memory_limit_bytes: int

    def share(self, num_replicas: int) -> float:
        """The part of the microbatches that the busiest replica computes."""
        return math.ceil(self.num_microbatches / num_replicas) / self.num_microbatches

    def in_flight(self, num_replicas: int, after: int, copies: int = 1) -> int:
        """Microbatches whose stash a replica holds at the peak, with `after` devices behind its stage.

        Args:
            copies: How often stage and devices behind it stand side by side, sharing the microbatches.
        """
        all_of_them = math.ceil(self.num_microbatches / (num_replicas * copies))
        if self.schedule == "gpipe":
            return all_of_them
        return min(math.ceil((num_replicas + after) / num_replicas), all_of_them)


@dataclass(frozen=True)
class Memory:
    """Bytes on each device of a stage by what they are for; matrices or vectors, as the quantities are."""

    parameter_bytes: Matrix
    gradient_bytes: Matrix
    optimizer_bytes: Matrix
    stash_bytes: Matrix
    workspace_bytes: Matrix
    channel_bytes: Matrix

    @property
    def total_bytes(self) -> Matrix:
        """The predicted peak."""
        total: Matrix = (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.stash_bytes
            + self.workspace_bytes
            + self.channel_bytes
        )
        return total


def memory(quantities: Quantities, terms: Terms, in_flight: int | npt.NDArray[np.int64]) -> Memory:
    """Bytes on each device, `in_flight` microbatches being held."""
    q = quantities
    return Memory(
        parameter_bytes=q.parameter_bytes,
        gradient_bytes=q.trainable_bytes,
        optimizer_bytes=OPTIMIZER_STATES[terms.optimizer] * q.trainable_bytes,
        stash_bytes=in_flight * (q.stash_bytes + q.received_bytes),
        workspace_bytes=q.workspace_bytes,
        channel_bytes=q.received_bytes + q.returned_bytes + q.sent_bytes + q.accepted_bytes,
    )


def all_reduce_seconds(size: Matrix, levels: Sequence[Level], ring_sizes: Sequence[int]) -> Matrix:
    """A ring on every level over which the replicas spread (2(n-1) messages of 1/n each), one after another."""
    total = np.zeros_like(size, dtype=np.float64)
    for level, n in zip(levels, ring_sizes, strict=True):
        if n > 1:
            each = size / n / level.bandwidth_bytes_per_second + level.latency_seconds
            total += np.where(size > 0, 2 * (n - 1) * each, 0.0)
    return total


def transfer_seconds(activation_bytes: Matrix, gradient_bytes: Matrix, level: Level) -> Matrix:
    """Activations one way and gradients the other for one microbatch, added up."""
    messages = (activation_bytes > 0).astype(np.float64) + (gradient_bytes > 0)
    total: Matrix = (
        messages * level.latency_seconds + (activation_bytes + gradient_bytes) / level.bandwidth_bytes_per_second
    )
    return total


class StageCosts:
    """The cost model as a `Problem` of a searcher: all pairs of states, on nested levels of links.

    A stage on more machines than there are microbatches is none: some would have nothing to do.
    """

    def __init__(self, states: States, quantities: Quantities, levels: Sequence[Level], terms: Terms) -> None:
        """
        Args:
            quantities: Of all pairs of the states.
            levels: Innermost first.
        """
        self.states, self.quantities, self.levels, self.terms = states, quantities, tuple(levels), terms
        self.use_fewer = True
        self._fits_at: dict[int, Mask] = {}

    @property
    def nested(self) -> Mask:
        """[S, S]: whether state i is a proper subset of state j."""
        return self.states.nested

    @property
    def machines(self) -> tuple[int, ...]:
        """Members of a group per level, innermost first."""
        return tuple(level.count for level in self.levels)

    def compute_seconds(self) -> Matrix:
        """Forward and backward of stage (i, j) on one device."""
        q = self.quantities
        seconds: Matrix = np.where(self.nested, q.forward_seconds + q.backward_seconds, np.inf)
        return seconds

    def unsplit_seconds(self, level: int, num_machines: int, after: int, inner: Matrix) -> Matrix:
        """Stage (i, j) at the head of a pipeline of this level: what it receives is the level above's."""
        link, m = self.levels[level], self.terms.num_microbatches
        share = self.terms.share(num_machines)
        rings = [num_machines if other == level else 1 for other in range(len(self.levels))]
        all_reduce = all_reduce_seconds(self.quantities.trainable_bytes, self.levels, rings)
        seconds = np.maximum(share * inner + all_reduce / m, share * self._outgoing[link])
        if num_machines > m:
            return np.full_like(seconds, np.inf)
        fitting: Matrix = np.where(self._fits(level, num_machines, after), seconds, np.inf)
        return fitting

    def stage_seconds(self, level: int, num_machines: int, after: int, inner: Matrix) -> Matrix:
        """Stage (i, j) behind a split of this level."""
        share = self.terms.share(num_machines)
        seconds = self.unsplit_seconds(level, num_machines, after, inner)
        behind_split: Matrix = np.maximum(seconds, share * self._incoming[self.levels[level]])
        return behind_split

    def peak_bytes(self, num_replicas: int, after: int) -> Matrix:
        """Peak of stage (i, j) on each of its devices, `after` devices standing behind it; inf where no stage."""
        in_flight = self.terms.in_flight(num_replicas, after)
        total = memory(self.quantities, self.terms, in_flight).total_bytes
        peak: Matrix = np.where(self.nested, total, np.inf)
        return peak

    def _fits(self, level: int, num_machines: int, after: int) -> Mask:
        """Exact on a single level. Under nested ones no more than what any split and any copies must meet."""
        limit, group = self.terms.memory_limit_bytes, math.prod(self.machines[:level])
        if level == 0:
            in_flight = self.terms.in_flight(num_machines, after, math.prod(self.machines[1:]))
            if in_flight not in self._fits_at:
                total = memory(self.quantities, self.terms, in_flight).total_bytes
                self._fits_at[in_flight] = total <= limit
            return self._fits_at[in_flight]
        held = self.terms.in_flight(num_machines, after, math.prod(self.machines) // self.machines[level])
        parts = memory(self.quantities, self.terms, 1)
        least = parts.parameter_bytes + parts.gradient_bytes + parts.optimizer_bytes
        fits: Mask = least + held * self.quantities.stash_bytes <= group * limit
        return fits

    @cached_property
    def _incoming(self) -> dict[Level, Matrix]:
        q = self.quantities
        return {level: transfer_seconds(q.received_bytes, q.returned_bytes, level) for level in self.levels}

    @cached_property
    def _outgoing(self) -> dict[Level, Matrix]:
        q = self.quantities
        return {level: transfer_seconds(q.sent_bytes, q.accepted_bytes, level) for level in self.levels}
