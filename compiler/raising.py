"""From an exported program to a graph of the calls a person would have written.

torch.export writes ATen operations over lifted parameters. Raising puts each parameter back under its original
name, turns the operations of a stock torch.nn module into one call of that module again, spells the rest
publicly, and removes what only export needed: assertions, size arithmetic, devices.

An operation that changes a tensor in place stays; whoever reads the tensor later reads the operation's result,
so the order is visible as data flow. Regions under ``torch.no_grad`` are inlined behind ``detach``.
"""

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from dpart.compiler.constructors import constructor, is_stock
from dpart.compiler.spelling import spell
from dpart.compiler.workload import LossModel
from dpart.runtime.errors import UserError

Frame = tuple[str, str, int]
"""One module call a node stands in: (original path, class name, number of the call)."""

_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "_assert_async")
_PREFIX = "model."


def module_stack(node: fx.Node) -> tuple[Frame, ...]:
    """The module calls a node of an exported graph stands in, outermost first, without the root."""
    frames = []
    for key, (path, kind) in node.meta.get("nn_module_stack", {}).items():
        if not path.startswith(_PREFIX):
            continue
        call = int(key.rpartition("@")[2]) if "@" in key else 0
        name = kind if isinstance(kind, str) else kind.__qualname__
        frames.append((path.split("@")[0].removeprefix(_PREFIX), name.rpartition(".")[2], call))
    return tuple(frames)


def is_mutating(node: fx.Node) -> bool:
    """Whether the node's ATen operation writes to one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def raise_program(program: ExportedProgram, model: LossModel) -> fx.GraphModule:
    """The raised graph over the model's own modules and tensors; nodes carry ``meta["stack"]``."""
    return _Raising(program, model).run()


