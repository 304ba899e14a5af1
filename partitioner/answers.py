"""`Explanation`: the answers to questions about a plan, as they stand in explain.json. No torch.

Every number in it comes from planning again with one thing changed, or from playing the plan's step again.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CurvePoint:
    """The fastest plan found on at most so many devices.

    Attributes:
        num_devices: How many may be used: the first ones of the topology.
        used_devices: How many the plan uses; 0 where none fits.
        stages: The plan in words.
        step_seconds: None where no plan fits.
        objective_seconds: What the search minimises, of this plan; None from methods that prove only the bottleneck.
        lower_bound_seconds: No plan that was searched for on so many devices has a smaller objective.
        dollars_per_sample: Of the devices that the plan uses; None where the price of one is not known.
        note: Why no plan fits, or which smaller number of devices the plan is for.
    """

    num_devices: int
    used_devices: int
    stages: str
    step_seconds: float | None
    objective_seconds: float | None
    lower_bound_seconds: float | None
    dollars_per_sample: float | None
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """Step time against the number of devices.

    Attributes:
        batch_size: Samples (rows) of a step.
        points: By number of devices; a step is never slower with more of them.
        target_step_seconds: A step time that was asked for.
        fewest: The fewest devices that reach it, found by halving; None if no number does, or none was asked for.
    """

    batch_size: int
    points: tuple[CurvePoint, ...]
    target_step_seconds: float | None = None
    fewest: CurvePoint | None = None


Resource = Literal["compute", "transfer", "all-reduce"]


@dataclass(frozen=True)
class Binding:
    """What the plan waits for.

    Attributes:
        stage: The bottleneck.
        resource: What its time per microbatch goes into most: ``compute`` (collectives of tensor-parallel groups
            included), ``transfer`` to and from its neighbours, or the ``all-reduce`` of its gradients.
        stage_seconds: Its time per microbatch: transfers overlap with compute, so the longer of the two counts.
        compute_seconds: Of that, computing.
        all_reduce_seconds: Its all-reduce, a microbatch's part of it.
        fullest_stage: The stage that needs most memory on each device.
        fullest_bytes: That memory.
        memory_limit_bytes: What may be used.
        unlimited_step_seconds: What the step would take if memory had no limit: memory binds if that is faster.
    """

    stage: int
    resource: Resource
    stage_seconds: float
    compute_seconds: float
    all_reduce_seconds: float
    fullest_stage: int
    fullest_bytes: int
    memory_limit_bytes: int
    unlimited_step_seconds: float


PriceKind = Literal["device", "memory", "bandwidth"]


@dataclass(frozen=True)
class ShadowPrice:
    """What a little more of one thing is worth.

    Attributes:
        kind: Of what there is more.
        what: In words, such as ``1.00 GiB more memory of each device``.
        added: Devices, bytes, or bytes per second.
        step_seconds: Of the best plan with it.
        saved_seconds: Of the step; at least 0, as the old plan can be kept.
        stages: That plan, in words.
        same_plan: Whether it is the old one.
    """

    kind: PriceKind
    what: str
    added: float
    step_seconds: float
    saved_seconds: float
    stages: str
    same_plan: bool


@dataclass(frozen=True)
class ShadowPrices:
    """What binds, and what more of it would save."""

    binding: Binding
    prices: tuple[ShadowPrice, ...]


@dataclass(frozen=True)
class BandwidthRange:
    """Over which bandwidths of one level the plan stays the best.

    Attributes:
        level: Its name.
        low_bytes_per_second: The lowest bandwidth tried at which it does.
        high_bytes_per_second: The highest.
        below: The plan that wins a little below that, in words; None where the plan wins as far down as was tried.
        above: The same above.
    """

    level: str
    bandwidth_bytes_per_second: float
    low_bytes_per_second: float
    high_bytes_per_second: float
    below: str | None
    above: str | None


@dataclass(frozen=True)
class Robustness:
    """How the plan stands if the profile is wrong.

    Attributes:
        relative_error: Standard deviation of the factors on layers' times, of their logarithm.
        draws: How many wrong profiles were drawn.
        seed: Of the draws.
        same_share: Share of the draws in which the plan stays the best.
        worst_loss: The most by which keeping it is slower than planning again, as a share of the step.
        mean_loss: The same on average.
    """

    relative_error: float
    draws: int
    seed: int
    same_share: float
    worst_loss: float
    mean_loss: float


@dataclass(frozen=True)
class Sensitivity:
    """Over what the plan stays the best."""

    bandwidths: tuple[BandwidthRange, ...]
    robustness: Robustness


@dataclass(frozen=True)
class Explanation:
    """The answers to those questions that were asked.

    Attributes:
        fingerprint: Of the graph.
        topology: One line for people.
        stages: The plan that the answers are about, in words.
    """

    format: Literal["dpart.explanation"]
    version: Literal[1]
    model: str
    fingerprint: str
    topology: str
    stages: str
    step_seconds: float
    curve: Curve | None = None
    prices: ShadowPrices | None = None
    sensitivity: Sensitivity | None = None
