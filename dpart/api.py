"""`compile`: the steps of the command line as one call: capture, profile, partition; then emit and verify.

::

    pipeline = dpart.compile(model, "cluster.yaml", example_inputs=(x,), targets=(y,), loss=F.cross_entropy)
    pipeline.plan
    pipeline.emit("build")
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from dpart.codegen.emit import emit
from dpart.compiler.capture import capture
from dpart.compiler.captured import CapturedModel
from dpart.compiler.workload import Workload
from dpart.partitioner.partition import partition
from dpart.partitioner.plan import Plan
from dpart.partitioner.topology import Topology, read_topology
from dpart.profiler.measure import profile
from dpart.profiler.profile import Profile
from dpart.report import Report
from dpart.runtime.errors import UserError
from dpart.verification import verify


@dataclass(frozen=True)
class Pipeline:
    """A model with the plan to split it.

    Attributes:
        workload: What was compiled.
        captured: Its graph, and the module that runs it.
        profile: What every layer costs here.
        plan: The decision.
    """

    workload: Workload
    captured: CapturedModel
    profile: Profile
    plan: Plan

    def emit(self, folder: str | os.PathLike[str], *, force: bool = False) -> None:
        """Writes the stages' modules and weights, and ``train.py`` for torchrun.

        Raises:
            UserError: Something stands at `folder` and `force` is false, or the model cannot be written.
        """
        emit(self.captured, self.plan, folder, force=force)

    def verify(self, *, steps: int = 3, lr: float = 1e-3, seed: int = 0) -> Report:
        """Trains the split model in worker processes, and the whole one here, and compares every number.

        Raises:
            UserError: The workers cannot be run.
            PeerError: A worker failed.
        """
        with tempfile.TemporaryDirectory(prefix="dpart-") as parent:
            folder = Path(parent) / "build"
            self.emit(folder)
            return verify(self.workload, folder, steps=steps, lr=lr, seed=seed)


def compile(
    model: nn.Module | Workload,
    topology: Topology | str | os.PathLike[str] | None = None,
    *,
    example_inputs: Tensor | tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    targets: Tensor | tuple[Any, ...] = (),
    loss: Callable[..., Tensor] | None = None,
    batches: Callable[[], Iterable[Any]] | None = None,
    microbatch_size: int | None = None,
    repeats: int | None = None,
    method: Literal["dp", "pipedream", "ilp"] = "dp",
    schedule: Literal["1f1b", "gpipe"] = "1f1b",
    optimizer: Literal["sgd", "adam"] = "adam",
    batch_size: int | None = None,
    memory_limit_bytes: int | None = None,
    num_devices: int | None = None,
    num_stages: int | None = None,
    max_stages: int | None = None,
    replicas: Sequence[int] | None = None,
    time_limit_seconds: float = 60.0,
) -> Pipeline:
    """Finds the best split of a model over a topology.

    Args:
        model: The module, or a whole `Workload`, which then has its own inputs, targets, loss and batches.
        topology: A `Topology`, its YAML file, or None for the machine at hand.
        example_inputs: One batch's positional inputs, rows first; None for the model's ``dummy_inputs``.
        example_kwargs: Its keyword inputs.
        targets: What the loss gets after the model's output.
        loss: ``loss(output, *targets)``, the mean over rows; None where the model returns its loss.
        batches: Called without arguments, gives training batches.
        microbatch_size: Rows per microbatch; None for an eighth of the batch.
        repeats: How often each layer is timed.
        method: As all that follow, an option of `partition`.

    Raises:
        UserError: Example inputs are missing, the model cannot be captured, or no plan fits.
    """
    if isinstance(model, Workload):
        workload = model
    else:
        args, kwargs = _examples(model, example_inputs, example_kwargs)
        workload = Workload(model, args, kwargs, _tuple(targets), loss, batches)
    devices = topology if topology is None or isinstance(topology, Topology) else read_topology(topology)
    captured = capture(workload, microbatch_size=microbatch_size)
    measured = profile(captured, repeats=repeats)
    plan = partition(
        measured,
        devices,
        method=method,
        schedule=schedule,
        optimizer=optimizer,
        batch_size=batch_size,
        memory_limit_bytes=memory_limit_bytes,
        num_devices=num_devices,
        num_stages=num_stages,
        max_stages=max_stages,
        replicas=replicas,
        time_limit_seconds=time_limit_seconds,
    )
    return Pipeline(workload, captured, measured, plan)


def _examples(
    model: nn.Module, inputs: Tensor | tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if inputs is not None or kwargs is not None:
        return _tuple(() if inputs is None else inputs), dict(kwargs or {})
    dummy = getattr(model, "dummy_inputs", None)
    if dummy is None:
        raise UserError(
            f"{type(model).__name__} has no dummy_inputs, so dpart must be told what goes in: pass "
            "example_inputs=(x,), the inputs of one batch with its rows as their first dimension."
        )
    return ((), dict(dummy)) if isinstance(dummy, Mapping) else (_tuple(dummy), {})


def _tuple(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,)