@dataclass
class _Raising:
    program: ExportedProgram
    model: LossModel
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def run(self) -> fx.GraphModule:
        nodes = list(self.program.graph.nodes)
        self._placeholders([n for n in nodes if n.op == "placeholder"])
        calls = [n for n in nodes if n.op in ("call_function", "get_attr")]
        needed = _needed(calls, next(n for n in nodes if n.op == "output"))
        calls = [n for n in calls if n in needed]
        modules = self._stock_calls(calls)
        for node in calls:
            if node in modules:
                self._raise_module(node, *modules[node])
            elif node.op == "call_function" and node not in self.env and not _is_size(node):
                self._call(node)
        results = pytree_leaves(next(n for n in nodes if n.op == "output").args)
        self.graph.output(self.env[results[-1]])
        self.graph.lint()
        return fx.GraphModule(self.attributes, self.graph, class_name=self.model.title)

    def _placeholders(self, nodes: list[fx.Node]) -> None:
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        names = iter(self.model.input_names)
        for node in nodes:
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                self.env[node] = self.graph.placeholder(next(names))
        first = next(iter(self.graph.nodes))
        for node in nodes:
            if specs[node.name].kind is InputKind.USER_INPUT:
                continue
            name = str(specs[node.name].target)
            if specs[node.name].kind is InputKind.CONSTANT_TENSOR:
                tensor = self.program.constants[name]
                name = name.removeprefix(_PREFIX).replace(".", "_")
            else:
                name = name.removeprefix(_PREFIX)
                tensor = _attribute(self.model.model, name)
            self.env[node] = _Lazy(name, tensor)
        self.batch_size = self.graph.call_method("size", (first, 0))
        self.batch_size.name = "batch_size"
        self.batch_size.meta["stack"] = ()

    def _stock_calls(self, calls: list[fx.Node]) -> dict[fx.Node, tuple[str, fx.Node | None, fx.Node]]:
        """For each node of a stock module's call: (path, its one input or None if not the first, its result)."""
        groups: dict[Frame, list[fx.Node]] = defaultdict(list)
        for node in calls:
            stack = module_stack(node)
            if stack and isinstance(node.target, OpOverload):
                groups[stack[-1]].append(node)
        found: dict[fx.Node, tuple[str, fx.Node | None, fx.Node]] = {}
        for (path, _, _), nodes in groups.items():
            module = self.model.model.get_submodule(path)
            if not is_stock(module) or constructor(module) is None:
                continue
            inside = set(nodes)
            inputs = {a for n in nodes for a in n.all_input_nodes} - inside
            inputs = {a for a in inputs if not isinstance(self.env.get(a), _Lazy) and not _is_size(a)}
            results = [n for n in nodes if any(u not in inside for u in n.users)]
            # A buffer counter that a second call of the module counts on is not a result.
            results = [n for n in results if not (is_mutating(n) and self._is_tensor_of(n.args[0], calls))]
            if len(inputs) == 1 and len(results) == 1:
                for node in nodes:
                    found[node] = (path, inputs.copy().pop() if node is results[0] else None, results[0])
        return found

    def _is_tensor_of(self, argument: Any, calls: list[fx.Node]) -> bool:
        while isinstance(argument, fx.Node) and is_mutating(argument):
            argument = argument.args[0]
        return isinstance(self.env.get(argument), _Lazy)

    def _raise_module(self, node: fx.Node, path: str, source: fx.Node | None, result: fx.Node) -> None:
        if source is None or node is not result:
            return
        self.attributes[_checked(path)] = self.model.model.get_submodule(path)
        self._place(node, lambda: self.graph.call_module(path, (self._new(source),)))
        if getattr(self.attributes[path], "inplace", False):
            self.env[source] = self.env[node]

    def _call(self, node: fx.Node) -> None:
        if "wrap_with_set_grad_enabled" in str(node.target):
            self._inline_without_gradient(node)
            return
        if not isinstance(node.target, OpOverload) and getattr(node.target, "__module__", "") != "_operator":
            raise UserError(f"{self.model.title} uses {node.target}, which dpart cannot capture yet.\n{_where(node)}")
        name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
        if name == "aten::detach_" or _changes_nothing(node, name):
            self.env[node] = self._new(node.args[0])
            return
        if name == "aten::broadcast_tensors" and _broadcasts_nothing(node):
            for user in node.users:
                self.env[user] = self._new(_arguments(node)[0][user.args[1]])
            return
        if name == "aten::lift_fresh_copy":
            self._place(node, lambda: self.graph.call_method("clone", (self._new(node.args[0]),)))
            return
        args = fx.node.map_arg(node.args, self._new)
        kwargs: dict[str, Any] = dict(fx.node.map_arg(node.kwargs, self._new))
        if kwargs.get("device") == torch.device("cpu"):
            del kwargs["device"]
        if name in ("aten::view", "aten::reshape"):
            args = (args[0], self._inferred(args[1]))
        how = spell(node.target, args, kwargs)
        self._place(node, lambda: self.graph.create_node(how.kind, how.target, how.args, how.kwargs))
        if is_mutating(node) and isinstance(node.args[0], fx.Node):
            if isinstance(self.env[node.args[0]], _Lazy):
                return
            self.env[node.args[0]] = self.env[node]

    def _place(self, node: fx.Node, make: Callable[[], fx.Node]) -> None:
        new = make()
        new.meta["stack"] = module_stack(node)
        new.meta["trace"] = node.meta.get("stack_trace", "")
        self.env[node] = new

    def _new(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and node not in self.env:
            self.env[node] = self._size(value.node.expr, node)
        if isinstance(self.env[node], _Lazy):
            lazy = self.env[node]
            self.attributes[_checked(lazy.name)] = lazy.tensor
            return self.graph.get_attr(lazy.name)
        return self.env[node]

    def _size(self, expression: sympy.Expr, node: fx.Node) -> Any:
        """A size as arithmetic on the number of rows."""
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            return self.batch_size
        if expression.func in (sympy.Add, sympy.Mul):
            function = operator.add if expression.func is sympy.Add else operator.mul
            total, *rest = [self._size(part, node) for part in expression.args]
            for part in rest:
                total = self.graph.call_function(function, (total, part))
                total.meta["stack"] = ()
            return total
        raise UserError(
            f"{self.model.title} computes a size, {expression}, that is not a multiple of the batch's rows; "
            f"dpart cannot capture that yet.\n{_where(node)}"
        )

    def _inferred(self, sizes: Any) -> Any:
        """Sizes of a view with -1 for the one that depends on the number of rows, where only one does."""
        if -1 in [s for s in sizes if isinstance(s, int)]:
            return sizes
        symbolic = [i for i, s in enumerate(sizes) if isinstance(s, fx.Node)]
        return [-1 if i in symbolic else s for i, s in enumerate(sizes)] if len(symbolic) == 1 else sizes

    def _inline_without_gradient(self, node: fx.Node) -> None:
        enabled, inner, *arguments = _arguments(node)
        module = getattr(self.program.graph_module, str(inner.target))
        inputs = iter(arguments)
        for child in module.graph.nodes:
            if child.op == "placeholder":
                source = next(inputs)
                value = self._new(source)
                if not enabled and isinstance(source.meta.get("val"), torch.Tensor):
                    value = self.graph.call_method("detach", (value,))
                    value.meta["stack"] = module_stack(node)
                self.env[child] = value
            elif child.op == "call_function" and not _is_size(child):
                if not any(a in str(child.target) for a in _ASSERTIONS):
                    self._call(child)
            elif child.op == "output":
                results = child.args[0]
                for user in node.users:
                    self.env[user] = self._new(results[user.args[1]])


@dataclass(frozen=True)
class _Lazy:
    """A parameter or buffer that gets its `get_attr` node where it is first read."""

    name: str
    tensor: torch.Tensor


def _changes_nothing(node: fx.Node, name: str) -> bool:
    """Whether a cast, view or slice gives back what it got: export writes many."""
    if name not in ("aten::to", "aten::view", "aten::reshape", "aten::slice", "aten::contiguous"):
        return False
    before, after = _arguments(node)[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    same = before.dtype == after.dtype and _text(before.shape) == _text(after.shape)
    return same and _text(before.stride()) == _text(after.stride()) and not node.kwargs.get("copy")


def _broadcasts_nothing(node: fx.Node) -> bool:
    before = [_text(a.meta["val"].shape) for a in node.all_input_nodes]
    return before == [_text(v.shape) for v in node.meta["val"]]


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _checked(path: str) -> str:
    """The path, if it may stand in source text, which FX makes of every graph."""
    if not all(part.isidentifier() or (part.isascii() and part.isdigit()) for part in path.split(".")):
        raise UserError(f"{path!r} in the model is no name that Python source may have; rename it.")
    return path


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _text(sizes: Any) -> str:
    """Sizes by their spelling: comparing symbols would add guards to the exported program."""
    return str(tuple(sizes))


def pytree_leaves(value: Any) -> list[fx.Node]:
    """The nodes in an output's nested arguments, in order."""
    leaves: list[fx.Node] = []
    fx.node.map_arg(value, leaves.append)
    return leaves


def _needed(calls: list[fx.Node], output: fx.Node) -> set[fx.Node]:
    needed = set(output.all_input_nodes)
    for node in reversed(calls):
        if any(name in str(node.target) for name in _ASSERTIONS):
            continue
        if node in needed or is_mutating(node):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return needed


def _attribute(root: Any, name: str) -> torch.Tensor:
    for part in name.split("."):
        root = getattr(root, part)
    assert isinstance(root, torch.Tensor)
    return root


def _where(node: fx.Node) -> str:
    return str(node.meta.get("stack_trace", "")).strip()
