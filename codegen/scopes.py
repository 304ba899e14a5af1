"""Which module calls become classes of a stage, and what each forward takes, does and returns.

A *scope* is one forward: the stage's, or that of a module call wholly inside the stage. A call that is only
partly inside, or that cannot stand alone, is inlined into the scope around it::

    stage 1        ── h.3.mlp, h.3.add_1 (inlined: h.3 begins in stage 0)
      h.4 (block)  ── ln_1, attn, +, ln_2, mlp
        h.4.attn   ── c_attn, split, attention, c_proj
"""

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from torch import fx, nn

from dpart.codegen.stages import StageContent, is_tuple, rows_dim
from dpart.compiler.captured import CapturedModel
from dpart.compiler.raising import Frame


@dataclass(eq=False)
class Scope:
    """One forward.

    Attributes:
        path: Of the module it is the forward of; empty for the stage.
        kind: The module's class name.
        items: Nodes, and calls of other scopes, in the order of execution.
        inputs: Nodes outside that it reads, in the order of its arguments.
        outputs: Nodes inside that are read outside.
    """

    path: str
    kind: str
    parent: "Scope | None" = None
    sequential: bool = False
    items: list["fx.Node | Scope"] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)

    def walk(self) -> Iterator["Scope"]:
        """This scope and all within, callers first."""
        todo = [self]
        while todo:
            scope = todo.pop()
            yield scope
            todo += [item for item in scope.items if isinstance(item, Scope)]

    def owns(self, name: str) -> bool:
        """Whether a module or tensor of this name is reached from its ``self``."""
        return not self.path or name.startswith(self.path + ".")


