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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from dpart.partitioner.quantities import LayerCosts, Quantities
from dpart.partitioner.search import Mask, Matrix
from dpart.partitioner.states import States
from dpart.partitioner.topology import Device, Level, Topology
from dpart.runtime.schedule import SCHEDULES, Schedule, one_f_one_b

ScheduleName = Literal["1f1b", "gpipe", "zb-h1", "pipedream", "2bw"]
Optimizer = Literal["sgd", "adam", "adam-mixed"]

OPTIMIZERS = ("sgd", "adam", "adam-mixed")
"""`adam-mixed` keeps a float32 copy of parameters in 16 bits, and its moments in float32."""


@dataclass(frozen=True)
class Terms:
    """What a plan is made under.

    Attributes:
        num_microbatches: Per step.
        memory_limit_bytes: Of each device; with several pools, of the first one's.
        parameter_itemsize: Bytes of one number of a parameter.
        reduce_buckets: In so many parts a stage's gradients are all-reduced, each as soon as its share of the last
            backward is done; 1 where nothing of it is hidden.
        context_bytes: What the framework takes on each device, whatever it runs.
        pool_limits_bytes: Of the devices of each pool, where there are several.
        warm_up_depth: Of 1F1B: microbatches that a warm-up sends ahead for every replica behind; 1 is strict.
    """

    num_microbatches: int
    schedule: ScheduleName
    optimizer: Optimizer
    memory_limit_bytes: int
    parameter_itemsize: int = 4
    reduce_buckets: int = 1
    context_bytes: int = 0
    warm_up_depth: float = 1.0
    pool_limits_bytes: tuple[int, ...] = ()

    @property
    def is_synchronous(self) -> bool:
        """Whether a step ends with a flush; else weights change while microbatches are on their way."""
        return self.schedule not in ("pipedream", "2bw")

    def schedule_of(self, num_replicas: Sequence[int], num_microbatches: int) -> Schedule:
        """What the workers follow."""
        if self.schedule == "1f1b":
            return one_f_one_b(num_replicas, num_microbatches, depth=self.warm_up_depth)
        return SCHEDULES[self.schedule](num_replicas, num_microbatches)

    def weight_versions(self, in_flight: "int | npt.NDArray[np.int64]") -> "int | npt.NDArray[np.int64]":
        """Copies of its parameters that a stage keeps: PipeDream one for each microbatch in flight, 2BW two."""
        return {"pipedream": in_flight, "2bw": 2}.get(self.schedule, 1)

    def of_pool(self, pool: int) -> "Terms":
        """The terms on the devices of one pool."""
        if not self.pool_limits_bytes:
            return self
        return replace(self, memory_limit_bytes=self.pool_limits_bytes[pool], pool_limits_bytes=())

    def share(self, num_replicas: int) -> float:
        """The part of the microbatches that the busiest replica computes."""
        return self.own_microbatches(num_replicas) / self.num_microbatches

    def own_microbatches(self, num_replicas: int) -> int:
        """Microbatches that the busiest replica computes."""
        return math.ceil(self.num_microbatches / num_replicas)

    def in_flight(self, num_replicas: int, after: int, copies: int = 1) -> int:
        """Microbatches whose stash a replica holds at the peak, with `after` devices behind its stage.

        Args:
            copies: How often stage and devices behind it stand side by side, sharing the microbatches.
        """
        all_of_them = math.ceil(self.num_microbatches / (num_replicas * copies))
        if self.schedule == "gpipe":
            return all_of_them
        return min(1 + math.ceil(self.warm_up_depth * after / num_replicas), all_of_them)

    @property
    def optimizer_factor(self) -> float:
        """Bytes the optimizer keeps for each byte of a trainable parameter; sgd has no momentum."""
        return {"sgd": 0.0, "adam": 2.0, "adam-mixed": 12.0 / self.parameter_itemsize}[self.optimizer]


@dataclass(frozen=True)
class Memory:
    """Bytes on each device of a stage by what they are for; matrices or vectors, as the quantities are."""

    parameter_bytes: Matrix
    gradient_bytes: Matrix
    optimizer_bytes: Matrix
    stash_bytes: Matrix
    workspace_bytes: Matrix
    channel_bytes: Matrix
    context_bytes: int

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
            + self.context_bytes
        )
        return total


