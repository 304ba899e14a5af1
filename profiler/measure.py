"""Measures every layer alone: its forward, its own backward, and the bytes it keeps.

The whole graph runs once to record what enters each layer. Then each layer runs on its recorded inputs, with
warm-up and repeats, and its backward by its own autograd call: nothing is booked on a neighbour. Gradients
accumulate into existing ones, as in training. Layers alone sum to about the whole step because autograd does
the same work either way; the measured whole step stands beside the sum.

What a backward takes for gradients of parameters is told apart by a second one, for those of the inputs alone.
"""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from dpart.compiler.captured import CapturedModel
from dpart.compiler.extract import extract
from dpart.profiler.profile import LayerCost, Machine, Profile
from dpart.runtime.errors import UserError

Progress = Callable[[int, int, str], None]
"""Called with (layers done, layers in all, name of the next)."""

_WARM_UP = 2
_MIN_REPEATS = 5
_MAX_REPEATS = 30
_SECONDS_PER_LAYER = 0.25


def profile(captured: CapturedModel, *, repeats: int | None = None, progress: Progress | None = None) -> Profile:
    """Measures every layer of a captured model on the device where its weights are.

    Args:
        repeats: How often each layer is timed; by default between 5 and 30 times, about 0.25 s each.

    Raises:
        UserError: `repeats` is not positive, or the model is on the meta device.
    """
    if captured.model.is_meta:
        raise UserError(
            f"{captured.model.title} is on the meta device, which has shapes and no numbers, so nothing can be "
            "measured: estimate it (dpart profile --estimate h100), or build it with its weights."
        )
    if repeats is not None and repeats < 1:
        raise UserError(f"repeats must be at least 1, got {repeats}.")
    device = captured.model.example[0].device
    with _measuring(captured, device):
        leaves = captured.model.rows(captured.graph.microbatch_size)
        recorded = _record(captured, leaves)
        costs = []
        for done, layer in enumerate(captured.graph.layers):
            if progress is not None:
                progress(done, len(captured.graph.layers), layer.name)
            costs.append(_Measurement(captured, layer.name, recorded, device).cost(repeats))
        if progress is not None:
            progress(len(costs), len(costs), "the whole step")
        step_seconds = _whole_step(captured, leaves, device)
        machine = _machine(device)
    return Profile(
        format="dpart.profile",
        version=1,
        graph=captured.graph,
        batch_size=captured.model.batch_size,
        machine=machine,
        step_seconds=step_seconds,
        costs=tuple(costs),
    )


