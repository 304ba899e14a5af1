"""The ``forward`` of a scope: its items in their order, as statements a person would write.

A result that is read once, by what comes next, is written into its reader's expression; a variable that is not
read any more gives its name to what was made of it; blocks in a chain become a loop. None of this changes the
order in which anything is computed: Python evaluates operands from left to right, and a result moves into an
expression only where that keeps it in its place.
"""

import operator
from collections import Counter
from dataclasses import dataclass, field

from torch import fx

from dpart.codegen.names import RESERVED, Names
from dpart.codegen.scopes import Scope, is_number, is_unpacking, operands, rows_of
from dpart.codegen.source import ATOM, AUGMENTED, Context, Expr, expression, index
from dpart.codegen.stages import is_tuple, writes
from dpart.codegen.state import Slot, built, reference
from dpart.codegen.wording import module_name, operand_hints, parameter_names, plain_name, telling_name
from dpart.compiler.captured import CapturedModel

_LONGEST = 80
_LONGEST_STATEMENT = 85
_DEEPEST = 3

_RESHAPES = frozenset({"view", "reshape", "transpose", "permute", "contiguous", "expand", "unsqueeze", "squeeze"})

Item = fx.Node | Scope


@dataclass(frozen=True)
class _Pending:
    """An expression that waits for its only reader."""

    node: fx.Node
    expr: Expr
    reads: tuple[fx.Node, ...]
    place: int
    depth: int


def forward_lines(scope: Scope, slot: Slot, captured: CapturedModel, changed: tuple[fx.Node, ...]) -> list[str]:
    """The source of a scope's forward, unindented.

    Args:
        slot: The scope's own, from which its ``self`` reaches modules and tensors.
        changed: Inputs to clone first.
    """
    return _Body(scope, slot, captured).lines(changed)


def parameter_list(scope: Scope, captured: CapturedModel) -> list[str]:
    """The names of a forward's arguments."""
    names = Names(*RESERVED)
    return [names.new(wish) for wish in parameter_names(scope, captured, operand_hints(scope.items))]