def memory(
    quantities: Quantities,
    terms: Terms,
    in_flight: int | npt.NDArray[np.int64],
    *,
    num_replicas: int = 1,
    sharding: int = 0,
    saved_bytes: float | Matrix = 0.0,
    again_bytes: float | Matrix = 0.0,
) -> Memory:
    """Bytes on each device, `in_flight` microbatches being held.

    Args:
        sharding: The stage of ZeRO (Rajbhandari et al., 2020): the replicas share out from 1 the optimizer's
            state, from 2 the gradients, at 3 the parameters, but for the largest layer's.
        saved_bytes: Of the stash of one microbatch, what recomputation does without.
        again_bytes: Room for what is computed again, of one microbatch.
    """
    q = quantities
    parts = [1.0 / num_replicas if sharding >= level else 1.0 for level in (1, 2, 3)]
    gathered = q.largest_parameter_bytes if sharding == 3 and num_replicas > 1 else 0.0
    return Memory(
        parameter_bytes=terms.weight_versions(in_flight) * _whole(parts[2] * q.parameter_bytes) + gathered,
        gradient_bytes=_whole(parts[1] * q.trainable_bytes),
        optimizer_bytes=_whole(parts[0] * terms.optimizer_factor * q.trainable_bytes),
        stash_bytes=in_flight * (q.stash_bytes + q.received_bytes - saved_bytes),
        workspace_bytes=q.workspace_bytes + again_bytes,
        channel_bytes=q.received_bytes + q.returned_bytes + q.sent_bytes + q.accepted_bytes,
        context_bytes=terms.context_bytes,
    )


def _whole(size: Matrix) -> Matrix:
    """A share of some bytes is a whole number of bytes: so whoever adds items up gets the same sum."""
    whole: Matrix = np.ceil(size - 0.5)
    return whole


def all_reduce_seconds(size: Matrix, levels: Sequence[Level], ring_sizes: Sequence[int]) -> Matrix:
    """A ring on every level over which the replicas spread (2(n-1) messages of 1/n each), one after another."""
    return ring_seconds(size, (size > 0).astype(np.float64), levels, ring_sizes, (1,) * len(levels))


def transfer_seconds(activation_bytes: Matrix, gradient_bytes: Matrix, level: Level) -> Matrix:
    """Activations one way and gradients the other for one microbatch, added up."""
    messages = (activation_bytes > 0).astype(np.float64) + (gradient_bytes > 0)
    total: Matrix = (
        messages * level.latency_seconds + (activation_bytes + gradient_bytes) / level.bandwidth_bytes_per_second
    )
    return total


@dataclass(frozen=True)
class Place:
    """The links that a stage on certain devices uses.

    Attributes:
        incoming: Between it and the stages it receives from.
        tensor_rings: Per level of the topology, members of one tensor-parallel group.
        replica_rings: Per level, members that the replicas of one rank occupy.
        sharing: Per level, ranks of a tensor-parallel group that share a member's link.
    """

    incoming: Level
    tensor_rings: tuple[int, ...]
    replica_rings: tuple[int, ...]
    sharing: tuple[int, ...]


@dataclass(frozen=True)
class StageSeconds:
    """What a stage takes; matrices or vectors, as the quantities are.

    Attributes:
        forward_seconds: Of one microbatch on one replica, with the collectives inside.
        backward_seconds: The same for the backward.
        weight_backward_seconds: The part of it that computes gradients of parameters.
        receive_seconds: Activations in and their gradients out, for one microbatch.
        all_reduce_seconds: Of its gradients, once a step.
        exposed_seconds: What of that is not hidden behind the last backward.
    """

    forward_seconds: Matrix
    backward_seconds: Matrix
    weight_backward_seconds: Matrix
    receive_seconds: Matrix
    all_reduce_seconds: Matrix
    exposed_seconds: Matrix

    @property
    def latency_seconds(self) -> Matrix:
        """From a microbatch's arrival to its gradient's departure, if it waited for nothing in between."""
        total: Matrix = self.forward_seconds + self.backward_seconds + self.receive_seconds
        return total

    def busy_seconds(self, terms: Terms, num_replicas: int) -> Matrix:
        """Of all the microbatches of the busiest replica but its first, and the end of the step.

        Without a flush there is no end: of all its microbatches, each taking what its computation, its transfer or
        its all-reduce takes, whichever is longest (Narayanan et al., 2019). PipeDream all-reduces once for every
        round of the replicas, 2BW once a batch.
        """
        own = terms.own_microbatches(num_replicas)
        if terms.is_synchronous:
            return (own - 1) * self.latency_seconds + self.exposed_seconds
        rounds = own if terms.schedule == "pipedream" else 1
        compute = np.maximum(self.forward_seconds + self.backward_seconds, self.receive_seconds)
        busy: Matrix = np.maximum(own * compute, rounds * self.all_reduce_seconds)
        return busy

    def path_seconds(self, terms: Terms) -> Matrix:
        """What the stage adds to the time of a step, besides the bottleneck; nothing where steps follow without end."""
        return self.latency_seconds if terms.is_synchronous else 0.0 * self.latency_seconds


