"""`Program`: what the workers load, as it stands in build/program.json. Written by codegen, plain data, no torch.

A value that crosses stages travels along the chain of the stages that use it, in stage order, and its
gradient comes back along the same chain, each stage adding its own part::

    forward     stage 0 ──hidden──> stage 1 ──hidden──> stage 3
    backward    stage 0 <──grad──── stage 1 <──grad──── stage 3

So every stage starts its backward from what the later stages have summed, in the order in which autograd
sums it in the unsplit model: the numbers are the same to the last bit. A parameter used by several stages
sends its gradient back along the same kind of chain, microbatch by microbatch, to the first stage that has
it (its owner), which sends the step's total forward again.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Tensor:
    """An input of the model or a value on a channel: what may be said of it before the run.

    Attributes:
        name: The value's name, a Python identifier.
        shape: Sizes for a microbatch of the program's size.
        dtype: torch's name for it without the prefix.
        batch_dim: The dimension that grows with the microbatch, or None.
        high: For random batches, integers are drawn from 0 up to this one, exclusive; None for floats.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None
    high: int | None = None


@dataclass(frozen=True)
class Channel:
    """A value going from a stage to a later one.

    Attributes:
        differentiable: Whether its gradient comes back.
    """

    tensor: Tensor
    source: int
    target: int
    differentiable: bool


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages use.

    Attributes:
        names: Its name in the state_dict of each of the stages (tied weights have several).
        stages: In order; the first one owns it.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class StageProgram:
    """What the workers of one stage load.

    Attributes:
        source: The Python file with the stage's module, in the build folder.
        class_name: The module's class. Called with the tensors of `inputs`, returns those of `outputs`
            (the tensor itself where it is one, else a tuple).
        weights: The safetensors file with its parameters and buffers by original name.
        inputs: Names of values, in the order of the call; model inputs or channels.
        outputs: Names of values, in the order of the result.
        frozen: Names of parameters that receive no gradient.
        random_calls: For each random function the stage calls, in order, its index among the random calls
            of the unsplit model; the masks are keyed by it.
        layers: Names of its layers, for messages.
    """

    source: str
    class_name: str
    weights: str
    num_replicas: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    frozen: tuple[str, ...]
    random_calls: tuple[int, ...]
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """The whole run: stages, channels, and who is who.

    Attributes:
        workload: The user's ``file.py:callable`` that has the batches, relative to the build folder; or None.
        inputs: The model's inputs, in the order of a batch's flattened leaves.
        loss: The value of the last stage that is the scalar loss.
        predicted_step_seconds: The plan's.
    """

    format: Literal["dpart.program"]
    version: Literal[1]
    model: str
    fingerprint: str
    workload: str | None
    schedule: Literal["1f1b", "gpipe"]
    optimizer: Literal["sgd", "adam"]
    microbatch_size: int
    num_microbatches: int
    predicted_step_seconds: float
    inputs: tuple[Tensor, ...]
    loss: str
    stages: tuple[StageProgram, ...]
    channels: tuple[Channel, ...]
    shared_parameters: tuple[SharedParameter, ...]

    @cached_property
    def workers(self) -> tuple[tuple[int, int], ...]:
        """(stage, replica) of every rank, in rank order."""
        return tuple((s, q) for s, stage in enumerate(self.stages) for q in range(stage.num_replicas))
