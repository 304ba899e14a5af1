"""`PRODUCTS`: rules for products by parameters, look-ups in a table, and convolutions: where a shard starts and ends.

A product whose input is whole takes the columns of its weight: each rank gives some of the outputs. One whose input
is a shard takes the rows: each rank gives a partial sum of all outputs. A look-up takes the rows of its table, a
convolution its output or its input channels.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from dpart.profiler.walk import PARTIAL, Rule, Shard, Unsplittable, Walk

_Result = tuple[Any, Shard | None]


def _starts(rule: Rule) -> Rule:
    """Marks a rule that is asked even where no input is a shard."""
    rule.starts = True  # type: ignore[attr-defined]
    return rule


def _product(
    walk: Walk, node: fx.Node, source: fx.Node, weight: str, bias: str | None, rows: int, columns: int, kind: str = ""
) -> _Result:
    """A product of `source`'s last dimension with the parameter's dimension `rows`; the result's last is `columns`."""
    state = walk.states.get(source)
    last = len(source.meta["shape"]) - 1
    if state is None:
        if not walk.can_shard(weight, columns) or (bias and not walk.can_shard(bias, 0)):
            return walk.call(node), None
        walk.shard(weight, columns)
        if bias:
            walk.shard(bias, 0)
        walk.marks.add(kind or "column")
        return walk.call(node), Shard(len(node.meta["shape"]) - 1, frozenset({weight}))
    if state.dim != last:
        return walk.call(node), state
    if not walk.can_shard(weight, rows):
        raise Unsplittable(state.origins)
    walk.shard(weight, rows)
    walk.marks.add(kind or "row")
    return walk.call(node), Shard(PARTIAL, state.origins | {weight})


@_starts
def _linear(walk: Walk, node: fx.Node) -> _Result:
    if node.op == "call_module":
        module, name = walk.submodule(node), str(node.target)
        bias = f"{name}.bias" if module.bias is not None else None
        return _product(walk, node, node.all_input_nodes[0], f"{name}.weight", bias, rows=1, columns=0)
    source, weight, *rest = node.args
    found = walk.parameter_of(weight) if isinstance(weight, fx.Node) else None
    given = rest[0] if rest else node.kwargs.get("bias")
    added = walk.parameter_of(given) if isinstance(given, fx.Node) else None
    if found is None or (given is not None and added is None):
        return _whole(walk, node)
    rows, columns = found[1][1], found[1][0]
    assert isinstance(source, fx.Node)
    return _product(walk, node, source, found[0], added[0] if added else None, rows, columns)


@_starts
def _addmm(walk: Walk, node: fx.Node) -> _Result:
    given, source, weight = node.args[:3]
    found = walk.parameter_of(weight) if isinstance(weight, fx.Node) else None
    added = walk.parameter_of(given) if isinstance(given, fx.Node) else None
    if found is None or added is None or node.kwargs:
        return _whole(walk, node)
    assert isinstance(source, fx.Node)
    return _product(walk, node, source, found[0], added[0], rows=found[1][0], columns=found[1][1])


@_starts
def _matmul(walk: Walk, node: fx.Node) -> _Result:
    left, right = node.args[:2]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    found = walk.parameter_of(right)
    if found is not None and len(found[1]) >= 2:
        return _product(walk, node, left, found[0], None, rows=found[1][-2], columns=found[1][-1])
    return _of_activations(walk, node, left, right)


@_starts
def _grouped(walk: Walk, node: fx.Node) -> _Result:
    """The experts of a mixture: each rank has a part of every expert."""
    source, weight = node.args[:2]
    found = walk.parameter_of(weight) if isinstance(weight, fx.Node) else None
    if found is None:
        return _whole(walk, node)
    assert isinstance(source, fx.Node)
    return _product(walk, node, source, found[0], None, rows=found[1][-2], columns=found[1][-1], kind="experts")


def _of_activations(walk: Walk, node: fx.Node, left: fx.Node, right: fx.Node) -> _Result:
    """Shared out along a dimension of the batch, as attention heads are, or along the one that is added up."""
    a, b = walk.states.get(left), walk.states.get(right)
    origins = walk.origins(node)
    ndim, na, nb = (len(n.meta["shape"]) for n in (node, left, right))
    from_end = (a.dim - na if a else None, b.dim - nb if b else None)
    if a is None and b is None:
        return walk.call(node), None
    if from_end == (-1, -2):
        return walk.call(node), Shard(PARTIAL, origins)
    if from_end == (-2, None) or from_end == (None, -1):
        return walk.call(node), Shard(ndim + (from_end[0] or from_end[1] or 0), origins)
    if a and b and from_end[0] == from_end[1] and a.dim < na - 2:
        if ndim == 4:
            walk.marks.add("heads")
        return walk.call(node), Shard(ndim + a.dim - na, origins)
    raise Unsplittable(origins)


@_starts
def _embedding(walk: Walk, node: fx.Node) -> _Result:
    """By rows of the table, unless it is no larger than what it gives: adding that up would cost more than it saves."""
    if node.op == "call_module":
        (ids,), name = node.all_input_nodes, f"{node.target}.weight"
    else:
        (first, table), ids = node.args[:2], node.all_input_nodes[0]
        assert first is ids
        found = walk.parameter_of(table) if isinstance(table, fx.Node) else None
        if found is None or node.kwargs:
            return _whole(walk, node)
        name = found[0]
    table_size = walk.original(name).numel()
    given = 1
    for size in node.meta["shape"]:
        given *= size
    if walk.states.get(ids) is not None or table_size <= given or not walk.can_shard(name, 0):
        return _whole(walk, node)
    walk.shard(name, 0)
    walk.marks.add("vocabulary")
    return F.embedding(walk.value(ids), walk.parameter(name)), Shard(PARTIAL, frozenset({name}))


@_starts
def _convolution(walk: Walk, node: fx.Node) -> _Result:
    """By output channels, then by input channels; one with groups by groups."""
    if node.op != "call_module":
        return _whole(walk, node)
    module, name = walk.submodule(node), str(node.target)
    outputs, inputs = (1, 0) if isinstance(module, nn.modules.conv._ConvTransposeNd) else (0, 1)
    (source,) = node.all_input_nodes
    state = walk.states.get(source)
    if module.groups != 1 or (state is not None and state.dim != 1):
        return _whole(walk, node)
    bias = f"{name}.bias" if module.bias is not None else None
    if state is None:
        if not walk.can_shard(f"{name}.weight", outputs):
            return walk.call(node), None
        walk.shard(f"{name}.weight", outputs)
        if bias:
            walk.shard(bias, 0)
        walk.marks.add("channels")
        return walk.call(node), Shard(1, frozenset({f"{name}.weight"}))
    walk.shard(f"{name}.weight", inputs)
    walk.marks.add("channels")
    return walk.call(node), Shard(PARTIAL, state.origins | {f"{name}.weight"})


def _whole(walk: Walk, node: fx.Node) -> _Result:
    if origins := walk.origins(node):
        raise Unsplittable(origins)
    return walk.call(node), None


PRODUCTS: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("linear", "Linear"), _linear),
        **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
        **dict.fromkeys(("embedding", "Embedding"), _embedding),
        **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d"), _convolution),
        "addmm": _addmm,
        "grouped_mm": _grouped,
    }
)
