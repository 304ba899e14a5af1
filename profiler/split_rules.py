"""`RULES`: what becomes of a shard in every operation, by the name of the function, method or module.

A rule runs its node on one rank's tensors and says how the result lies over the ranks. Products by parameters,
look-ups and convolutions (`dpart.profiler.split_products`) may start a shard; all others only pass one on, and raise
`Unsplittable` where they cannot.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from dpart.profiler.split_products import PRODUCTS
from dpart.profiler.views import place_in_view
from dpart.profiler.walk import Rule, Shard, Unsplittable, Walk, turned

_Result = tuple[Any, Shard | None]


def _only(walk: Walk, node: fx.Node) -> tuple[fx.Node, Shard]:
    """The one input that is a shard."""
    found = [(s, state) for s in node.all_input_nodes if (state := walk.states.get(s)) is not None]
    if len(found) != 1:
        raise Unsplittable(walk.origins(node))
    return found[0]


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["shape"])


def _local_shape(walk: Walk, shape: tuple[int, ...], dim: int) -> list[int]:
    return [walk.local(size) if d == dim else size for d, size in enumerate(shape)]


def _elementwise(walk: Walk, node: fx.Node) -> _Result:
    """Operands broadcast to the result: shards must agree; parameters and constants give their part."""
    ndim = len(_shape(node))
    origins = walk.origins(node)
    tensors = [s for s in node.all_input_nodes if "shape" in s.meta]
    places = {st.dim + ndim - len(_shape(s)) for s in tensors if (st := walk.states.get(s)) is not None}
    if len(places) != 1:
        raise Unsplittable(origins)
    (dim,) = places
    replaced: dict[fx.Node, Any] = {}
    for source in tensors:
        own = dim - (ndim - len(_shape(source)))
        if walk.states.get(source) is not None or own < 0 or _shape(source)[own] == 1:
            continue
        parameter = walk.parameter_of(source)
        if parameter is not None and walk.original(parameter[0]).requires_grad:
            walk.shard(parameter[0], parameter[1][own])
        elif not walk.value(source).requires_grad:
            replaced[source] = walk.value(source).narrow(own, 0, walk.local(_shape(source)[own]))
        else:
            raise Unsplittable(origins)
    return walk.call(node, replaced), Shard(dim, origins)


def _view(walk: Walk, node: fx.Node) -> _Result:
    source, state = _only(walk, node)
    dim = place_in_view(_shape(source), _shape(node), state.dim, walk.degree)
    if dim is None:
        raise Unsplittable(state.origins)
    return walk.value(source).reshape(_local_shape(walk, _shape(node), dim)), Shard(dim, state.origins)


def _turn(walk: Walk, node: fx.Node) -> _Result:
    source, state = _only(walk, node)
    order = turned(walk.name(node), node.args[1:], len(_shape(source)))
    return walk.call(node), Shard(order.index(state.dim), state.origins)


def _expand(walk: Walk, node: fx.Node) -> _Result:
    source, state = _only(walk, node)
    dim = state.dim + len(_shape(node)) - len(_shape(source))
    return walk.value(source).expand(_local_shape(walk, _shape(node), dim)), Shard(dim, state.origins)


def _getitem(walk: Walk, node: fx.Node) -> _Result:
    source, state = _only(walk, node)
    if not isinstance(walk.value(source), Tensor):
        return walk.call(node), state
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if sum(isinstance(part, fx.Node) for part in index) > 1 or node.args[0] is not source:
        raise Unsplittable(state.origins)
    ndim = len(_shape(source))
    if Ellipsis in [part for part in index if not isinstance(part, fx.Node)]:
        at = [part is Ellipsis for part in index].index(True)
        missing = ndim - sum(part is not None for part in index) + 1
        index = (*index[:at], *(slice(None),) * missing, *index[at + 1 :])
    before = after = 0
    for part in (*index, *(slice(None),) * ndim):
        if part is None:
            after += 1
        elif before == state.dim:
            if part != slice(None):
                raise Unsplittable(state.origins)
            return walk.call(node), Shard(after, state.origins)
        else:
            before += 1
            after += not isinstance(part, int)
    raise Unsplittable(state.origins)


def _split(walk: Walk, node: fx.Node) -> _Result:
    """Pieces of a shared dimension are shared out themselves: a fused projection of queries, keys and values."""
    source, state = _only(walk, node)
    size = _argument(node, 1, "split_size")
    ndim = len(_shape(source))
    dim = _argument(node, 2, "dim", 0) % ndim
    if dim != state.dim:
        return walk.call(node), state
    full = _shape(source)[dim]
    if walk.name(node) == "chunk":
        size = -(-full // _argument(node, 1, "chunks"))
    sizes = size if isinstance(size, list | tuple) else [size] * (full // size)
    if sum(sizes) != full or any(s % walk.degree for s in sizes):
        raise Unsplittable(state.origins)
    return torch.split(walk.value(source), [s // walk.degree for s in sizes], dim), state


def _cat(walk: Walk, node: fx.Node) -> _Result:
    states = {state.dim if (state := walk.states.get(s)) else None for s in node.all_input_nodes}
    if len(states) != 1:
        raise Unsplittable(walk.origins(node))
    (dim,) = states
    assert dim is not None
    return walk.call(node), Shard(dim, walk.origins(node))


def _along(walk: Walk, node: fx.Node) -> _Result:
    """What works along one dimension leaves a shard of another one alone: softmax, cumsum."""
    source, state = _only(walk, node)
    dim = _argument(node, 1, "dim")
    if dim is None or dim % len(_shape(source)) == state.dim:
        raise Unsplittable(state.origins)
    return walk.call(node), state


def _reduction(walk: Walk, node: fx.Node) -> _Result:
    source, state = _only(walk, node)
    dims = _argument(node, 1, "dim")
    ndim = len(_shape(source))
    gone = (
        set(range(ndim)) if dims is None else {d % ndim for d in (dims if isinstance(dims, list | tuple) else [dims])}
    )
    if state.dim in gone:
        raise Unsplittable(state.origins)
    keep = bool(_argument(node, 2, "keepdim", False))
    dim = state.dim if keep else state.dim - sum(d < state.dim for d in gone)
    return walk.call(node), Shard(dim, state.origins)


def _normalisation(walk: Walk, node: fx.Node) -> _Result:
    """Layer and RMS normalisation: over the last dimensions, which must be whole."""
    source, state = _only(walk, node)
    module = walk.submodule(node) if node.op == "call_module" else None
    sizes: Any = _argument(node, 1, "normalized_shape") if module is None else module.normalized_shape
    if state.dim >= len(_shape(source)) - len(sizes):
        raise Unsplittable(state.origins)
    return walk.call(node), state


def _batch_norm(walk: Walk, node: fx.Node) -> _Result:
    _, state = _only(walk, node)
    if state.dim != 1 or node.op != "call_module":
        raise Unsplittable(state.origins)
    for name, tensor in (*walk.submodule(node).named_parameters(), *walk.submodule(node).named_buffers()):
        if tensor.dim() == 1:
            walk.shard(f"{node.target}.{name}", 0)
    return walk.call(node), state


def _per_channel(walk: Walk, node: fx.Node) -> _Result:
    """Pooling and resampling work on every channel alone."""
    _, state = _only(walk, node)
    if state.dim != 1:
        raise Unsplittable(state.origins)
    return walk.call(node), state


def _attention(walk: Walk, node: fx.Node) -> _Result:
    """By heads: queries, keys and values of the same heads on the same rank."""
    projected = [node.args[i] for i in range(3)]
    places = {state.dim if (state := walk.states.get(s)) else None for s in projected if isinstance(s, fx.Node)}
    origins = walk.origins(node)
    heads = len(_shape(node)) - 3
    if places != {heads}:
        raise Unsplittable(origins)
    mask = _argument(node, 3, "attn_mask")
    replaced: dict[fx.Node, Any] = {}
    if isinstance(mask, fx.Node):
        own = len(_shape(mask)) - 3
        if walk.states.get(mask) is None and own >= 0 and _shape(mask)[own] != 1:
            replaced[mask] = walk.value(mask).narrow(own, 0, walk.local(_shape(mask)[own]))
    walk.marks.add("heads")
    return walk.call(node, replaced), Shard(heads, origins)


def _cross_entropy(walk: Walk, node: fx.Node) -> _Result:
    """Over a vocabulary that is shared out: the ranks agree on maximum, sum of exponentials and target's logit."""
    source, state = _only(walk, node)
    shape = _shape(source)
    classes = min(1, len(shape) - 1)
    if state.dim != classes or node.args[0] is not source or node.kwargs.get("weight") is not None:
        raise Unsplittable(state.origins)
    rows = math.prod(size for d, size in enumerate(shape) if d != classes)
    walk.reduced_bytes += [4 * rows] * 3
    walk.marks.add("vocabulary")
    return walk.call(node), None


