"""What the simulator is told: seconds of stages, bytes between them, speeds of links."""

from collections.abc import Callable
from dataclasses import dataclass

from dpart.runtime.schedule import Replica


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage: for a full microbatch on one replica, and of its all-reduce per update of weights.

    Attributes:
        backward_seconds: All of it, gradients of parameters included.
        weight_backward_seconds: The part of it that a schedule with weight backwards runs apart.
    """

    forward_seconds: float
    backward_seconds: float
    all_reduce_seconds: float = 0.0
    weight_backward_seconds: float = 0.0


@dataclass(frozen=True)
class Flow:
    """What goes from one stage to a later one, and back, for a full microbatch.

    Attributes:
        forward_bytes: Activations; None if there are none to wait for.
        backward_bytes: Gradients; None if there are none to wait for.
        closing_bytes: Totals of shared parameters, once a step after the all-reduce; None if there are none.
    """

    source: int
    target: int
    forward_bytes: int | None
    backward_bytes: int | None
    closing_bytes: int | None = None


@dataclass(frozen=True)
class Link:
    """From one worker to another, one way."""

    latency_seconds: float
    bandwidth_bytes_per_second: float


Links = Callable[[Replica, Replica], Link]
"""The link between two workers, in the direction of a message."""
