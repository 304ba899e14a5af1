"""The source text that builds a stock torch.nn module again, from its attributes and never from its repr.

A constructor is accepted only if the module it builds is the same: same type, same attributes, same state
names, shapes and dtypes. Anything else gives None, and the caller keeps the module's operations instead.
"""

import inspect
from typing import Any

import torch
from torch import nn

_SKIPPED = {"self", "device", "dtype"}


def is_stock(module: nn.Module) -> bool:
    """Whether the module is one of torch.nn's own leaves, without hooks or parametrizations."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not any(True for _ in module.children())
        and not isinstance(module, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
    )


def constructor(module: nn.Module) -> str | None:
    """Source such as ``nn.Conv2d(3, 64, 7, stride=2, bias=False)``, or None if it cannot be told."""
    name = type(module).__name__
    if not is_stock(module) or getattr(nn, name, None) is not type(module):
        return None
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    dtypes = {t.dtype for t in tensors if t.dtype.is_floating_point}
    if len(dtypes) > 1:
        return None
    for shorten in (True, False):  # `kernel_size=3` where the module makes (3, 3) of it, else as it is.
        arguments = _arguments(module, shorten=shorten)
        if arguments is None:
            continue
        if dtypes and (dtype := next(iter(dtypes))) is not torch.float32:
            arguments.append(f"dtype={dtype}")
        source = f"nn.{name}({', '.join(arguments)})"
        if _rebuilds(source, module):
            return source
    return None


def _arguments(module: nn.Module, *, shorten: bool) -> list[str] | None:
    arguments: list[str] = []
    keywords_only = False
    for parameter in inspect.signature(type(module).__init__).parameters.values():
        if parameter.name in _SKIPPED:
            continue
        required = parameter.default is parameter.empty
        positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if not positional or not hasattr(module, parameter.name):
            if required and positional:
                return None
            keywords_only = True
            continue
        value = _argument(module, parameter.name)
        if not required and _same(value, parameter.default):
            keywords_only = True
            continue
        text = _literal(value, shorten=shorten)
        if text is None:
            return None
        arguments.append(text if required and not keywords_only else f"{parameter.name}={text}")
    return arguments


def _argument(module: nn.Module, name: str) -> Any:
    value = getattr(module, name)
    if isinstance(value, torch.Tensor) or (value is None and name == "bias"):
        return value is not None
    return value


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, tuple) and value and not isinstance(default, tuple):
        return all(type(v) is type(default) and v == default for v in value)
    return type(value) is type(default) and bool(value == default)


def _literal(value: Any, *, shorten: bool) -> str | None:
    if isinstance(value, tuple | list):
        if shorten and len(set(value)) == 1:
            return _literal(value[0], shorten=shorten)
        parts = [_literal(v, shorten=shorten) for v in value]
        if any(part is None for part in parts):
            return None
        return "(" + ", ".join(map(str, parts)) + ("," if len(parts) == 1 else "") + ")"
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return repr(value)
    return None


def _rebuilds(source: str, module: nn.Module) -> bool:
    try:
        with torch.device("meta"):
            # The text is made above of literals and a name of torch.nn; nothing of a file enters it.
            again = eval(source, {"nn": nn, "torch": torch})
    except (TypeError, ValueError, RuntimeError):
        return False
    return type(again) is type(module) and _description(again) == _description(module)


def _description(module: nn.Module) -> dict[str, Any]:
    plain = {
        k: v
        for k, v in vars(module).items()
        if not k.startswith("_") and k != "training" and not callable(v) and not isinstance(v, torch.Tensor)
    }
    plain |= {
        k: (tuple(t.shape), t.dtype)
        for k, t in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    }
    plain["persistent"] = sorted(module.state_dict())
    return plain
