"""What each stage contains: its nodes, what it receives and returns, and the channels between stages.

A stage runs its layers' nodes in the original order, and before their first use the nodes without a layer that
they need: masks, positions, the number of rows. Those are computed again in every stage that reads them.
"""

import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from dpart.codegen.names import plain
from dpart.compiler.captured import CapturedModel
from dpart.compiler.layers import changes_in_place, target_name
from dpart.partitioner.plan import Plan
from dpart.runtime.errors import UserError
from dpart.runtime.program import Channel, Tensor
from dpart.runtime.randomness import is_random_call

_VIEWS = frozenset({
    "view", "reshape", "transpose", "permute", "contiguous", "expand", "expand_as", "unsqueeze", "squeeze",
    "flatten", "unflatten", "getitem", "split", "chunk", "unbind", "select", "narrow", "view_as", "t", "to",
    "float", "type_as", "detach", "dropout", "movedim", "swapaxes", "swapdims", "diagonal", "unfold", "real",
    "as_strided", "slice", "alias", "mT", "tensor_split", "type", "double", "half", "bfloat16", "imag", "pad",
})  # fmt: skip
_RANDOM_MODULES: dict[type, Any] = {
    nn.Dropout: F.dropout, nn.Dropout1d: F.dropout1d, nn.Dropout2d: F.dropout2d, nn.Dropout3d: F.dropout3d,
    nn.AlphaDropout: F.alpha_dropout, nn.FeatureAlphaDropout: F.feature_alpha_dropout, nn.RReLU: F.rrelu,
}  # fmt: skip
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten)


@dataclass(frozen=True)
class StageContent:
    """One stage as part of the graph.

    Attributes:
        nodes: Calls in the order of execution, with what the stage recomputes.
        inputs: Nodes outside that it reads: the model's inputs first, then values of earlier stages.
        outputs: Nodes whose values later stages read; the last stage's has the loss.
        changed: Those of `inputs` that the stage changes in place.
        layers: Names.
    """

    index: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    changed: tuple[fx.Node, ...]
    layers: tuple[str, ...]


def stage_contents(captured: CapturedModel, plan: Plan) -> tuple[StageContent, ...]:
    """The stages of a plan for this model.

    Raises:
        UserError: The plan is for another model, does not hold each layer once, or has a stage that reads
            what a later one makes.
    """
    placed = _placed(captured, plan)
    graph = captured.module.graph
    loss = next(n for n in graph.nodes if n.op == "output").all_input_nodes[0]
    stage_of = {n: placed[n.meta["layer"]] for n in graph.nodes if n.meta.get("layer") is not None}
    needed = [_needed(graph, stage_of, s) for s in range(len(plan.stages))]
    for s, nodes in enumerate(needed):
        late = [n for n in nodes if stage_of.get(n, s) > s]
        if late:
            raise UserError(
                f"The plan's stage {s} reads {late[0].name}, which stage {stage_of[late[0]]} makes; a stage "
                "may only read from earlier ones. Partition the profile again."
            )
    if stage_of[loss] != len(plan.stages) - 1:
        raise UserError(
            f"The plan puts the loss ({loss.meta['layer']}) into stage {stage_of[loss]}; it must be in the last."
        )
    order = {n: i for i, n in enumerate(graph.nodes)}
    return tuple(
        _content(captured, s, set(nodes), stage_of, needed, loss, order, plan.stages[s].layers)
        for s, nodes in enumerate(needed)
    )


def channels(captured: CapturedModel, stages: tuple[StageContent, ...]) -> tuple[Channel, ...]:
    """Between each two stages in turn that make or read a value, in the order of the values' making."""
    found = []
    for producer in stages:
        for node in producer.outputs:
            users = [s.index for s in stages if s.index > producer.index and node in s.inputs]
            chain = [producer.index, *users]
            value = captured.graph.value[node.name]
            tensor = Tensor(value.name, value.shape, value.dtype, value.batch_dim)
            found += [Channel(tensor, a, b, value.differentiable) for a, b in pairwise(chain)]
    return tuple(found)


def rows_dim(node: fx.Node, captured: CapturedModel) -> int | None:
    """The dimension of a value whose size is the number of rows, or None where there is none.

    Rows that were multiplied into another dimension are not the number of rows any more.
    """
    value = captured.graph.value.get(node.name)
    if value is None or value.batch_dim is None or value.shape[value.batch_dim] != captured.graph.microbatch_size:
        return None
    return value.batch_dim


def random_calls(captured: CapturedModel) -> dict[fx.Node, int]:
    """The index of every random call among those of the unsplit model, in the order of execution."""
    calls = [n for n in captured.module.graph.nodes if _is_random(n, captured.module)]
    return {node: i for i, node in enumerate(calls)}


