"""`Profile`: the graph and what each of its layers costs, as it stands in profile.json. No torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dpart.compiler.graph import ModelGraph

DEFAULT_DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees that are estimated unless told otherwise: a group fits in a host."""


@dataclass(frozen=True)
class SplitCost:
    """What one rank of a tensor-parallel group takes for a layer that is split over the group.

    Bytes are those on one rank. The reduces are all-reduces within the group, per microbatch; what they take
    depends on the links, so the profile has their bytes and the partitioner their seconds.

    Attributes:
        degree: Ranks in the group, at least 2.
        split: How the layer is split: ``column-row``, ``heads``, ``vocabulary``, ...; ``replicated`` where every
            rank does all of it.
        forward_seconds: Computation alone.
        backward_seconds: The same for the backward.
        weight_backward_seconds: The part of it that computes gradients of parameters.
        forward_reduces: How many all-reduces the forward has.
        forward_reduce_bytes: Their sizes, added up.
        backward_reduces: The same for the backward.
        backward_reduce_bytes: The same for the backward.
    """

    degree: int
    split: str
    forward_seconds: float
    backward_seconds: float
    weight_backward_seconds: float
    parameter_bytes: int
    trainable_bytes: int
    stash_bytes: int
    workspace_bytes: int
    forward_reduces: int
    forward_reduce_bytes: int
    backward_reduces: int
    backward_reduce_bytes: int


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one microbatch on one device.

    Attributes:
        layer: The layer's name.
        forward_seconds: Median over the repeats.
        backward_seconds: Median over the repeats; 0 where no gradient flows.
        forward_spread_seconds: Third less first quartile over the repeats.
        backward_spread_seconds: The same for the backward.
        parameter_bytes: Parameters and buffers it reads.
        trainable_bytes: Those of them that receive a gradient.
        output_bytes: Values it makes.
        stash_bytes: What autograd saves for the backward beyond parameters; storage counted once.
        workspace_bytes: Gradients of its inputs and outputs, alive during its backward.
        repeats: How often it was timed; 0 where it was estimated.
        weight_backward_seconds: The part of the backward that computes gradients of parameters, which a
            zero-bubble schedule may put off; 0 where it was not told apart.
        splits: What it costs at each tensor-parallel degree above 1 at which it is known; by degree.
    """

    layer: str
    forward_seconds: float
    backward_seconds: float
    forward_spread_seconds: float
    backward_spread_seconds: float
    parameter_bytes: int
    trainable_bytes: int
    output_bytes: int
    stash_bytes: int
    workspace_bytes: int
    repeats: int
    weight_backward_seconds: float = 0.0
    splits: tuple[SplitCost, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Where a profile was measured, or for which device it was estimated.

    Attributes:
        device: ``cpu``, or the name of the GPU.
        num_devices: Cores of the CPU or GPUs; a CPU core is a device.
        memory_bytes: Of one device; for a CPU its share of the machine's memory.
        threads: Threads of torch while measuring.
        estimated: Whether nothing ran: all costs are from operation and byte counts.
    """

    device: str
    num_devices: int
    memory_bytes: int
    threads: int
    estimated: bool = False


@dataclass(frozen=True)
class Profile:
    """What `dpart profile` found.

    Attributes:
        batch_size: Rows of the example batch: the global batch a plan is made for unless told otherwise.
        step_seconds: Measured forward and backward of the whole model for one microbatch, one process; the
            sum over the layers where they are estimated.
        costs: One entry a layer, in the order of the graph's layers.
    """

    format: Literal["dpart.profile"]
    version: Literal[1]
    graph: ModelGraph
    batch_size: int
    machine: Machine
    step_seconds: float
    costs: tuple[LayerCost, ...]

    @cached_property
    def cost(self) -> dict[str, LayerCost]:
        """Costs by layer name."""
        return {cost.layer: cost for cost in self.costs}
