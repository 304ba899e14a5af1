"""`Plan`: the decision, as it stands in plan.json. Names layers by string; never holds the graph. No torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StageMemory:
    """Predicted bytes on each device of a stage, by what they are for; the peak is their sum."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    stash_bytes: int
    workspace_bytes: int
    channel_bytes: int

    @property
    def total_bytes(self) -> int:
        """The predicted peak."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.stash_bytes
            + self.workspace_bytes
            + self.channel_bytes
        )


@dataclass(frozen=True)
class Stage:
    """Layers that run as one, on `num_replicas` devices that share the microbatches round robin.

    Attributes:
        layers: Names, in execution order.
        num_replicas: Workers of this stage.
        devices: The device of each replica, as an index into the topology's devices.
        forward_seconds: Predicted, for one microbatch on one replica.
        backward_seconds: The same for the backward.
        receive_seconds: Predicted transfer of one microbatch's activations from earlier stages (one way).
        all_reduce_seconds: Predicted gradient all-reduce per step; 0 without replicas.
        in_flight: Microbatches whose stash a replica holds at the peak, by the schedule.
        memory: Predicted bytes on each device.
    """

    layers: tuple[str, ...]
    num_replicas: int
    devices: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    receive_seconds: float
    all_reduce_seconds: float
    in_flight: int
    memory: StageMemory


@dataclass(frozen=True)
class Alternative:
    """A plan that was considered, with its number.

    Attributes:
        name: As in ``one device``, ``data parallel``, ``straight pipeline``, ``pipedream on 3 devices``.
        replicas: Replicas per stage.
        step_seconds: Predicted; None where it does not fit.
        note: Why it lost, or why it does not fit.
    """

    name: str
    replicas: tuple[int, ...]
    step_seconds: float | None
    note: str


@dataclass(frozen=True)
class Plan:
    """How to split one model over one topology.

    Attributes:
        fingerprint: Of the graph it is for; `emit` refuses another one.
        topology: One line for people.
        num_devices: Devices of the topology; the plan may use fewer.
        memory_limit_bytes: Of each device.
        microbatch_size: Rows per microbatch; the last one of a batch may be smaller.
        num_microbatches: Per step.
        bottleneck_seconds: The largest stage time per microbatch, which the search minimised.
        optimal: True if the search proved that no plan has a smaller bottleneck.
        step_seconds: Predicted seconds of one optimizer step, by the schedule simulator.
        bubble: Share of the devices' time spent waiting during the step, between 0 and 1.
        alternatives: The baselines and the other candidates, each with its number.
        notes: What a person should know about this plan, a sentence each.
    """

    format: Literal["dpart.plan"]
    version: Literal[1]
    model: str
    fingerprint: str
    topology: str
    num_devices: int
    memory_limit_bytes: int
    method: Literal["pipedream", "ilp"]
    schedule: Literal["1f1b", "gpipe"]
    optimizer: Literal["sgd", "adam"]
    microbatch_size: int
    num_microbatches: int
    stages: tuple[Stage, ...]
    bottleneck_seconds: float
    optimal: bool
    step_seconds: float
    bubble: float
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...] = ()