@dataclass
class _Body:
    scope: Scope
    slot: Slot
    captured: CapturedModel
    text: list[str] = field(default_factory=list)
    pending: list[_Pending] = field(default_factory=list)
    variables: dict[fx.Node, str] = field(default_factory=dict)
    bound: dict[str, set[fx.Node]] = field(default_factory=dict)
    read: dict[fx.Node, None] = field(default_factory=dict)

    def lines(self, changed: tuple[fx.Node, ...]) -> list[str]:
        self._prepare()
        arguments = parameter_list(self.scope, self.captured)
        self.names = Names(*RESERVED, *arguments)
        annotated = []
        for node, name in zip(self.scope.inputs, arguments, strict=True):
            self._bind(node, name)
            annotated.append(f"{name}: {'int' if is_number(node) else 'Tensor'}")
        self.first = arguments[0] if arguments else None
        for node in changed:
            name = self.variables[node]
            self.text.append(f"{name} = {name}.clone()  # changed in place below")
        place = 0
        while place < len(self.items):
            place += self._loop(place) or self._item(place)
        self._return()
        results = ["Tensor"] * len(self.scope.outputs)
        result = results[0] if len(results) == 1 else f"tuple[{', '.join(results)}]"
        head = f"def forward({', '.join(['self', *annotated])}) -> {result}:"
        return [head, *("    " + line for line in self.text)]

    def _prepare(self) -> None:
        # Taking tensors out of a tuple is part of the statement that makes the tuple.
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        items = self.scope.items
        for item in items:
            if isinstance(item, fx.Node) and is_tuple(item):
                users = [n for n in items if isinstance(n, fx.Node) and item in n.all_input_nodes]
                if all(is_unpacking(n) for n in users) and len(users) > 1:
                    self.parts[item] = users
        unpacked = {n for users in self.parts.values() for n in users}
        self.items: list[Item] = [i for i in items if i not in unpacked]
        self.counts: Counter[fx.Node] = Counter()
        self.last: dict[fx.Node, int] = {}
        for place, item in enumerate(self.items):
            for node in operands(item):
                self.counts[node] += 1
                self.last[node] = place
            if isinstance(item, fx.Node) and item.name == "batch_size" and (rows := self._rows()):
                self.last[rows[0]] = place
        for node in self.scope.outputs:
            self.counts[node] += 1
            self.last[node] = len(self.items)
        self.hints = operand_hints(items)
        self.kept = {n for i in self.items if isinstance(i, fx.Node) and _augments(i) for n in operands(i)[:1]}
        # One block a line.
        blocks = {n for i in self.items if _path(i).rpartition(".")[2].isdigit() for n in _outputs(i)}
        self.kept |= blocks - set(self.scope.outputs)

    def _item(self, place: int) -> int:
        item = self.items[place]
        if isinstance(item, fx.Node) and (_augments(item) or item.target is operator.setitem):
            self._change(item, place)
            return 1
        taken = self._taken(item)
        self.read = {}
        expr = self._call(item) if isinstance(item, Scope) else self._expression(item)
        if taken and len(expr.text) > _LONGEST_STATEMENT:
            self._flush()
            taken, self.read = [], {}
            expr = self._call(item) if isinstance(item, Scope) else self._expression(item)
        depth = max((p.depth for p in taken), default=0) + (not _reshapes(item))
        reads = tuple(self.read)
        results = item.outputs if isinstance(item, Scope) else self.parts.get(item, [item])
        self.pending = self.pending[: len(self.pending) - len(taken)]
        node = results[0]
        fits = len(expr.text) <= _LONGEST and depth <= _DEEPEST
        if len(results) == 1 and item not in self.parts and self.counts[node] == 1 and fits and node not in self.kept:
            self.pending.append(_Pending(node, expr, reads, place, depth))
            return 1
        self._flush()
        if not any(self.counts[n] for n in results):
            if not self._is_pure(item):
                self.text.append(expr.text)
        elif len(results) == 1 and item not in self.parts:
            self._assign(node, self._name(item, node, reads, place), expr.text)
        else:
            self._unpack(item, results, expr.text)
        return 1

    def _taken(self, item: Item) -> list[_Pending]:
        """The waiting expressions that the item reads; all others that would lose their place are written."""
        wanted = operands(item)
        waiting = [p.node for p in self.pending]
        inline = [n for n in wanted if n in waiting]
        count = len(inline)
        # A number of rows is a mere size: it may be asked for at any time.
        if count and waiting[len(waiting) - count :] != inline:
            self._flush()
            return []
        return self.pending[len(self.pending) - count :] if count else []

    def _expression(self, item: fx.Node) -> Expr:
        if item.name == "batch_size":
            rows = self._rows()
            assert rows is not None
            return Expr(f"{self._ref(rows[0]).text}.size({rows[1]})")
        if item.op == "call_module":
            module = reference(self.slot, str(item.target))
            return Expr(f"{module}({', '.join(self._ref(n).text for n in operands(item))})")
        return expression(item, Context(self._ref, self._device()))

    def _rows(self) -> tuple[fx.Node, int] | None:
        return rows_of(self.scope, self.captured)

    def _call(self, scope: Scope) -> Expr:
        arguments = ", ".join(self._ref(n).text for n in scope.inputs)
        return Expr(f"{reference(self.slot, scope.path)}({arguments})")

    def _ref(self, node: fx.Node) -> Expr:
        for pending in self.pending:
            if pending.node is node:
                self.read |= dict.fromkeys(pending.reads)
                return pending.expr
        self.read[node] = None
        if node in self.variables:
            return Expr(self.variables[node])
        assert node.op == "get_attr", f"{node.name} is read before it is made"
        return Expr(reference(self.slot, str(node.target)))

    def _device(self) -> str | None:
        for node in self.scope.inputs:
            if not is_number(node) and node.op != "get_attr":
                return f"{self._first_name(node)}.device"
        for name, child in self.slot.children.items():
            if child.tensor is not None:
                return f"self.{name}.device"
        return None

    def _first_name(self, node: fx.Node) -> str:
        return parameter_list(self.scope, self.captured)[self.scope.inputs.index(node)]

    def _change(self, item: fx.Node, place: int) -> None:
        """A statement that changes its first operand: ``x += y``, ``x[i] = y``."""
        self._taken_or_flushed(item)
        self.read = {}
        context = Context(self._ref, self._device())
        target = item.args[0]
        assert isinstance(target, fx.Node)
        left = self._ref(target)
        if item.target is operator.setitem:
            right = Expr(index(item.args[2], context))
            self.text.append(f"{left.text}[{index(item.args[1], context)}] = {right.text}")
        else:
            right = Expr(index(item.args[1], context))
            self.text.append(f"{left.text} {AUGMENTED[item.target]} {right.text}")
        self.pending = []
        if left.precedence == ATOM:
            self._alias(item, left.text)

    def _taken_or_flushed(self, item: fx.Node) -> None:
        inline = self._taken(item)
        keep = self.pending[len(self.pending) - len(inline) :] if inline else []
        self.pending = self.pending[: len(self.pending) - len(inline)]
        self._flush()
        self.pending = keep

    def _flush(self) -> None:
        waiting, self.pending = self.pending, []
        for p in waiting:
            self._assign(p.node, self._name(self._maker(p.node), p.node, p.reads, p.place), p.expr.text)

    def _maker(self, node: fx.Node) -> Item:
        return next((i for i in self.items if isinstance(i, Scope) and node in i.outputs), node)

    def _unpack(self, item: Item, results: list[fx.Node], text: str) -> None:
        if isinstance(item, Scope):
            base = module_name(item, self.captured)
            targets = [self._fresh(n, base if i == 0 else None) for i, n in enumerate(results)]
            self.text.append(f"{', '.join(targets)} = {text}")
            return
        indices = {int(str(n.args[1])): n for n in results}
        count = _tuple_length(item)
        if min(indices) < 0 or len(indices) < len(results) or (count or max(indices)) > 8:
            name = self.names.new("parts")
            self.text.append(f"{name} = {text}")
            for n in results:
                self._assign(n, self.names.new(self.hints.get(n, "part")), f"{name}[{n.args[1]}]")
            return
        size = count or max(indices) + 1
        targets = [self._fresh(indices[i], None) if i in indices else "_" for i in range(size)]
        rest = "" if count else ", *_"
        self.text.append(f"{', '.join(targets)}{rest} = {text}")

    def _fresh(self, node: fx.Node, wish: str | None) -> str:
        if not self.counts[node]:
            return "_"
        name = self.names.new(self.hints.get(node) or wish or "part")
        self._bind(node, name)
        return name

    def _name(self, item: Item, node: fx.Node, reads: tuple[fx.Node, ...], place: int) -> str:
        dead = [self.variables[n] for n in reads if self._is_dead(n, place, node)]
        wish = telling_name(item, self.hints)
        if wish is not None:
            free = wish in self.bound and all(self.last.get(n, -1) <= place for n in self.bound[wish])
            return wish if free else self.names.new(wish)
        direct = [name for n in operands(item) if (name := self.variables.get(n)) in dead]
        if dead:
            usual = ("x", "hidden", "out", self.first if self.scope.parent is not None else None)
            return min([*direct, *dead], key=lambda name: name not in usual)
        return self.names.new(module_name(item, self.captured) or plain_name(item, self.first))

    def _is_dead(self, node: fx.Node, place: int, result: fx.Node) -> bool:
        """Whether the variable of a node may take another tensor of its kind after this place."""
        name = self.variables.get(node)
        if name is None or "." in name or node.meta.get("dtype") != result.meta.get("dtype"):
            return False
        return "dtype" in node.meta and all(self.last.get(n, -1) <= place for n in self.bound[name])

    def _assign(self, node: fx.Node, name: str, text: str) -> None:
        if text != name:
            self.text.append(f"{name} = {text}")
        self._bind(node, name)

    def _bind(self, node: fx.Node, name: str) -> None:
        self.variables[node] = name
        self.bound[name] = {node}

    def _alias(self, node: fx.Node, name: str) -> None:
        self.variables[node] = name
        self.bound.setdefault(name, set()).add(node)

    def _return(self) -> None:
        outputs = self.scope.outputs
        waiting = [p.node for p in self.pending]
        if waiting != [n for n in outputs if n in waiting]:
            self._flush()
        result = ", ".join(self._ref(n).text for n in outputs)
        if self.text and self.text[-1].startswith(f"{result} = "):
            result = self.text.pop().removeprefix(f"{result} = ")
        self.text.append(f"return {result}")

    def _loop(self, place: int) -> int:
        """Writes a loop over the blocks that begin at this place; the number of items it covers, or 0."""
        run, carrier = self._run(place)
        if len(run) < 2:
            return 0
        first, result = run[0], _outputs(run[-1])[0]
        self._flush()
        start = _inputs(first)[carrier]
        name = self._ref(start).text
        others = [self._ref(n).text for i, n in enumerate(_inputs(first)) if i != carrier]
        if name in others or not self._is_dead(start, place + len(run) - 1, result):
            name = self.names.new(plain_name(first, self.first))
            self.text.append(f"{name} = {self._ref(start).text}")
        arguments = ", ".join([*others[:carrier], name, *others[carrier:]])
        parent, _, number = _path(first).rpartition(".")
        container, listed = self._slot(parent), reference(self.slot, parent)
        if len(run) == len(container.children):
            block = self.names.new("block" if isinstance(first, Scope) else "layer")
            is_list = container.is_list and built(container) is not None
            self.text.append(f"for {block} in {listed}{'' if is_list else '.values()'}:")
        else:
            i = self.names.new("i")
            start_text = f"{number}, " if int(number) else ""
            self.text.append(f"for {i} in range({start_text}{int(number) + len(run)}):")
            by_number = reference(self.slot, _path(first)).endswith(f"[{number}]")
            block = f"{listed}[{i if by_number else f'str({i})'}]"
        self.text.append(f"    {name} = {block}({arguments})")
        self._bind(result, name)
        return len(run)

    def _slot(self, path: str) -> Slot:
        return self.slot.at(path.removeprefix(self.slot.path).lstrip("."))

    def _run(self, place: int) -> tuple[list[Item], int]:
        """The longest chain of calls from here that are numbered children of one container, in order."""
        first = self.items[place]
        parent, _, name = _path(first).rpartition(".")
        below = parent and parent != self.slot.path and parent.startswith(self.slot.path)
        if not name.isdigit() or not below or len(_outputs(first)) != 1:
            return [], 0
        best: tuple[list[Item], int] = [], 0
        for carrier in range(len(_inputs(first))):
            run = [first]
            for item in self.items[place + 1 :]:
                path = f"{parent}.{int(name) + len(run)}"
                if _path(item) != path or len(_outputs(item)) != 1 or not self._follows(run[-1], item, carrier):
                    break
                run.append(item)
            best = max(best, (run, carrier), key=lambda r: len(r[0]))
        return best

    def _follows(self, before: Item, after: Item, carrier: int) -> bool:
        made = _outputs(before)[0]
        wanted = list(_inputs(before))
        wanted[carrier] = made
        return _inputs(after) == wanted and self.counts[made] == 1

    def _is_pure(self, item: Item) -> bool:
        """Whether leaving out an item whose result nobody reads changes nothing."""
        if isinstance(item, Scope) or item.op == "call_module":
            return False
        return not writes(item, self.captured.module) and item.meta.get("layer") is None


def _reshapes(item: Item) -> bool:
    """Whether the item is an operator or only reshapes: a chain of them is easily read."""
    if isinstance(item, Scope) or item.op == "call_module":
        return False
    return item.target in _RESHAPES or getattr(item.target, "__module__", "") == "_operator"


def _augments(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in AUGMENTED and isinstance(node.args[0], fx.Node)


def _path(item: Item) -> str:
    if isinstance(item, Scope):
        return item.path
    return str(item.target) if item.op == "call_module" else ""


def _inputs(item: Item) -> list[fx.Node]:
    return operands(item)


def _outputs(item: Item) -> list[fx.Node]:
    return item.outputs if isinstance(item, Scope) else [item]


def _tuple_length(node: fx.Node) -> int | None:
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
