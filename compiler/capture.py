"""Capture: a workload becomes a `CapturedModel`, or an error that says what to change.

::

    eager model + loss ─ torch.export (train mode, rows dynamic) ─> ATen graph
        ─ raising ─> public calls ─ layers ─> ModelGraph ─ compared with eager ─> CapturedModel
"""

import contextlib
import hashlib
import io
import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, fx

from dpart.compiler.captured import CapturedModel
from dpart.compiler.compare import accept
from dpart.compiler.graph import Layer, ModelGraph, Parameter, Value
from dpart.compiler.layers import mark_layers
from dpart.compiler.raising import raise_program
from dpart.compiler.workload import LossModel, Workload
from dpart.runtime.callables import user_fault
from dpart.runtime.errors import UserError
from dpart.runtime.randomness import KeyedRandomness


def default_microbatch_size(batch_size: int) -> int:
    """Rows per microbatch where none are asked for: eight microbatches, but no single rows."""
    return min(batch_size, max(2, -(-batch_size // 8)))


def capture(workload: Workload, *, microbatch_size: int | None = None, meta: bool = False) -> CapturedModel:
    """Captures a model with its loss at the given rows per microbatch.

    A model on the meta device has shapes and no numbers: its capture cannot be compared with eager, and it serves
    for estimates alone.

    Args:
        microbatch_size: None for an eighth of the batch; on the meta device, for one row.
        meta: Build the model on the meta device, if the workload has a function that builds it.

    Raises:
        UserError: The model cannot be exported, raised, or does not compute what eager computes; the message
            names the place in the user's source where there is one.
    """
    model = workload.build(meta=meta)
    default = 1 if model.is_meta else default_microbatch_size(model.batch_size)
    rows = default if microbatch_size is None else microbatch_size
    if not 1 <= rows <= model.batch_size:
        raise UserError(
            f"The microbatch size must be between 1 and the example batch's {model.batch_size} rows, got {rows}."
        )
    program = _export(model, max(rows, 2))
    module = raise_program(program, model)
    layers = mark_layers(module, model.model)
    grown = _shapes(module, model.rows(rows + 1), model)
    gradients = _record(module, model.rows(rows), model)
    if not model.is_meta:  # Without numbers there is nothing to compare.
        accept(model, module, model.rows(rows))
    graph = _model_graph(module, model, layers, rows, grown, gradients)
    return CapturedModel(graph, module, model)


def _export(model: LossModel, rows: int) -> torch.export.ExportedProgram:
    example = model.rows(rows)
    dynamic = tuple(None if dim is None else {dim: torch.export.Dim.DYNAMIC} for dim in model.batch_dims)
    try:
        if not model.is_meta:  # Code that looks at numbers fails on the meta device, and not in export.
            model(*example)  # An error of the user's own code is shown as it is, not as export's.
    except Exception as error:
        raise user_fault(f"{model.title} fails on the example inputs", error) from error
    try:
        with _silence():
            return torch.export.export(model, example, dynamic_shapes={"leaves": dynamic}, strict=False)
    except Exception as error:
        raise UserError(_explain(model, error)) from error


@contextmanager
def _silence() -> Iterator[None]:
    """Keeps export's dumps of half-made graphs off the terminal; its error is explained instead."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _explain(model: LossModel, error: Exception) -> str:
    text = str(error)
    place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/torch/" not in code.co_filename and "/compiler/" not in code.co_filename:
            place = f"{code.co_filename}:{trace.tb_lineno}, in {code.co_qualname}"
        trace = trace.tb_next
    kind = type(error).__name__
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in kind:
        reason = "the control flow depends on the data of a tensor (if, while, int(), .item(), .tolist())"
        remedy = "write it with torch.where or masks, or keep that part out of the captured model"
    elif "specialized" in text or "Constraints violated" in text or "ConstraintViolation" in kind:
        reason = "the number of rows of a batch is fixed inside the model, and dpart needs it free"
        remedy = "use the size of an input (x.shape[0]) instead of a number"
    else:
        reason = f"torch.export says: {text.strip().splitlines()[0] if text.strip() else kind}"
        remedy = "see torch.export's documentation for what it supports"
    where = f"\n  at {place}" if place else ""
    return f"{model.title} cannot be captured: {reason}.{where}\n  Remedy: {remedy}."


class _Recorder(fx.Interpreter):
    """Runs the graph and notes what each node's tensor is."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[fx.Node, Tensor] = {}
        self.gradients: dict[fx.Node, bool] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op != "output":
            self.seen[n] = result.detach()
            self.gradients[n] = result.requires_grad
        return result


def _run(module: fx.GraphModule, leaves: tuple[Tensor, ...], model: LossModel, *, grad: bool) -> _Recorder:
    recorder = _Recorder(module)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    with torch.set_grad_enabled(grad), KeyedRandomness(seed=0, step=0, microbatch=0):
        recorder.run(*leaves)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return recorder


def _shapes(module: fx.GraphModule, leaves: tuple[Tensor, ...], model: LossModel) -> dict[str, torch.Size]:
    return {n.name: t.shape for n, t in _run(module, leaves, model, grad=False).seen.items()}


def _record(module: fx.GraphModule, leaves: tuple[Tensor, ...], model: LossModel) -> dict[str, bool]:
    recorder = _run(module, leaves, model, grad=True)
    for node, tensor in recorder.seen.items():
        node.meta |= {"shape": tuple(tensor.shape), "dtype": tensor.dtype, "stride": tensor.stride()}
    return {n.name: flag for n, flag in recorder.gradients.items()}


def _model_graph(
    module: fx.GraphModule,
    model: LossModel,
    layers: dict[str, list[fx.Node]],
    rows: int,
    grown: dict[str, torch.Size],
    gradients: dict[str, bool],
) -> ModelGraph:
    parameters, canonical = _parameters(module, model)
    readers: dict[fx.Node, list[str]] = defaultdict(list)
    for name, nodes in layers.items():
        for node in nodes:
            for source in node.all_input_nodes:
                outside = source.op == "placeholder" or source.meta["layer"] not in (None, name)
                if outside and name not in readers[source]:
                    readers[source].append(name)
    output = next(n for n in module.graph.nodes if n.op == "output").all_input_nodes[0]
    crossing = [n for n in module.graph.nodes if n.op == "placeholder" or n in readers or n is output]
    values = tuple(_value(n, readers.get(n, []), grown, gradients, rows) for n in crossing)
    made: dict[str | None, list[str]] = defaultdict(list)
    read: dict[str, list[str]] = defaultdict(list)
    for value in values:
        made[value.producer].append(value.name)
        for reader in value.consumers:
            read[reader].append(value.name)
    graph = ModelGraph(
        model=model.title,
        fingerprint="",
        microbatch_size=rows,
        inputs=tuple(n.name for n in module.graph.nodes if n.op == "placeholder"),
        loss=output.name,
        values=values,
        parameters=parameters,
        layers=tuple(
            Layer(
                name,
                _kind(nodes, name, model),
                tuple(read[name]),
                tuple(made[name]),
                _read_by(nodes, module, canonical),
            )
            for name, nodes in layers.items()
        ),
    )
    return replace(graph, fingerprint=_fingerprint(graph, module))


def _value(
    node: fx.Node, readers: list[str], grown: dict[str, torch.Size], gradients: dict[str, bool], rows: int
) -> Value:
    if "shape" not in node.meta:
        raise UserError(
            f"{node.name}, a value that is no tensor, is read by {', '.join(readers)} and made in "
            f"{node.meta['layer']}; dpart cannot pass it between stages yet.\n{node.meta.get('trace', '')}"
        )
    shape, dtype = node.meta["shape"], node.meta["dtype"]
    changed = [d for d, (a, b) in enumerate(zip(shape, grown[node.name], strict=True)) if a != b]
    if len(changed) > 1 or any(shape[d] * (rows + 1) != grown[node.name][d] * rows for d in changed):
        raise UserError(
            f"{node.name}, made in {node.meta['layer']}, has sizes {shape} for {rows} rows and "
            f"{tuple(grown[node.name])} for {rows + 1}; dpart needs one dimension that grows with the rows."
        )
    count = 1
    for size in shape:
        count *= size
    return Value(
        name=node.name,
        producer=node.meta["layer"],
        consumers=tuple(readers),
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        batch_dim=changed[0] if changed else None,
        differentiable=gradients[node.name] and node.op != "placeholder",
        size_bytes=count * dtype.itemsize,
    )


def _parameters(module: fx.GraphModule, model: LossModel) -> tuple[tuple[Parameter, ...], dict[str, str]]:
    """All parameters and buffers once, and the first name for each of their names."""
    inner = model.model
    named = [
        *inner.named_parameters(remove_duplicate=False),
        *inner.named_buffers(remove_duplicate=False),
        *((n.target, getattr(module, n.target)) for n in module.graph.nodes
          if n.op == "get_attr" and "." not in n.target),
    ]  # fmt: skip
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        if name not in names.setdefault(id(tensor), []):
            names[id(tensor)].append(name)
        tensors[id(tensor)] = tensor
    state = set(inner.state_dict())
    found = tuple(
        Parameter(
            name=first,
            aliases=tuple(rest),
            shape=tuple(tensors[key].shape),
            dtype=str(tensors[key].dtype).removeprefix("torch."),
            size_bytes=tensors[key].numel() * tensors[key].element_size(),
            trainable=tensors[key].requires_grad,
            persistent=first in state,
        )
        for key, (first, *rest) in names.items()
    )
    return found, {name: p.name for p in found for name in (p.name, *p.aliases)}


def _read_by(nodes: list[fx.Node], module: fx.GraphModule, canonical: dict[str, str]) -> tuple[str, ...]:
    read: dict[str, None] = {}
    todo = list(reversed(nodes))
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "get_attr":
            read[canonical[str(node.target)]] = None
        elif node.op == "call_module":
            inner = module.get_submodule(str(node.target))
            for name in [n for n, _ in inner.named_parameters()] + [n for n, _ in inner.named_buffers()]:
                read[canonical[f"{node.target}.{name}"]] = None
        todo += [n for n in node.all_input_nodes if n.meta["layer"] is None and n.op != "placeholder"]
    return tuple(read)


def _kind(nodes: list[fx.Node], name: str, model: LossModel) -> str:
    try:
        return type(model.model.get_submodule(name)).__name__
    except AttributeError:
        return name.rpartition(".")[2].rstrip("_0123456789")


def _fingerprint(graph: ModelGraph, module: fx.GraphModule) -> str:
    """Of the structure, whatever the rows per microbatch and the weights' numbers."""
    data = asdict(replace(graph, microbatch_size=0))
    for value in data["values"]:
        if value["batch_dim"] is not None:
            value["shape"] = [s for d, s in enumerate(value["shape"]) if d != value["batch_dim"]]
        del value["size_bytes"]
    calls = [f"{n.name} {n.op} {n.target!s} {n.args} {n.kwargs}" for n in module.graph.nodes]
    calls = [c for c in calls if " at 0x" not in c]
    return hashlib.sha256(json.dumps([data, calls], sort_keys=True).encode()).hexdigest()[:16]
