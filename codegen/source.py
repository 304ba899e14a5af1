"""One FX node as a Python expression that a person would write: ``F.gelu(x)``, ``x @ y``, ``x[:, :-1]``.

An expression carries its precedence, so that one put into another gets its brackets only where they are
needed. Nothing of a model enters the text but numbers, `repr` of strings, and names that were checked.
"""

import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import OpOverload

from dpart.codegen.names import checked, plain
from dpart.runtime.errors import UserError

ATOM, POWER, UNARY, PRODUCT, SUM, AND, XOR, OR, COMPARE, LOWEST = 20, 15, 14, 13, 12, 10, 9, 8, 7, 0

_INFIX: dict[Any, tuple[str, int]] = {
    operator.add: ("+", SUM), operator.sub: ("-", SUM), operator.mul: ("*", PRODUCT),
    operator.truediv: ("/", PRODUCT), operator.floordiv: ("//", PRODUCT), operator.mod: ("%", PRODUCT),
    operator.matmul: ("@", PRODUCT), operator.pow: ("**", POWER), operator.and_: ("&", AND),
    operator.or_: ("|", OR), operator.xor: ("^", XOR), operator.eq: ("==", COMPARE),
    operator.ne: ("!=", COMPARE), operator.lt: ("<", COMPARE), operator.le: ("<=", COMPARE),
    operator.gt: (">", COMPARE), operator.ge: (">=", COMPARE),
}  # fmt: skip
_PREFIX: dict[Any, str] = {operator.neg: "-", operator.invert: "~", operator.pos: "+"}
AUGMENTED: dict[Any, str] = {
    operator.iadd: "+=", operator.isub: "-=", operator.imul: "*=", operator.itruediv: "/=",
    operator.ifloordiv: "//=", operator.imod: "%=", operator.ipow: "**=", operator.iand: "&=",
    operator.ior: "|=", operator.ixor: "^=", operator.imatmul: "@=",
}  # fmt: skip
_TRAINING_POSITION: dict[Any, int] = {
    F.dropout: 2, F.alpha_dropout: 2, F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2,
    F.feature_alpha_dropout: 2, F.batch_norm: 5, F.rrelu: 3, torch.dropout: 2, torch.alpha_dropout: 2,
    torch.feature_dropout: 2, torch.feature_alpha_dropout: 2, torch.batch_norm: 5, torch.rrelu: 3,
    torch.lstm: 6, torch.gru: 6, torch.rnn_tanh: 6, torch.rnn_relu: 6,
}  # fmt: skip
_FACTORIES = frozenset({
    torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.tensor, torch.rand, torch.randn,
    torch.randint, torch.randperm, torch.linspace, torch.logspace, torch.eye, torch.scalar_tensor,
    torch.tril_indices, torch.triu_indices, torch.hann_window, torch.normal,
})  # fmt: skip


@dataclass(frozen=True)
class Expr:
    """Source text and how tightly its outermost operator binds."""

    text: str
    precedence: int = ATOM

    def within(self, precedence: int) -> str:
        """The text, in brackets where an operator of this precedence would tear it apart."""
        return self.text if self.precedence >= precedence else f"({self.text})"


@dataclass(frozen=True)
class Context:
    """What an expression may refer to.

    Attributes:
        ref: The expression of an operand.
        device: Source of the device on which the forward runs, as in ``hidden.device``; None if unknown.
    """

    ref: Callable[[fx.Node], Expr]
    device: str | None