_ELEMENTWISE = (
    "add", "sub", "rsub", "mul", "truediv", "neg", "pow", "gelu", "relu", "relu_", "silu", "sigmoid", "tanh", "exp",
    "log", "sqrt", "rsqrt", "sin", "cos", "erf", "abs", "square", "dropout", "dropout_", "to", "float", "type_as",
    "clone", "contiguous", "detach", "masked_fill", "masked_fill_", "where", "clamp", "clamp_", "leaky_relu", "elu",
    "mish", "hardtanh", "hardswish", "hardsigmoid", "relu6", "softplus", "logsigmoid", "maximum", "minimum", "eq", "ne",
    "lt", "le", "gt", "ge", "invert", "and", "or", "ReLU", "ReLU6", "GELU", "SiLU", "Sigmoid", "Tanh", "ELU",
    "LeakyReLU", "Mish", "Hardswish", "Hardsigmoid", "Hardtanh", "Softplus", "Dropout", "Identity",
)  # fmt: skip
_VIEWS = ("view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten", "view_as", "Flatten", "Unflatten")
_CHANNELS = (
    "MaxPool1d", "MaxPool2d", "AvgPool1d", "AvgPool2d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "Upsample",
    "Dropout2d", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "interpolate",
)  # fmt: skip

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_ELEMENTWISE, _elementwise),
        **dict.fromkeys(_VIEWS, _view),
        **dict.fromkeys(("transpose", "permute", "t"), _turn),
        **dict.fromkeys(("softmax", "log_softmax", "cumsum", "Softmax"), _along),
        **dict.fromkeys(("sum", "mean", "amax", "argmax"), _reduction),
        **dict.fromkeys(("layer_norm", "rms_norm", "LayerNorm", "RMSNorm"), _normalisation),
        **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"), _batch_norm),
        **dict.fromkeys(_CHANNELS, _per_channel),
        **dict.fromkeys(("split", "chunk"), _split),
        "expand": _expand,
        "getitem": _getitem,
        "cat": _cat,
        "scaled_dot_product_attention": _attention,
        "cross_entropy": _cross_entropy,
        **PRODUCTS,
    }
)
