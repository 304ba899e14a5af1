"""What variables are called: after what attention, losses and modules call their operands, else plainly."""

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from dpart.codegen.names import base_name
from dpart.codegen.scopes import Scope
from dpart.codegen.stages import is_tuple
from dpart.compiler.captured import CapturedModel
from dpart.compiler.layers import target_name

_OPERANDS: dict[Any, tuple[str, ...]] = {
    F.scaled_dot_product_attention: ("query", "key", "value", "mask"),
    F.cross_entropy: ("logits", "target"),
    F.nll_loss: ("log_probabilities", "target"),
    F.binary_cross_entropy_with_logits: ("logits", "target"),
    F.mse_loss: ("prediction", "target"),
    F.l1_loss: ("prediction", "target"),
    F.smooth_l1_loss: ("prediction", "target"),
}
_RESULTS: dict[Any, str] = {
    F.scaled_dot_product_attention: "attended", F.cross_entropy: "loss", F.nll_loss: "loss",
    F.binary_cross_entropy_with_logits: "loss", F.mse_loss: "loss", F.l1_loss: "loss",
    F.smooth_l1_loss: "loss", torch.cat: "joined", F.embedding: "embedded",
    operator.le: "mask", operator.ge: "mask", operator.lt: "mask", operator.gt: "mask", operator.eq: "mask",
    operator.and_: "mask", operator.or_: "mask", F.one_hot: "one_hot",
}  # fmt: skip
_SHAPES = frozenset({
    "view", "reshape", "transpose", "permute", "contiguous", "expand", "unsqueeze", "squeeze", "getitem", "to",
    "float", "flatten", "t", "expand_as",
})  # fmt: skip
_PLAIN = frozenset({
    "add", "sub", "mul", "truediv", "div", "matmul", "neg", "pow", "addmm", "baddbmm", "linear", "dropout",
    "clone", "relu", "gelu", "silu", "layer_norm", "rsub", "where", "masked_fill", "pad", "split", "chunk",
}) | _SHAPES  # fmt: skip


def operand_hints(items: Iterable[fx.Node | Scope]) -> dict[fx.Node, str]:
    """Names for the operands of attention and losses, through whatever only reshapes them."""
    hints: dict[fx.Node, str] = {}
    for item in items:
        if isinstance(item, Scope) or item.target not in _OPERANDS:
            continue
        wishes = _OPERANDS[item.target]
        given = list(zip(item.args, wishes, strict=False))
        given += [(item.kwargs[k], "mask") for k in ("attn_mask",) if k in item.kwargs]
        for node, wish in given:
            while isinstance(node, fx.Node) and node not in hints:
                hints[node] = wish
                reshapes = node.op != "call_module" and target_name(node) in _SHAPES
                node = node.args[0] if reshapes and node.args else None
    return hints


def parameter_names(scope: Scope, captured: CapturedModel, hints: dict[fx.Node, str]) -> list[str]:
    """A wish for the name of each argument of a scope's forward."""
    if scope.parent is None:
        received = [n for n in scope.inputs if n.op != "placeholder" and _floating(n)]
        return [_received_name(n, len(received) == 1) if n in received else n.name for n in scope.inputs]
    own = _own_parameters(captured.model.model.get_submodule(scope.path))
    tensors = [n for n in scope.inputs if n.name != "batch_size"]
    if len(own) == len(tensors):
        return [*own, *["batch_size"] * (len(scope.inputs) - len(tensors))]
    return [
        "batch_size" if n.name == "batch_size"
        else own[0] if i == 0 and own and n not in hints and n.op != "get_attr"
        else _argument_name(n, hints)
        for i, n in enumerate(scope.inputs)
    ]  # fmt: skip


def telling_name(item: fx.Node | Scope, hints: dict[fx.Node, str]) -> str | None:
    """A name that tells what an item's result is, or None."""
    if isinstance(item, Scope):
        return hints.get(item.outputs[0]) if len(item.outputs) == 1 else None
    if item.name == "batch_size":
        return "batch_size"
    if item in hints:
        return hints[item]
    if item.op == "call_method" and item.target in _SHAPES and len(item.all_input_nodes[0].users) == 1:
        return telling_name(item.all_input_nodes[0], hints) if _floating(item) else None
    return _RESULTS.get(item.target) if item.op == "call_function" else None


def module_name(item: fx.Node | Scope, captured: CapturedModel) -> str | None:
    """A name for a result after the module that makes it, or None."""
    if isinstance(item, Scope):
        last = item.path.rpartition(".")[2]
        return None if last.isdigit() else last
    if item.op != "call_module":
        return None
    module = captured.model.model.get_submodule(str(item.target))
    last = str(item.target).rpartition(".")[2]
    return last if isinstance(module, nn.Linear) and not last.isdigit() else None


def plain_name(item: fx.Node | Scope, first: str | None) -> str:
    """The name of a result about which nothing is known; `first` is the forward's first argument."""
    if isinstance(item, fx.Node) and item.op != "call_module":
        name = target_name(item)
        if not _floating(item) and "dtype" in item.meta:
            return "mask" if item.meta["dtype"] is torch.bool else _integers(item)
        if "dtype" not in item.meta:
            return "results" if is_tuple(item) else "count"
        if name not in _PLAIN and item.op == "call_function" and name.isidentifier():
            return base_name(name)
    return "out" if first in ("x", "inputs") else "hidden"


def _integers(node: fx.Node) -> str:
    """What integers are: the numbers of positions or of rows, or an index."""
    origin = node
    while origin.op.startswith("call_") and origin.target is not torch.arange:
        if not origin.all_input_nodes or target_name(origin) not in _SHAPES | {"add"}:
            return "index"
        origin = origin.all_input_nodes[0]
    return "rows" if any(a.name == "batch_size" for a in origin.all_input_nodes) else "positions"


def _received_name(node: fx.Node, alone: bool) -> str:
    """A value of an earlier stage: the model's main line, or what the module is called that made it."""
    last = str(node.target).rpartition(".")[2] if node.op == "call_module" else ""
    return "hidden" if alone or not last or last.isdigit() else last


def _argument_name(node: fx.Node, hints: dict[fx.Node, str]) -> str:
    if node in hints:
        return hints[node]
    if node.op == "get_attr":
        return str(node.target).rpartition(".")[2]
    if node.op == "placeholder":
        return node.name
    return "mask" if node.meta.get("dtype") is torch.bool else "hidden" if _floating(node) else "index"


def _own_parameters(module: nn.Module) -> list[str]:
    signature = inspect.signature(module.forward)
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return ["x" if p.name == "input" else p.name for p in signature.parameters.values() if p.kind in plain]


def _floating(node: fx.Node) -> bool:
    dtype = node.meta.get("dtype")
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