def stage_seconds(
    quantities: Quantities,
    terms: Terms,
    levels: Sequence[Level],
    place: Place,
    *,
    num_replicas: int,
    sharding: int = 0,
    device: Device,
    again_seconds: float | Matrix = 0.0,
) -> StageSeconds:
    """Seconds of a stage that runs so and stands there.

    Sharded gradients (ZeRO-2) are reduce-scattered for every microbatch and parameters gathered once a step;
    sharded parameters (ZeRO-3) are gathered for every forward and every backward. Each is half an all-reduce.

    Args:
        again_seconds: Of what the backward computes again, from `forward_seconds`.
    """
    q = quantities
    forward = forward_seconds(q, levels, place, device)
    backward = q.backward_seconds / device.speed + again_seconds
    backward = backward + _collectives(q.backward_reduce_bytes, q.backward_reduces, levels, place)
    rings, shared = place.replica_rings, place.sharing
    whole = ring_seconds(q.trainable_bytes, (q.trainable_bytes > 0).astype(np.float64), levels, rings, shared)
    if sharding >= 2 and num_replicas > 1:
        backward = backward + whole / 2
        whole = whole / 2
    if sharding == 3 and num_replicas > 1:
        gather = ring_seconds(q.parameter_bytes, (q.parameter_bytes > 0).astype(np.float64), levels, rings, shared) / 2
        forward, backward, whole = forward + gather, backward + gather, 0.0 * whole
    n = terms.reduce_buckets
    return StageSeconds(
        forward_seconds=forward,
        backward_seconds=backward,
        weight_backward_seconds=q.weight_backward_seconds / device.speed,
        receive_seconds=transfer_seconds(q.received_bytes, q.returned_bytes, place.incoming),
        all_reduce_seconds=whole,
        exposed_seconds=np.maximum(whole / n, whole - (1 - 1 / n) * backward),
    )


def forward_seconds(costs: Quantities | LayerCosts, levels: Sequence[Level], place: Place, device: Device) -> Matrix:
    """Of stages or of single layers: computation, and the all-reduces inside a tensor-parallel group."""
    collectives = _collectives(costs.forward_reduce_bytes, costs.forward_reduces, levels, place)
    seconds: Matrix = costs.forward_seconds / device.speed + collectives
    return seconds


def best_place(topology: Topology, degree: int, num_replicas: int) -> Place:
    """The best place a stage of this size can have: aligned, and beside the stage it receives from.

    A stage that fills the groups of a level receives from outside them; a smaller one may receive from inside.
    """
    size = degree * num_replicas
    level = next((i for i, group in enumerate(topology.group_sizes) if group > size), len(topology.levels) - 1)
    return Place(
        incoming=topology.levels[level],
        tensor_rings=topology.ring_sizes(range(degree)),
        replica_rings=topology.ring_sizes(range(0, size, degree)),
        sharing=sharing(topology, degree),
    )


def sharing(topology: Topology, degree: int) -> tuple[int, ...]:
    """Per level, ranks of one tensor-parallel group inside one member."""
    return tuple(min(degree, size) for size in (1, *topology.group_sizes[:-1]))


def _collectives(size: Matrix, count: Matrix, levels: Sequence[Level], place: Place) -> Matrix:
    return ring_seconds(size, count, levels, place.tensor_rings, (1,) * len(levels))


def ring_seconds(
    size: Matrix, count: Matrix, levels: Sequence[Level], ring_sizes: Sequence[int], sharing: Sequence[int]
) -> Matrix:
    """`count` all-reduces of `size` bytes in all: a ring on every level over which the members spread.

    Args:
        sharing: Per level, so many such rings at once share a member's link.
    """
    total = np.zeros_like(size, dtype=np.float64)
    for level, n, rings in zip(levels, ring_sizes, sharing, strict=True):
        if n > 1:
            each = rings * size / n / level.bandwidth_bytes_per_second + count * level.latency_seconds
            total += 2 * (n - 1) * each
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