class InlineError(Exception):
    """The calls of a path cannot be a class; `build_scopes` starts again without it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def build_scopes(captured: CapturedModel, content: StageContent, inlined: set[str]) -> Scope:
    """The scopes of a stage, where the paths in `inlined` are none.

    Raises:
        InlineError: One more path must be inlined.
    """
    return _Build(captured, content, inlined).run()


def operands(item: "fx.Node | Scope") -> list[fx.Node]:
    """The nodes an item reads, in the order in which its source names them, with repetitions."""
    if isinstance(item, Scope):
        return list(item.inputs)
    if item.name == "batch_size":
        return []
    found: list[fx.Node] = []
    fx.node.map_arg((item.args, item.kwargs), found.append)
    return found


def is_number(node: fx.Node) -> bool:
    """Whether the node is arithmetic on the number of rows, which every forward does for itself."""
    return (
        node.op.startswith("call_")
        and node.meta.get("layer") is None
        and "shape" not in node.meta
        and not is_tuple(node)
    )


def is_unpacking(node: fx.Node) -> bool:
    """Whether the node takes one tensor out of a tuple."""
    return node.target is operator.getitem and is_tuple(node.args[0])  # type: ignore[arg-type]


def frames(node: fx.Node) -> tuple[Frame, ...]:
    """The module calls around a node, without the stock module that it calls itself."""
    if is_unpacking(node):
        return frames(node.all_input_nodes[0])
    stack: tuple[Frame, ...] = node.meta.get("stack") or ()
    own = node.op == "call_module" and stack and stack[-1][0] == node.target
    return stack[:-1] if own else stack


@dataclass
class _Build:
    captured: CapturedModel
    content: StageContent
    inlined: set[str]
    home: dict[fx.Node, Scope] = field(default_factory=dict)

    def run(self) -> Scope:
        self.members = set(self.content.nodes)
        nodes = [n for n in self.captured.module.graph.nodes if n.meta.get("layer") is not None]
        self.totals = Counter(frame for n in nodes for frame in frames(n))
        root = Scope("", f"Stage{self.content.index}", outputs=list(self.content.outputs))
        self._fill(root, [n for n in self.content.nodes if n.meta["layer"] is not None], 0)
        self._place_prelude(root)
        for scope in reversed(list(root.walk())):
            if scope is not root:
                self._outputs(scope)
        # Callees before callers: what a callee takes, its caller reads.
        for scope in sorted(root.walk(), key=_depth, reverse=True):
            self._inputs(scope)
            if scope.sequential:
                self._check_sequential(scope)
        return root

    def _fill(self, scope: Scope, nodes: list[fx.Node], depth: int) -> None:
        def frame(node: fx.Node) -> Frame | None:
            stack = frames(node)
            return stack[depth] if len(stack) > depth else None

        for key, group in groupby(nodes, frame):
            run = list(group)
            if key is None:
                scope.items += run
                self.home |= dict.fromkeys(run, scope)
            elif self._is_class(key, run, scope):
                child = Scope(key[0], key[1], scope, sequential=self._is_sequential(key[0]))
                self._fill(child, run, depth + 1)
                scope.items.append(child)
            else:
                self._fill(scope, run, depth + 1)

    def _is_class(self, frame: Frame, run: list[fx.Node], scope: Scope) -> bool:
        path = frame[0]
        if path in self.inlined or len(run) != self.totals[frame] or not scope.owns(path):
            return False
        if any(n.op == "call_module" and not str(n.target).startswith(path + ".") for n in run):
            return False
        # One function without state reads better where it is called.
        plain = len(run) == 1 and run[0].op != "call_module"
        return scope.sequential or not plain or any(a.op == "get_attr" for a in run[0].all_input_nodes)

    def _is_sequential(self, path: str) -> bool:
        return type(self.captured.model.model.get_submodule(path)).forward is nn.Sequential.forward

    def _place_prelude(self, root: Scope) -> None:
        """Puts what is recomputed into the innermost scope around all its users that is around its own module."""
        for node in reversed(self.content.nodes):
            if node.meta["layer"] is not None or is_number(node):
                continue
            users = [u for u in node.users if u in self.members]
            scope = _common([self.home.get(u, root) for u in users]) or root
            own = {path for path, _, _ in frames(node)}
            while scope.parent is not None and (scope.sequential or scope.path not in own):
                scope = scope.parent
            self.home[node] = scope
            scope.items.insert(0, node)

    def _outputs(self, scope: Scope) -> None:
        inside = {n for s in scope.walk() for n in s.items if isinstance(n, fx.Node)}
        returned = set(self.content.outputs)
        scope.outputs = [
            n
            for n in self.content.nodes
            if n in inside and (n in returned or any(u in self.members - inside for u in n.users))
        ]
        if not scope.outputs or any(is_tuple(n) for n in scope.outputs):
            raise InlineError(scope.path)

    def _inputs(self, scope: Scope) -> None:
        made = {o for i in scope.items for o in (i.outputs if isinstance(i, Scope) else [i])}
        needed: dict[fx.Node, None] = {}
        numbers: list[fx.Node] = []
        for item in scope.items:
            for node in operands(item):
                if is_number(node):
                    numbers.append(node)
                elif node not in made and not (node.op == "get_attr" and scope.owns(str(node.target))):
                    needed[node] = None
        # What the model computes comes first, then masks and positions, then tensors of other modules.
        ranked = sorted(
            needed, key=lambda n: 2 if n.op == "get_attr" else n.op != "placeholder" and n.meta["layer"] is None
        )
        scope.inputs = list(self.content.inputs) if scope.parent is None else ranked
        self._add_numbers(scope, numbers)
        scope.items = _ordered(scope)

    def _add_numbers(self, scope: Scope, numbers: list[fx.Node]) -> None:
        todo, found = list(numbers), set()
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += operands(node)
        for node in reversed([n for n in self.content.nodes if n in found]):
            if node.name == "batch_size" and rows_of(scope, self.captured) is None:
                scope.inputs.append(node)
            else:
                scope.items.insert(0, node)

    def _check_sequential(self, scope: Scope) -> None:
        """Whether the call is a chain of all its children in turn, as ``nn.Sequential`` runs them."""
        order = list(self.captured.model.model.get_submodule(scope.path)._modules)
        last = scope.inputs[0] if len(scope.inputs) == 1 else None
        place = -1
        for item in scope.items:
            path = item.path if isinstance(item, Scope) else str(item.target)
            module = isinstance(item, Scope) or item.op == "call_module"
            name = path.removeprefix(scope.path + ".")
            if not module or not name.isdigit() or name not in order[place + 1 :] or operands(item) != [last]:
                raise InlineError(scope.path)
            place = order.index(name)
            results = item.outputs if isinstance(item, Scope) else [item]
            last = results[0] if len(results) == 1 else None
        if scope.outputs != [last]:
            raise InlineError(scope.path)


def rows_of(scope: Scope, captured: CapturedModel) -> tuple[fx.Node, int] | None:
    """An input of the scope with its dimension that is the batch, if there is one."""
    for node in scope.inputs:
        if (dim := rows_dim(node, captured)) is not None:
            return node, dim
    return None


def _ordered(scope: Scope) -> list[fx.Node | Scope]:
    """The items with what is recomputed moved to its first reader, where it reads best; the rest stays in order.

    Before each reader come first the parts that are read more than once, then those that are read only there.
    """
    movable = {i for i in scope.items if isinstance(i, fx.Node) and i.meta.get("layer") is None}
    reads = Counter(n for item in scope.items for n in operands(item))
    result: list[fx.Node | Scope] = [n for n in movable if n.name == "batch_size" and reads[n] > 1]
    placed = set(result)

    def own_parts(item: fx.Node | Scope) -> tuple[list[fx.Node], list[fx.Node]]:
        """What is to be placed for an item: parts read more than once, and those only it reads, in order."""
        shared: list[fx.Node] = []
        own: list[fx.Node] = []
        waiting = [n for n in operands(item) if n in movable]
        while waiting:
            node = waiting.pop()
            if node in placed:
                continue
            if reads[node] > 1:
                shared.append(node)
            else:
                own.append(node)
                waiting += [n for n in operands(node) if n in movable]
        return list(dict.fromkeys(reversed(shared))), own[::-1]

    for item in scope.items:
        if item in movable:
            continue
        todo: list[fx.Node | Scope] = [item]
        while todo:
            shared, own = own_parts(todo[-1])
            if shared:
                todo.append(shared[0])
                continue
            done = todo.pop()
            if done not in placed:
                result += [*own, done]
                placed.update([*own, done])
    return result


def _common(scopes: list[Scope]) -> Scope | None:
    """The innermost scope around all of them."""
    chains = []
    for scope in scopes:
        chain: list[Scope] = []
        around: Scope | None = scope
        while around is not None:
            chain.insert(0, around)
            around = around.parent
        chains.append(chain)
    common = None
    for level in zip(*chains, strict=False):
        if any(s is not level[0] for s in level):
            break
        common = level[0]
    return common


def _depth(scope: Scope) -> int:
    depth = 0
    while scope.parent is not None:
        scope, depth = scope.parent, depth + 1
    return depth
