"""From a raised graph to layers and the values between them.

In execution order, consecutive nodes of one module path are one layer. The path is cut where a user thinks of a
layer: below a repeated block (an element of a ModuleList or Sequential) at the block's children, elsewhere at
the innermost module::

    wte, wpe | h.0.ln_1 | h.0.attn (c_attn, split, attention, c_proj) | h.0.add | h.0.ln_2 | h.0.mlp | h.0.add_1

Runs of a topological order contract to a DAG, so every such grouping is sound. Runs that only reshape join
the run before them; runs tied by in-place changes of shared storage are joined.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from dpart.compiler.raising import Frame
from dpart.runtime.randomness import is_random_call

_RESHAPES = {
    "view", "reshape", "transpose", "permute", "contiguous", "expand", "unsqueeze", "squeeze", "flatten", "size",
    "getitem", "detach", "t", "view_as", "expand_as", "select", "unflatten",
}  # fmt: skip
_IN_PLACE_OPERATORS = {"iadd", "isub", "imul", "itruediv", "ior", "iand"}
_VIEWS = _RESHAPES - {"size", "contiguous"} | {"split", "chunk", "unbind"}


def target_name(node: fx.Node) -> str:
    """The bare name of what a node calls: ``add`` for ``operator.add``, ``gelu`` for ``F.gelu``."""
    if node.op == "call_function":
        name = str(getattr(node.target, "__name__", node.target)).split(".")[0].strip("_")
        return name[1:] if name in _IN_PLACE_OPERATORS else name
    return str(node.target)


def changes_in_place(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether the node writes to its first argument."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    raw = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    if node.op == "call_function" and raw in _IN_PLACE_OPERATORS:
        return True
    is_operator = getattr(node.target, "__module__", "") == "_operator"  # `operator.and_` changes nothing.
    return raw.endswith("_") and not raw.endswith("__") and not is_operator


def mark_layers(module: fx.GraphModule, model: nn.Module) -> dict[str, list[fx.Node]]:
    """Sets ``meta["layer"]`` of every node and returns the layers by name, in execution order."""
    nodes = [n for n in module.graph.nodes if n.op.startswith("call_")]
    _mark_prelude(module, model)
    calls = [n for n in nodes if not n.meta["prelude"]]
    blocks = _blocks(model)
    runs: list[list[fx.Node]] = []
    keys: list[Any] = []
    for node in calls:
        key = _path(node.meta["stack"], blocks)
        if runs and keys[-1] == key:
            runs[-1].append(node)
        else:
            runs.append([node])
            keys.append(key)
    runs = _join(runs, _reshaping(runs) | _aliased(runs, module))
    layers: dict[str, list[fx.Node]] = {}
    counts: Counter[str] = Counter()
    for run in runs:
        base = _name(run, blocks, last=run is runs[-1])
        name = base if not counts[base] else f"{base}_{counts[base]}"
        counts[base] += 1
        layers[name] = run
    for node in module.graph.nodes:
        node.meta["layer"] = None
    for name, run in layers.items():
        for node in run:
            node.meta["layer"] = name
    return layers


def _mark_prelude(module: fx.GraphModule, model: nn.Module) -> None:
    """Marks what depends on no input but its number of rows; every stage recomputes it."""
    written: set[str] = set()
    for node in module.graph.nodes:
        first = node.args[0] if node.args else None
        attribute = first.target if isinstance(first, fx.Node) and first.op == "get_attr" else None
        if node.op.startswith("call_") and attribute is not None and changes_in_place(node, module):
            written.add(str(attribute))
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = _fetch(module, str(node.target))
            node.meta["prelude"] = not isinstance(tensor, nn.Parameter) and str(node.target) not in written
        elif node.name == "batch_size":
            node.meta["prelude"] = True
        else:
            node.meta["prelude"] = (
                node.op in ("call_function", "call_method")
                and all(a.meta["prelude"] for a in node.all_input_nodes)
                and not is_random_call(_callable(node), node.args, node.kwargs)
            )


def _callable(node: fx.Node) -> Any:
    return getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target


def _fetch(module: fx.GraphModule, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _blocks(model: nn.Module) -> set[str]:
    """Paths of the innermost elements of ModuleLists and Sequentials that are not leaves themselves."""
    elements = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for name, child in module.named_children()
        if any(True for _ in child.children())
    }
    outer = {path[:i] for path in elements for i, c in enumerate(path) if c == "."}
    return elements - outer


def _path(stack: tuple[Frame, ...], blocks: set[str]) -> Frame:
    """The module call whose nodes form a layer with this one."""
    for depth in range(len(stack) - 1, -1, -1):
        if stack[depth][0] in blocks:
            return stack[min(depth + 1, len(stack) - 1)]
    return stack[-1] if stack else ("", "", 0)


def _reshaping(runs: list[list[fx.Node]]) -> set[int]:
    """Indices of runs that only reshape: each joins the run before it, the first one that after it."""
    found = {i for i, run in enumerate(runs) if all(target_name(n) in _RESHAPES for n in run)}
    first = 0
    while first in found:
        first += 1
    return {i if i > first else i + 1 for i in found if i + 1 < len(runs) or i > first}


def _aliased(runs: list[list[fx.Node]], module: fx.GraphModule) -> set[int]:
    """Indices of runs to join with the one before them, because one changes storage that another views."""
    place = {node: i for i, run in enumerate(runs) for node in run}
    storage: dict[fx.Node, fx.Node] = {}
    families: dict[fx.Node, set[fx.Node]] = {}
    for run in runs:
        for node in run:
            first = node.args[0] if node.args else None
            shared = target_name(node) in _VIEWS or changes_in_place(node, module)
            root = storage.get(first, first) if shared and isinstance(first, fx.Node) else node
            storage[node] = root
            families.setdefault(root, set()).add(node)
    joined: set[int] = set()
    for root, family in families.items():
        changed = [n for n in family if changes_in_place(n, module)]
        views = [n for n in family if target_name(n) in _VIEWS]
        # What is read before it changes must not be read after: such readers stay with the change.
        read_before = any(len(n.args[0].users) > 1 for n in changed if isinstance(n.args[0], fx.Node))
        if not changed or not (views or read_before or root.op == "get_attr"):
            continue
        touched = [place[n] for f in (family | {root}) for n in (f, *f.users) if n in place]
        joined.update(range(min(touched) + 1, max(touched) + 1))
    return joined


def _join(runs: list[list[fx.Node]], joined: Iterable[int]) -> list[list[fx.Node]]:
    merged: list[list[fx.Node]] = []
    for i, run in enumerate(runs):
        if i in joined and merged:
            merged[-1] = merged[-1] + run
        else:
            merged.append(list(run))
    return merged


def _name(run: list[fx.Node], blocks: set[str], *, last: bool) -> str:
    essential = [n for n in run if target_name(n) not in _RESHAPES] or run
    stack = essential[0].meta["stack"]
    path, _, _ = _path(stack, blocks)
    if not path and last:
        return "loss"
    glue = essential[0].op != "call_module" and stack and path == stack[-1][0] and path in blocks
    if glue or not path:
        return f"{path}.{target_name(essential[0])}".lstrip(".")
    return path