def writes(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether the node writes to its first argument."""
    if node.target in (operator.and_, operator.or_, operator.not_):
        return False
    return node.target is operator.setitem or changes_in_place(node, module)


def is_tuple(node: fx.Node) -> bool:
    """Whether the node's result is a tuple of tensors rather than one tensor or a number."""
    return (
        node.op.startswith("call_")
        and "shape" not in node.meta
        and bool(node.users)
        and any(u.target is operator.getitem and u.args[0] is node for u in node.users)
    )


def _placed(captured: CapturedModel, plan: Plan) -> dict[str, int]:
    graph = captured.graph
    if plan.fingerprint != graph.fingerprint:
        raise UserError(
            f"The plan is for {plain(plan.model)} with fingerprint {plain(plan.fingerprint)}, but the model is "
            f"{plain(graph.model)} with fingerprint {graph.fingerprint}; profile and partition this model."
        )
    placed: dict[str, int] = {}
    faults = []
    for s, stage in enumerate(plan.stages):
        for layer in stage.layers:
            if layer not in graph.layer:
                faults.append(f"stages[{s}] has {plain(layer)!r}, which is no layer of the model")
            elif layer in placed:
                faults.append(f"{plain(layer)!r} is both in stage {placed[layer]} and in stage {s}")
            placed.setdefault(layer, s)
    faults += [f"layer {plain(name)!r} is in no stage" for name in graph.layer if name not in placed]
    faults += [f"stages[{s}] is empty" for s, stage in enumerate(plan.stages) if not stage.layers]
    if faults:
        raise UserError("\n".join(f"The plan does not fit {plain(graph.model)}: {f}." for f in faults))
    return placed


def _needed(graph: fx.Graph, stage_of: dict[fx.Node, int], stage: int) -> dict[fx.Node, None]:
    """The stage's nodes and, as far as it must recompute or receive them, those they read."""
    needed: dict[fx.Node, None] = {}
    todo = [n for n in graph.nodes if stage_of.get(n) == stage]
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed[node] = None
        inside = stage_of.get(node, stage) == stage
        if inside and node.name != "batch_size" and node.op != "placeholder":
            todo += node.all_input_nodes
    return needed


def _content(
    captured: CapturedModel,
    index: int,
    nodes: set[fx.Node],
    stage_of: dict[fx.Node, int],
    needed: list[dict[fx.Node, None]],
    loss: fx.Node,
    order: dict[fx.Node, int],
    layers: tuple[str, ...],
) -> StageContent:
    inputs = [n for n in nodes if n.op == "placeholder" or stage_of.get(n, index) != index]
    calls = sorted((n for n in nodes if n.op.startswith("call_") and n not in inputs), key=order.__getitem__)
    values = captured.graph.value
    if any(n.name == "batch_size" for n in calls) and all(rows_dim(n, captured) is None for n in inputs):
        inputs.append(next(n for n in order if n.op == "placeholder" and rows_dim(n, captured) is not None))
    inputs.sort(key=lambda n: (n.op != "placeholder", order[n]))
    later = [n for nodes in needed[index + 1 :] for n in nodes]
    outputs = sorted({n for n in later if stage_of.get(n) == index}, key=order.__getitem__)
    if stage_of[loss] == index:
        outputs.append(loss)
    unknown = [n.name for n in outputs if n.name not in values]
    assert not unknown, f"values that the graph does not know cross stages: {unknown}"
    return StageContent(
        index, tuple(calls), tuple(inputs), tuple(outputs), _changed(captured.module, calls, inputs), layers
    )


def _changed(module: fx.GraphModule, calls: list[fx.Node], inputs: list[fx.Node]) -> tuple[fx.Node, ...]:
    """The inputs that an in-place operation writes to, directly or through a view."""
    root: dict[fx.Node, fx.Node] = {n: n for n in inputs}
    found = set()
    for node in calls:
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or first not in root:
            continue
        if writes(node, module):
            found.add(root[first])
        views = node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), _VIEW_MODULES)
        if writes(node, module) or views or (node.op != "call_module" and target_name(node) in _VIEWS):
            root[node] = root[first]
    return tuple(n for n in inputs if n in found)


def _is_random(node: fx.Node, module: fx.GraphModule) -> bool:
    if node.op == "call_module":
        inner = module.get_submodule(str(node.target))
        function = _RANDOM_MODULES.get(type(inner))
        if function is None:
            return False
        if isinstance(inner, nn.RReLU):
            return bool(is_random_call(function, node.args, {"training": True}))
        return bool(is_random_call(function, node.args, {"p": inner.p, "training": True}))
    if node.op == "call_method":
        return bool(is_random_call(getattr(torch.Tensor, str(node.target)), node.args, node.kwargs))
    target: Any = node.target
    return node.op == "call_function" and is_random_call(target, node.args, node.kwargs)