def expression(node: fx.Node, context: Context) -> Expr:
    """The call that a `call_function` or `call_method` node makes.

    Raises:
        UserError: The function has no name that a stage could use.
    """
    args, kwargs = _with_training(node)
    if node.op == "call_method":
        method = checked(str(node.target), "A tensor method")
        receiver = _value(args[0], context).within(ATOM)
        return Expr(f"{receiver}.{method}({_arguments(args[1:], kwargs, context)})")
    target = node.target
    if not kwargs and len(args) == 2 and target in _INFIX:
        return _infix(target, args, context)
    if not kwargs and len(args) == 1 and target in _PREFIX:
        return Expr(_PREFIX[target] + _value(args[0], context).within(UNARY), UNARY)
    if target is operator.getitem:
        return Expr(f"{_value(args[0], context).within(ATOM)}[{index(args[1], context)}]")
    if target is getattr and len(args) == 2:
        return Expr(f"{_value(args[0], context).within(ATOM)}.{checked(str(args[1]), 'An attribute')}")
    if target in _FACTORIES:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return Expr(f"{function_name(target)}({_arguments(args, kwargs, context)})")


def index(item: Any, context: Context) -> str:
    """What stands between the square brackets: slices, ellipses, numbers, tensors."""
    if isinstance(item, tuple | list) and item and not (isinstance(item, list) and _numbers(item)):
        text = ", ".join(index(part, context) for part in item)
        return text + "," if len(item) == 1 else text
    if isinstance(item, slice):
        start, stop, step = ("" if p is None else _value(p, context).text for p in _parts(item))
        return f"{start}:{stop}" + (f":{step}" if step else "")
    return _value(item, context).text


def literal(value: Any) -> str | None:
    """Source of a plain constant, or None if the value is none."""
    if value is None or value is Ellipsis:
        return "None" if value is None else "..."
    if isinstance(value, str):
        return json.dumps(value) if value.isascii() and value.isprintable() else repr(value)
    if isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    return None


@cache
def function_name(target: Any) -> str:
    """The public name of a function, such that evaluating it gives that very function.

    Raises:
        UserError: There is none.
    """
    if isinstance(target, OpOverload):
        operation = target._schema.name.split("::")
        parts = ["torch.ops", *operation, target._overloadname or "default"]
        return ".".join([parts[0], *(checked(part, "An operation") for part in parts[1:])])
    spaces = {"F": F, "torch": torch, "torch.linalg": torch.linalg, "torch.special": torch.special}
    spaces["torch.fft"] = torch.fft
    wish = getattr(target, "__name__", "")
    for prefix, space in spaces.items():
        if getattr(space, wish, None) is target:
            return f"{prefix}.{checked(wish, 'A function')}"
    for prefix, space in spaces.items():
        for name in dir(space):
            if not name.startswith("_") and getattr(space, name, None) is target:
                return f"{prefix}.{checked(name, 'A function')}"
    raise UserError(
        f"The model calls {plain(str(target))}, which is no public function of torch and cannot be written "
        "into a stage; put it into an operation of your own with torch.library.custom_op."
    )


def wrapped(line: str, limit: int = 100) -> list[str]:
    """The line, broken at the outermost commas of its last large bracket if it is too long."""
    if len(line) <= limit:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    opened = _outermost(line)
    if opened is None:
        return [line]
    start, end, commas = opened
    tail = line[end:]
    only = _outermost(line[start + 1 : end]) if not commas else None
    if only is not None and only[:2] == (0, end - start - 2):
        # The only argument is a list itself: its bracket opens on the same line.
        start, end, commas = start + 1, end - 1, [start + 1 + c for c in only[2]]
        tail = line[end:]
    inner = [line[a:b].strip() for a, b in zip([start + 1, *(c + 1 for c in commas)], [*commas, end], strict=True)]
    lines = [line[: start + 1]]
    if len(indent) + 4 + len(", ".join(inner)) <= limit:
        lines.append(f"{indent}    {', '.join(inner)}")
    else:
        for part in inner:
            if part:
                lines += wrapped(f"{indent}    {part},", limit)
    return [*lines, indent + tail]


