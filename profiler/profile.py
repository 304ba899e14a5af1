"""`Profile`: the graph and what each of its layers costs, as it stands in profile.json. No torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dpart.compiler.graph import ModelGraph


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
        repeats: How often it was timed.
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


@dataclass(frozen=True)
class Machine:
    """Where a profile was measured.

    Attributes:
        device: ``cpu``, or the name of the GPU.
        num_devices: Cores of the CPU or GPUs; a CPU core is a device.
        memory_bytes: Of one device; for a CPU its share of the machine's memory.
        threads: Threads of torch while measuring.
    """

    device: str
    num_devices: int
    memory_bytes: int
    threads: int


@dataclass(frozen=True)
class Profile:
    """What `dpart profile` found.

    Attributes:
        batch_size: Rows of the example batch: the global batch a plan is made for unless told otherwise.
        step_seconds: Measured forward and backward of the whole model for one microbatch, one process.
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
