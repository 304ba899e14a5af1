"""What is to be known of the items of a forward before they are written: results, paths, chains of blocks."""

from collections.abc import Mapping, Sequence

from torch import fx

from dpart.codegen.scopes import Scope, operands
from dpart.codegen.source import AUGMENTED

_RESHAPES = frozenset({"view", "reshape", "transpose", "permute", "contiguous", "expand", "unsqueeze", "squeeze"})

Item = fx.Node | Scope
"""A node, or the call of another scope."""


def results_of(item: Item) -> list[fx.Node]:
    """The nodes whose values an item makes."""
    return item.outputs if isinstance(item, Scope) else [item]


def path_of(item: Item) -> str:
    """The path of the module that an item calls; empty if it calls none."""
    if isinstance(item, Scope):
        return item.path
    return str(item.target) if item.op == "call_module" else ""


def is_light(item: Item) -> bool:
    """Whether the item is an operator or only reshapes: a chain of them is easily read."""
    if isinstance(item, Scope) or item.op == "call_module":
        return False
    return item.target in _RESHAPES or getattr(item.target, "__module__", "") == "_operator"


def augments(item: Item) -> bool:
    """Whether the item is a statement such as ``x += y``."""
    if isinstance(item, Scope) or item.op != "call_function":
        return False
    return item.target in AUGMENTED and isinstance(item.args[0], fx.Node)


def tuple_length(node: fx.Node) -> int | None:
    """How many tensors a split makes, where its arguments tell."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or "shape" not in source.meta:
        return None
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    length: int | None = source.meta["shape"][dim] if isinstance(dim, int) else None
    sizes = node.args[1] if len(node.args) > 1 else None
    if node.target == "split" and isinstance(sizes, list | tuple):
        return len(sizes)
    if node.target == "split" and isinstance(sizes, int) and length:
        return -(-length // sizes)
    if node.target == "chunk" and isinstance(sizes, int) and length:
        each = -(-length // sizes)
        return int(-(-length // each))
    return None


def chain_at(items: Sequence[Item], place: int, below: str, counts: Mapping[fx.Node, int]) -> tuple[list[Item], int]:
    """The longest chain of calls from a place that are numbered children of one container, in order.

    Each takes what the one before it makes, and nobody else does; their other arguments are the same.

    Args:
        below: The path of the forward's own module; the container must lie below it.
        counts: How often each value is read.

    Returns:
        The calls, and which of their arguments is the one that goes along the chain.
    """
    first = items[place]
    parent, _, name = path_of(first).rpartition(".")
    if not name.isdigit() or parent in ("", below) or not parent.startswith(below) or len(results_of(first)) != 1:
        return [], 0
    best: tuple[list[Item], int] = [], 0
    for carrier in range(len(operands(first))):
        run = [first]
        for item in items[place + 1 :]:
            path = f"{parent}.{int(name) + len(run)}"
            if path_of(item) != path or len(results_of(item)) != 1 or not _follows(run[-1], item, carrier, counts):
                break
            run.append(item)
        best = max(best, (run, carrier), key=lambda r: len(r[0]))
    return best


def _follows(before: Item, after: Item, carrier: int, counts: Mapping[fx.Node, int]) -> bool:
    made = results_of(before)[0]
    wanted = operands(before)
    wanted[carrier] = made
    return operands(after) == wanted and counts[made] == 1
