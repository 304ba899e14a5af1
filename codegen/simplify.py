"""What every stage recomputes, written once: equal masks and positions become one, and ``x + 0`` becomes ``x``.

Works on a copy of the graph. Only nodes without a layer are touched: they have no gradient and no randomness.
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dpart.codegen.stages import writes
from dpart.compiler.captured import CapturedModel


def simplified(captured: CapturedModel) -> CapturedModel:
    """The same model over a graph whose recomputed nodes have no duplicates."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    seen: dict[Any, fx.Node] = {}
    safe = not any(_changes_prelude(n, captured.module) for n in captured.module.graph.nodes)
    for node in captured.module.graph.nodes:
        if not (safe and _is_prelude(node)):
            env[node] = graph.node_copy(node, lambda n: env[n])
            continue
        args = fx.node.map_arg(node.args, lambda n: env[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: env[n])
        key = (node.op, node.target, repr(args), repr(kwargs))
        same = seen.get(key) or _neutral(node, args, kwargs)
        env[node] = same or graph.node_copy(node, lambda n: env[n])
        seen[key] = env[node]
    return replace(captured, module=fx.GraphModule(captured.module, graph))


def _is_prelude(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and node.meta.get("layer") is None


def _changes_prelude(node: fx.Node, module: fx.GraphModule) -> bool:
    first = node.args[0] if node.op.startswith("call_") and node.args else None
    return isinstance(first, fx.Node) and _is_prelude(first) and writes(node, module)


def _neutral(node: fx.Node, args: Any, kwargs: Any) -> fx.Node | None:
    """The operand that an addition of 0, or a conjunction with all true, gives back."""
    if kwargs or len(args) != 2:
        return None
    first, second = args
    if node.target is operator.add and type(second) is int and second == 0 and isinstance(first, fx.Node):
        return first
    if node.target is operator.and_ and isinstance(first, fx.Node) and isinstance(second, fx.Node):
        true = first.target == "new_ones" and first.args[1:] == ([],) and first.meta["dtype"] is torch.bool
        return second if true and second.meta.get("dtype") is torch.bool else None
    return None
