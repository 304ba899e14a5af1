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
    context_bytes: int = 0

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
            + self.context_bytes
        )


@dataclass(frozen=True)
class LayerSplit:
    """How one layer is split over the ranks of a tensor-parallel group: ``heads``, ``column-row``, ..."""

    layer: str
    split: str


@dataclass(frozen=True)
class Stage:
    """Layers that run as one, on replicas that share the microbatches round robin.

    Attributes:
        layers: Names, in execution order.
        num_replicas: Each of them is one worker, or a tensor-parallel group of workers.
        devices: As indices into the topology's devices: those of replica 0, rank by rank, then of replica 1, ...
        forward_seconds: Predicted, for one microbatch on one replica, collectives among its ranks included.
        backward_seconds: The same for the backward, what it computes again included.
        receive_seconds: Predicted transfer of one microbatch's activations from earlier stages (one way).
        all_reduce_seconds: Predicted gradient all-reduce per step; 0 without replicas.
        in_flight: Microbatches whose stash a replica holds at the peak, by the schedule.
        memory: Predicted bytes on each device.
        tensor_parallel_degree: Ranks of each replica.
        splits: How each layer is split, where the degree is above 1.
        recompute: Sets of layers that keep only what enters them, and run again before their backward.
        weight_backward_seconds: The part of the backward that computes gradients of parameters, if told apart.
        optimizer_sharding: The stage of ZeRO: what replicas share out; 0 is nothing, 1 the optimizer's state,
            2 gradients too, 3 parameters too.
        pool: Of the topology's unlike devices, which kind it stands on: the number of their pool.
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
    tensor_parallel_degree: int = 1
    splits: tuple[LayerSplit, ...] = ()
    recompute: tuple[tuple[str, ...], ...] = ()
    optimizer_sharding: int = 0
    pool: int = 0
    weight_backward_seconds: float = 0.0


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
class Bound:
    """A part of a certificate: what is proved of all plans with these replicas whose bottleneck is in an interval.

    The proof is one pass of the search with a price on devices (``partitioner/dual.py``), and can be repeated.

    Attributes:
        num_replicas: Of every stage; None for plans whose stages differ in it.
        floor_seconds: The least busy time of the bottleneck in the interval.
        limit_seconds: The largest; None for no upper end.
        multiplier_seconds: Price of a device of each pool.
        bound_seconds: No such plan has a smaller objective.
        proof: ``dual``: the bound follows from the price. ``counted``: devices were counted, not priced. ``work``:
            from the work there is, without a search. ``exhausted``: all such plans were looked at.
            ``programme``: the bound of an integer programme.
    """

    num_replicas: int | None
    floor_seconds: float
    limit_seconds: float | None
    multiplier_seconds: tuple[float, ...]
    bound_seconds: float
    proof: Literal["dual", "counted", "work", "exhausted", "programme"]


@dataclass(frozen=True)
class Certificate:
    """How good the plan is, and why: the search's objective, and a lower bound of it over all plans of a space.

    The objective is what the busiest stage takes for all but the first of its microbatches, with the part of its
    all-reduce that nothing hides, and the way of one microbatch through all stages: for 1F1B with equal replicas
    an upper bound of the step.

    Attributes:
        space: The plans that the bound is about, in words.
        objective_seconds: Of this plan.
        best_objective_seconds: The smallest of any plan that was found; this plan was ranked first by its
            simulated step, which may be another one.
        lower_bound_seconds: No plan of the space has a smaller objective.
        gap: ``best_objective_seconds / lower_bound_seconds - 1``.
        bounds: The parts of the proof; together they are about every plan of the space.
    """

    space: str
    objective_seconds: float
    best_objective_seconds: float
    lower_bound_seconds: float
    gap: float
    bounds: tuple[Bound, ...]


@dataclass(frozen=True)
class Pin:
    """A layer that has to stand in a stage."""

    layer: str
    stage: int


@dataclass(frozen=True)
class Question:
    """What the plan is the answer to, whole, so that its certificate can be checked from the plan and the profile.

    Attributes:
        profile: The profile's file, relative to the plan's folder; empty if it was in no file.
        profile_digest: SHA-256 of everything that the profile says.
        topology: As it stands in a topology file.
        schedule: As asked for; ``auto`` searches for 1F1B, and then tries others on the plans found.
        degrees: Tensor-parallel degrees that were allowed.
        shardings: Stages of ZeRO that were allowed.
        recompute: Whether recomputation was.
        reduce_buckets: Parts in which gradients are all-reduced, each as soon as it is there.
        context_bytes: Taken on each device by the framework.
    """

    profile: str
    profile_digest: str
    topology: str
    schedule: Literal["1f1b", "gpipe", "zb-h1", "pipedream", "2bw", "auto"]
    batch_size: int
    degrees: tuple[int, ...]
    shardings: tuple[int, ...]
    recompute: bool
    num_stages: int | None
    max_stages: int | None
    replicas: tuple[int, ...] | None
    together: tuple[tuple[str, ...], ...]
    pins: tuple[Pin, ...]
    reduce_buckets: int
    context_bytes: int


@dataclass(frozen=True)
class Plan:
    """How to split one model over one topology.

    Attributes:
        fingerprint: Of the graph it is for; `emit` refuses another one.
        topology: One line for people.
        num_devices: Devices of the topology; the plan may use fewer.
        memory_limit_bytes: Of each device; with several pools, of the first one's.
        microbatch_size: Rows per microbatch; the last one of a batch may be smaller.
        num_microbatches: Per step.
        bottleneck_seconds: The largest stage time per microbatch, which the search minimised.
        optimal: True if the search proved that no plan has a smaller bottleneck.
        step_seconds: Predicted seconds of one optimizer step, by the schedule simulator.
        bubble: Share of the devices' time spent waiting during the step, between 0 and 1.
        alternatives: The baselines and the other candidates, each with its number.
        question: What was asked.
        warm_up_depth: Of 1F1B: microbatches that a warm-up sends ahead for every replica behind; 1 is strict.
        certificate: How good the plan provably is; None from methods that prove only the bottleneck.
        notes: What a person should know about this plan, a sentence each.
        pool_limits_bytes: Of the devices of each pool, where there are several.
    """

    format: Literal["dpart.plan"]
    version: Literal[1]
    model: str
    fingerprint: str
    topology: str
    num_devices: int
    memory_limit_bytes: int
    method: Literal["dp", "pipedream", "ilp"]
    schedule: Literal["1f1b", "gpipe", "zb-h1", "pipedream", "2bw"]
    optimizer: Literal["sgd", "adam", "adam-mixed"]
    microbatch_size: int
    num_microbatches: int
    stages: tuple[Stage, ...]
    bottleneck_seconds: float
    optimal: bool
    step_seconds: float
    bubble: float
    alternatives: tuple[Alternative, ...]
    question: Question | None = None
    warm_up_depth: float = 1.0
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()
    pool_limits_bytes: tuple[int, ...] = ()

    def limit_bytes(self, stage: Stage) -> int:
        """What may be used of each device of a stage."""
        return self.pool_limits_bytes[stage.pool] if self.pool_limits_bytes else self.memory_limit_bytes
