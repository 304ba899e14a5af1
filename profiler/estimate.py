"""Estimates a profile for a device that is not here, from what every layer asks of it and what the catalogue says.

Each kernel takes the longer of its arithmetic and its memory traffic, at a stated part of the device's peaks, and
the time to start it (the roofline of Williams, Waterman and Patterson, 2009)::

    seconds = max(flops / (peak flops * efficiency), bytes / (bandwidth * efficiency)) + launch

Nothing runs: kernels are counted on fake tensors (`dpart.profiler.counting`), so the model may be on the meta device
and of any size. At tensor-parallel degrees above 1 the same is counted for one rank of the group
(`dpart.profiler.splits`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dpart.compiler.captured import CapturedModel
from dpart.profiler.counting import Kernel
from dpart.profiler.devices import DeviceKind, device_kind
from dpart.profiler.frames import frames
from dpart.profiler.profile import DEFAULT_DEGREES, LayerCost, Machine, Profile, SplitCost
from dpart.profiler.splits import LayerSplit, SplitFinder
from dpart.runtime.errors import UserError

_CPU = "cpu-core"


@dataclass(frozen=True)
class Efficiencies:
    """What part of a device's published peaks its kernels reach.

    Attributes:
        products: Of the peak operations, by matrix products and convolutions: large ones in vendors' libraries reach
            0.6 to 0.8, held back by power more than by scheduling.
        attention: Of the same peak, by fused attention: its exponentials run beside the matrix units, and its
            backward computes the scores again.
        memory: Of the bandwidth, by kernels that stream: a peak counts no refresh and no turn-around.
        launch_seconds: From one kernel to the next, where the host keeps the queue full.
    """

    products: float = 0.7
    attention: float = 0.5
    memory: float = 0.8
    launch_seconds: float = 3e-6


def estimate(
    captured: CapturedModel,
    device: DeviceKind | str,
    *,
    degrees: Sequence[int] = DEFAULT_DEGREES,
    efficiencies: Efficiencies | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Profile:
    """The profile that a captured model would have on a kind of device.

    Args:
        device: The kind, or its name in the catalogue.
        degrees: Tensor-parallel degrees to estimate; 1 is always among them.
        efficiencies: Those of `Efficiencies` unless given.
        progress: Called with (degrees done, degrees in all, what is next).

    Raises:
        UserError: A degree is not positive, or the catalogue has no such device.
    """
    device = device_kind(device) if isinstance(device, str) else device
    if wrong := [degree for degree in degrees if degree < 1]:
        raise UserError(f"a tensor-parallel degree must be at least 1, got {wrong[0]}.")
    finder = SplitFinder(captured, frames(captured), gpu=device.name != _CPU)
    speeds = _Speeds(device, efficiencies or Efficiencies())
    wanted = sorted({1, *degrees})
    found: dict[int, list[LayerSplit]] = {}
    for done, degree in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted), f"tensor-parallel degree {degree}")
        found[degree] = finder.splits(degree)
    costs = tuple(
        _cost(captured, i, found[1][i], {t: found[t][i] for t in wanted[1:]}, speeds)
        for i in range(len(captured.graph.layers))
    )
    return Profile(
        format="dpart.profile",
        version=1,
        graph=captured.graph,
        batch_size=captured.model.batch_size,
        machine=Machine("cpu" if device.name == _CPU else device.name, 1, device.memory_bytes, 1, estimated=True),
        step_seconds=sum(cost.forward_seconds + cost.backward_seconds for cost in costs),
        costs=costs,
    )


@dataclass(frozen=True)
class _Speeds:
    device: DeviceKind
    efficiencies: Efficiencies

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        """Of kernels one after another."""
        return sum(map(self._kernel, kernels))

    def _kernel(self, kernel: Kernel) -> float:
        reached = self.efficiencies
        moving = kernel.moved_bytes / (self.device.memory_bandwidth_bytes_per_second * reached.memory)
        computing = 0.0
        if kernel.flops:
            part = reached.attention if kernel.kind == "attention" else reached.products
            computing = kernel.flops / (self._peak(kernel) * part)
        return max(moving, computing) + reached.launch_seconds

    def _peak(self, kernel: Kernel) -> float:
        """By torch's defaults, float32 convolutions may round to TF32 and float32 products may not."""
        if kernel.dtype in ("bfloat16", "float16"):
            return self.device.flops.of(kernel.dtype)
        if kernel.dtype.startswith("float8"):
            return self.device.flops.of("float8")
        return self.device.flops.of("tf32" if kernel.kind == "convolution" else "float32")


def _cost(
    captured: CapturedModel, index: int, whole: LayerSplit, splits: dict[int, LayerSplit], speeds: _Speeds
) -> LayerCost:
    layer = captured.graph.layers[index]
    read = [captured.graph.parameter[name] for name in layer.parameters]
    parameter_bytes = sum(p.size_bytes for p in read)
    trainable_bytes = sum(p.size_bytes for p in read if p.trainable)
    forward, backward, weights = _seconds(whole, speeds)
    return LayerCost(
        layer=layer.name,
        forward_seconds=forward,
        backward_seconds=backward,
        forward_spread_seconds=0.0,
        backward_spread_seconds=0.0,
        parameter_bytes=parameter_bytes,
        trainable_bytes=trainable_bytes,
        output_bytes=sum(captured.graph.value[name].size_bytes for name in layer.outputs),
        stash_bytes=whole.counts.stash_bytes,
        workspace_bytes=whole.workspace_bytes,
        repeats=0,
        weight_backward_seconds=weights,
        splits=tuple(
            _split_cost(degree, split, parameter_bytes, trainable_bytes, speeds) for degree, split in splits.items()
        ),
    )


def _split_cost(
    degree: int, split: LayerSplit, parameter_bytes: int, trainable_bytes: int, speeds: _Speeds
) -> SplitCost:
    forward, backward, weights = _seconds(split, speeds)
    return SplitCost(
        degree=degree,
        split=split.split,
        forward_seconds=forward,
        backward_seconds=backward,
        weight_backward_seconds=weights,
        parameter_bytes=parameter_bytes - split.parameter_bytes_saved,
        trainable_bytes=trainable_bytes - split.trainable_bytes_saved,
        stash_bytes=split.counts.stash_bytes,
        workspace_bytes=split.workspace_bytes,
        forward_reduces=len(split.forward_reduced_bytes),
        forward_reduce_bytes=sum(split.forward_reduced_bytes),
        backward_reduces=len(split.backward_reduced_bytes),
        backward_reduce_bytes=sum(split.backward_reduced_bytes),
    )


def _seconds(split: LayerSplit, speeds: _Speeds) -> tuple[float, float, float]:
    """Forward, backward, and the part of the backward that parameters alone need."""
    backward = speeds.seconds(split.counts.backward)
    inputs = speeds.seconds(split.counts.input_backward)
    return speeds.seconds(split.counts.forward), backward, max(0.0, backward - inputs)