def _outermost(line: str) -> tuple[int, int, list[int]] | None:
    """Start, end and commas of the longest bracket that stands at the outermost level."""
    best: tuple[int, int, list[int]] | None = None
    stack: list[int] = []
    commas: list[int] = []
    quote = ""
    for i, c in enumerate(line):
        if quote:
            quote = "" if c == quote and line[i - 1] != "\\" else quote
        elif c in "'\"":
            quote = c
        elif c in "([{":
            stack.append(i)
            commas = [] if len(stack) == 1 else commas
        elif c in ")]}":
            start = stack.pop()
            if not stack and (best is None or i - start > best[1] - best[0]):
                best = (start, i, commas)
        elif c == "," and len(stack) == 1:
            commas.append(i)
    return best if best is not None and best[1] - best[0] > 1 else None


def _infix(target: Any, args: tuple[Any, ...], context: Context) -> Expr:
    sign, precedence = _INFIX[target]
    left, right = (_value(a, context) for a in args)
    # One step tighter on the side where Python would associate otherwise; comparisons chain on both.
    tight_left = precedence + (precedence in (POWER, COMPARE))
    tight_right = precedence + (precedence != POWER)
    return Expr(f"{left.within(tight_left)} {sign} {right.within(tight_right)}", precedence)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> str:
    texts = [_value(a, context).text for a in args]
    for name, value in kwargs.items():
        if isinstance(value, torch.device) and context.device is None:
            continue
        texts.append(f"{checked(name, 'An argument')}={_value(value, context).text}")
    return ", ".join(texts)


def _value(value: Any, context: Context) -> Expr:
    if isinstance(value, fx.Node):
        return context.ref(value)
    if isinstance(value, Expr):
        return value
    if isinstance(value, torch.device):
        return Expr(context.device or "None")
    if isinstance(value, slice):
        return Expr("slice(" + ", ".join(_value(p, context).text for p in _parts(value)) + ")")
    if isinstance(value, tuple | list):
        parts = [_value(v, context).text for v in value]
        if isinstance(value, tuple):
            return Expr("(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")")
        return Expr("[" + ", ".join(parts) + "]")
    text = literal(value)
    if text is None:
        raise UserError(f"The model's graph holds {plain(repr(value))}, which cannot be written as source.")
    return Expr(text, UNARY if text.startswith("-") else ATOM)


def _with_training(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with what depends on the module's mode made to follow ``self.training``."""
    args: list[Any] = list(node.args)
    kwargs: dict[str, Any] = dict(node.kwargs)
    if node.op == "call_method":
        return tuple(args), kwargs
    flag = Expr("self.training")
    for name in ("training", "train"):
        if kwargs.get(name) is True:
            kwargs[name] = flag
    for position in _training_positions(node.target):
        # A batch norm without running statistics uses those of the batch in both modes.
        stateless = node.target in (F.batch_norm, torch.batch_norm) and None in args[1:5]
        if len(args) > position and args[position] is True and not stateless:
            args[position] = flag
    if node.target in (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default):
        if kwargs.get("dropout_p"):
            kwargs["dropout_p"] = Expr(f"{literal(kwargs['dropout_p'])} if self.training else 0.0", LOWEST)
        if len(args) > 4 and args[4]:
            args[4] = Expr(f"{literal(args[4])} if self.training else 0.0", LOWEST)
    return tuple(args), kwargs


def _training_positions(target: Any) -> list[int]:
    if isinstance(target, OpOverload):
        return [i for i, a in enumerate(target._schema.arguments) if a.name in ("training", "train")]
    position = _TRAINING_POSITION.get(target)
    return [] if position is None else [position]


def _float(value: float) -> str:
    if math.isnan(value) or math.isinf(value):
        return f'float("{value}")'
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        limits = torch.finfo(dtype)
        if value in (limits.min, limits.max):
            return f"torch.finfo({dtype}).{'min' if value == limits.min else 'max'}"
    return repr(value)


def _numbers(items: list[Any]) -> bool:
    return all(isinstance(i, int) for i in items)


def _parts(item: slice) -> tuple[Any, Any, Any]:
    return item.start, item.stop, item.step