@contextmanager
def _measuring(captured: CapturedModel, device: torch.device) -> Any:
    """One thread on a CPU (a core is a device); buffers, gradients and random state as before afterwards."""
    threads = torch.get_num_threads()
    buffers = {n: b.clone() for n, b in captured.model.named_buffers()}
    gradients = [(p, p.grad) for p in captured.model.parameters()]
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads(threads)
        for name, buffer in captured.model.named_buffers():
            buffer.copy_(buffers[name])
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _record(captured: CapturedModel, leaves: tuple[Tensor, ...]) -> dict[str, Any]:
    """What every node gives, by name; copies where something changes it in place later."""
    recorded: dict[str, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            recorded[n.name] = result.clone() if isinstance(result, Tensor) and n.op != "get_attr" else result
            return result

    with torch.no_grad():
        Recorder(captured.module).run(*leaves)
    return recorded


class _Measurement:
    """One layer on its recorded inputs."""

    def __init__(self, captured: CapturedModel, layer: str, recorded: dict[str, Any], device: torch.device) -> None:
        self.layer = captured.graph.layer[layer]
        self.graph = captured.graph
        self.device = device
        self.module, self.sources, _ = extract(captured, layer)
        self.recorded = recorded
        self.outputs = [self.graph.value[name] for name in self.layer.outputs]
        self.has_backward = any(v.differentiable for v in self.outputs)
        for parameter in self.module.parameters():
            if parameter.requires_grad and self.has_backward:
                parameter.grad = torch.zeros_like(parameter)

    def cost(self, repeats: int | None) -> LayerCost:
        """Times the layer and counts its bytes."""
        stash_bytes = self._stash_bytes()
        for _ in range(_WARM_UP):
            self._once()
        forward: list[float] = []
        backward: list[float] = []
        began = time.perf_counter()
        limit = repeats or _MAX_REPEATS
        while len(forward) < limit:
            f, b = self._once()
            forward.append(f)
            backward.append(b)
            enough = repeats is None and len(forward) >= _MIN_REPEATS
            if enough and time.perf_counter() - began > _SECONDS_PER_LAYER:
                break
        weights = self._weight_backward_seconds(statistics.median(backward), min(limit, _MIN_REPEATS))
        for parameter in self.module.parameters():
            parameter.grad = None
        read = [self.graph.parameter[name] for name in self.layer.parameters]
        outputs = sum(v.size_bytes for v in self.outputs)
        inputs = sum(self.graph.value[n].size_bytes for n in self.layer.inputs if self.graph.value[n].differentiable)
        return LayerCost(
            layer=self.layer.name,
            forward_seconds=statistics.median(forward),
            backward_seconds=statistics.median(backward),
            forward_spread_seconds=_spread(forward),
            backward_spread_seconds=_spread(backward),
            parameter_bytes=sum(p.size_bytes for p in read),
            trainable_bytes=sum(p.size_bytes for p in read if p.trainable),
            output_bytes=outputs,
            stash_bytes=stash_bytes,
            workspace_bytes=(outputs + inputs) if self.has_backward else outputs,
            repeats=len(forward),
            weight_backward_seconds=weights,
        )

    def _weight_backward_seconds(self, whole_seconds: float, repeats: int) -> float:
        """The whole backward less one that gives the gradients of the inputs alone."""
        trained = any(p.requires_grad for p in self.module.parameters())
        if not trained or not self.has_backward:
            return 0.0
        seconds = [self._input_backward_seconds() for _ in range(_WARM_UP + repeats)][_WARM_UP:]
        return max(0.0, whole_seconds - statistics.median(seconds))

    def _input_backward_seconds(self) -> float:
        arguments, leaves = self._inputs()
        if not leaves:
            return 0.0
        roots = [r for r in self.module(*arguments) if isinstance(r, Tensor) and r.requires_grad]
        gradients = [torch.ones_like(r) for r in roots]
        self._wait()
        began = time.perf_counter()
        torch.autograd.grad(roots, leaves, gradients, allow_unused=True)
        self._wait()
        return time.perf_counter() - began

    def _inputs(self) -> tuple[list[Any], list[Tensor]]:
        """Fresh inputs, and the leaves that gradients flow to: copies, so that in-place layers find what they found."""
        arguments, leaves = [], []
        for name in self.sources:
            value = self.recorded[name]
            if isinstance(value, Tensor):
                known = self.graph.value.get(name)
                value = value.detach().clone()
                if known is not None and known.differentiable:
                    leaves.append(value.requires_grad_())
                    value = value.view_as(value).clone()
            arguments.append(value)
        return arguments, leaves

    def _once(self) -> tuple[float, float]:
        arguments, _ = self._inputs()
        self._wait()
        began = time.perf_counter()
        results = self.module(*arguments)
        self._wait()
        middle = time.perf_counter()
        if not self.has_backward:
            return middle - began, 0.0
        roots = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
        gradients = [torch.ones_like(r) for r in roots]
        self._wait()
        start = time.perf_counter()
        torch.autograd.backward(roots, gradients)
        self._wait()
        return middle - began, time.perf_counter() - start

    def _stash_bytes(self) -> int:
        """Bytes autograd saves beyond parameters, each storage once."""
        own = {p.untyped_storage().data_ptr() for p in self.module.parameters()}
        own |= {b.untyped_storage().data_ptr() for b in self.module.buffers()}
        sizes: dict[int, int] = {}
        kept: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept.append(tensor)
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.module(*self._inputs()[0])
        return sum(sizes.values())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _spread(seconds: list[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    first, _, third = statistics.quantiles(seconds, n=4)
    return third - first


def _whole_step(captured: CapturedModel, leaves: tuple[Tensor, ...], device: torch.device) -> float:
    seconds = []
    for parameter in captured.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for _ in range(_WARM_UP + _MIN_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        captured.model(*leaves).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UP:])


def _machine(device: torch.device) -> Machine:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Machine(properties.name, torch.cuda.device_count(), properties.total_memory, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine("cpu", cores, total // cores, 1)
