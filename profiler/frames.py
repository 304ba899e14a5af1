"""`LayerFrame`: one layer of a captured model as the estimate sees it: its nodes, what enters, and a signature.

Layers of one signature compute the same on tensors of the same sizes, so they are counted once: the repeated blocks
of a model of any depth are one case.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dpart.compiler.captured import CapturedModel
from dpart.compiler.constructors import constructor
from dpart.compiler.graph import Layer
from dpart.profiler.walk import Shard, stand_in


@dataclass(frozen=True)
class LayerFrame:
    """A layer's nodes and its surroundings.

    Attributes:
        nodes: In execution order.
        sources: What it reads from outside: values, and what every stage recomputes for itself.
        differentiable: For each source, whether a gradient flows back to it.
        numbers: The sources that are no tensors, with what they are.
        outputs: The nodes of the layer's values, in the layer's order.
        signature: Equal for layers that compute the same.
    """

    layer: Layer
    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    differentiable: tuple[bool, ...]
    numbers: dict[fx.Node, Any]
    outputs: tuple[fx.Node, ...]
    signature: str

    def stand_ins(
        self, shards: tuple[int | None, ...], degree: int
    ) -> tuple[dict[fx.Node, tuple[Any, Shard | None]], list[Tensor]]:
        """For each source what a rank has of it, a stand-in or the number; and the leaves that gradients flow to."""
        made: dict[fx.Node, tuple[Any, Shard | None]] = {}
        leaves: list[Tensor] = []
        for i, (node, needs_gradient) in enumerate(zip(self.sources, self.differentiable, strict=True)):
            if node in self.numbers:
                made[node] = (self.numbers[node], None)
                continue
            dim = shards[i]
            shape = tuple(-(-s // degree) if d == dim else s for d, s in enumerate(node.meta["shape"]))
            tensor = stand_in(shape, node.meta["stride"], node.meta["dtype"])
            if needs_gradient:
                leaves.append(tensor.requires_grad_())
            # A copy, because layers may change what they get in place.
            made[node] = (tensor.clone(), None if dim is None else Shard(dim, frozenset({f"<{i}"})))
        return made, leaves


def frames(captured: CapturedModel) -> list[LayerFrame]:
    """A frame for every layer, in the order of the graph's."""
    nodes: dict[str, list[fx.Node]] = defaultdict(list)
    for node in captured.module.graph.nodes:
        if node.op.startswith("call_") and node.meta["layer"] is not None:
            nodes[node.meta["layer"]].append(node)
    return [_frame(captured, layer, nodes[layer.name]) for layer in captured.graph.layers]


def _frame(captured: CapturedModel, layer: Layer, nodes: list[fx.Node]) -> LayerFrame:
    inside = set(nodes)
    sources = tuple(
        dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr")
    )
    values = captured.graph.value
    differentiable = tuple(s.name in values and values[s.name].differentiable for s in sources)
    rows = captured.graph.microbatch_size
    numbers = {s: _number(s, rows) for s in sources if "shape" not in s.meta}
    made = {n.name: n for n in nodes}
    outputs = tuple(made[name] for name in layer.outputs)
    signature = _signature(captured, nodes, sources, differentiable, numbers, outputs)
    return LayerFrame(layer, tuple(nodes), sources, differentiable, numbers, outputs, signature)


def _number(node: fx.Node, rows: int) -> Any:
    """A size, computed from the number of rows."""
    if node.name == "batch_size":
        return rows
    if node.op == "call_method" and str(node.target) == "size":
        source, *dims = node.args
        assert isinstance(source, fx.Node)
        sizes = torch.Size(source.meta["shape"])
        return sizes[dims[0]] if dims and isinstance(dims[0], int) else sizes
    assert callable(node.target), f"{node.name} is neither a tensor nor a size"
    return node.target(*fx.node.map_arg(node.args, lambda n: _number(n, rows)))


def _signature(
    captured: CapturedModel,
    nodes: list[fx.Node],
    sources: tuple[fx.Node, ...],
    differentiable: tuple[bool, ...],
    numbers: dict[fx.Node, Any],
    outputs: tuple[fx.Node, ...],
) -> str:
    places: dict[Any, str] = {}
    lines = []
    for source, flag in zip(sources, differentiable, strict=True):
        places[source] = f"%{len(places)}"
        lines.append(
            f"{places[source]} {numbers.get(source)} {_sizes(source)} {flag} {source.name in captured.graph.value}"
        )

    def place(node: fx.Node) -> str:
        if node.op == "get_attr":
            found = _fetch(captured.module, str(node.target))
            key = id(found)
            if key not in places:
                places[key] = f"%{len(places)}"
                lines.append(f"{places[key]} {_tensor(found)}")
            return places[key]
        return places[node]

    for node in nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _Text(place(n)))
        called = _module(captured, str(node.target)) if node.op == "call_module" else _target(node)
        places[node] = f"%{len(places)}"
        lines.append(f"{places[node]} {node.op} {called} {arguments} {_sizes(node)}")
    return "\n".join([*lines, *(places[node] for node in outputs)])


class _Text(str):
    """A place in a signature, shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _target(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', node.target)}"


def _module(captured: CapturedModel, path: str) -> str:
    module = captured.module.get_submodule(path)
    state = [*module.named_parameters(), *module.named_buffers()]
    return f"{constructor(module)} " + " ".join(f"{name}:{_tensor(tensor)}" for name, tensor in state)


def _tensor(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.requires_grad}"


def _sizes(node: fx.Node) -> str:
    return f"{node.meta.get('shape')} {node.meta.get('stride')} {node.meta.get('dtype')}"


def _fetch(module: fx.GraphModule, name: str) -> Tensor:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value
