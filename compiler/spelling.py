"""From ATen overloads, which export writes, to the public spellings that people write.

``aten.gelu.default(x, approximate='tanh')`` becomes ``F.gelu(x, approximate='tanh')``, ``aten.add.Tensor(x, y)``
becomes ``x + y``, ``aten.view.default(x, [2, 3])`` becomes ``x.view(2, 3)``. What has no public spelling stays.
The capture is compared with eager afterwards, so a spelling that meant something else would be found.
"""

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch._ops import OpOverload

Kind = Literal["call_function", "call_method"]


@dataclass(frozen=True)
class Spelling:
    """How a call is written: an FX node's op, target, arguments."""

    kind: Kind
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "matmul": operator.matmul, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "pow": operator.pow, "__and__": operator.and_,
    "__or__": operator.or_, "bitwise_and": operator.and_, "bitwise_or": operator.or_, "add_": operator.iadd,
    "sub_": operator.isub, "mul_": operator.imul, "div_": operator.itruediv,
}  # fmt: skip
_UNARY: dict[str, Callable[..., Any]] = {"neg": operator.neg, "bitwise_not": operator.invert}
_METHODS = {
    "view", "reshape", "transpose", "permute", "contiguous", "expand", "expand_as", "unsqueeze", "squeeze",
    "flatten", "split", "chunk", "clone", "detach", "masked_fill", "sum", "mean", "cumsum", "new_ones",
    "new_zeros", "new_full", "repeat", "select", "view_as", "type_as", "unbind", "masked_fill_", "copy_",
    "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "relu_", "clamp_", "unflatten", "t", "size",
    "argmax", "amax", "softmax", "log_softmax", "clamp", "float",
}  # fmt: skip
_SIZES_UNPACKED = {"view", "reshape", "permute", "expand", "repeat"}
_FUNCTIONAL = {
    "linear", "gelu", "relu", "relu6", "silu", "mish", "elu", "leaky_relu", "hardtanh", "hardswish",
    "hardsigmoid", "softplus", "dropout", "layer_norm", "group_norm", "batch_norm", "instance_norm",
    "embedding", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "max_pool1d",
    "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "scaled_dot_product_attention", "pad", "one_hot", "pixel_shuffle", "rms_norm", "logsigmoid", "glu", "prelu",
}  # fmt: skip
_LOSSES = {"cross_entropy_loss": F.cross_entropy, "nll_loss_nd": F.nll_loss, "mse_loss": F.mse_loss,
           "l1_loss": F.l1_loss, "smooth_l1_loss": F.smooth_l1_loss,
           "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits}  # fmt: skip
_REDUCTIONS = ("none", "mean", "sum")
_RENAMED = {"self": "input"}


def spell(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelling:
    """The public spelling of a call, or the call as it is."""
    asis = Spelling("call_function", target, args, kwargs)
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return asis
    name = target._schema.name.removeprefix("aten::")
    kwargs = {k: v for k, v in kwargs.items() if not (k == "pin_memory" and v is False)}
    if name in _BINARY and len(args) == 2 and not kwargs and target._overloadname not in ("Tensor_mode",):
        return Spelling("call_function", _BINARY[name], args, {})
    if name in _UNARY and len(args) == 1:
        return Spelling("call_function", _UNARY[name], args, {})
    if name == "to":
        return _to(target, args, kwargs) or asis
    if name == "slice":
        return _slice(args)
    if name == "index" and not kwargs:
        indices = tuple(slice(None) if i is None else i for i in args[1])
        return Spelling("call_function", operator.getitem, (args[0], indices), {})
    if name in _LOSSES:
        return _loss(target, name, args, kwargs)
    if name.startswith("upsample_") and target._overloadname == "vec":
        return _interpolate(name, args, kwargs) or asis
    if name in _FUNCTIONAL and hasattr(F, name):
        return _functional(target, name, args, kwargs)
    if name in _METHODS:
        if name in _SIZES_UNPACKED and len(args) == 2 and isinstance(args[1], list | tuple):
            args = (args[0], *args[1])
        return Spelling("call_method", name, args, kwargs)
    if inspect.isbuiltin(getattr(torch, name, None)) and not name.startswith("_"):
        return Spelling("call_function", getattr(torch, name), args, kwargs)
    return asis


def _named(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All given arguments by the schema's names, without those that equal the schema's defaults."""
    given = dict(zip((a.name for a in target._schema.arguments), args, strict=False)) | kwargs
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    return {k: v for k, v in given.items() if not (k in defaults and type(v) is type(defaults[k]) and v == defaults[k])}


def _functional(target: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelling:
    given = _named(target, args, kwargs)
    names = [a.name for a in target._schema.arguments]
    if name == "dropout":
        return Spelling("call_function", F.dropout, (given["input"],), {"p": given["p"], "training": given["train"]})
    if name == "embedding":
        if set(given) - {"weight", "indices"}:
            return Spelling("call_function", target, args, kwargs)
        return Spelling("call_function", F.embedding, (given["indices"], given["weight"]), {})
    if name == "scaled_dot_product_attention":
        positional = tuple(given.pop(n) for n in ("query", "key", "value"))
        return Spelling("call_function", F.scaled_dot_product_attention, positional, given)
    if name == "layer_norm":
        given.pop("cudnn_enable", None)
    if name in ("batch_norm", "instance_norm", "group_norm", "pad", "prelu"):
        if name == "batch_norm":
            order = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
            full = dict(zip(names, args, strict=False)) | kwargs
            return Spelling("call_function", F.batch_norm, tuple(full[n] for n in order), {})
        return Spelling("call_function", getattr(torch, name, getattr(F, name)), args, kwargs)
    positional_names = [n for n in names[: len(args)] if n in given]
    first = [n for i, n in enumerate(positional_names) if names[i] == n]
    positional = tuple(given.pop(n) for n in first)
    return Spelling("call_function", getattr(F, name), positional, {_RENAMED.get(k, k): v for k, v in given.items()})


def _loss(target: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelling:
    given = _named(target, args, kwargs)
    positional = (given.pop("self"), given.pop("target"))
    if "reduction" in given:
        given["reduction"] = _REDUCTIONS[given["reduction"]]
    return Spelling("call_function", _LOSSES[name], positional, given)


def _to(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelling | None:
    given = _named(target, args, kwargs)
    if target._overloadname == "other":
        return Spelling("call_method", "to", (given["self"], given["other"]), {})
    if given.get("copy") or given.get("memory_format") is not None or "dtype" not in given:
        return None
    # Devices are the machine's matter, not the graph's: the cast is what the model means.
    return Spelling("call_method", "to", (given["self"], given["dtype"]), {})


def _slice(args: tuple[Any, ...]) -> Spelling:
    tensor, dim, start, stop, step = (*args, *(None,) * 5)[:5]
    dim = dim or 0
    stop = None if isinstance(stop, int) and stop >= 2**62 else stop
    cut = slice(start or None, stop, None if step in (None, 1) else step)
    index = (
        cut if dim == 0 else (*(slice(None),) * dim, cut) if dim > 0 else (..., *(cut,), *(slice(None),) * (-dim - 1))
    )
    return Spelling("call_function", operator.getitem, (tensor, index), {})


def _interpolate(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelling | None:
    tensor, size, *rest = args
    mode = {"upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest", "upsample_nearest3d": "nearest",
            "upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear"}.get(name)  # fmt: skip
    if mode is None or kwargs:
        return None
    options: dict[str, Any] = {"mode": mode}
    if mode != "nearest":
        options["align_corners"] = rest.pop(0)
    factors = rest[0] if rest else None
    options |= {"size": size} if size is not None else {"scale_factor": factors}
    return Spelling("call_function", F.interpolate, (tensor,), options)
