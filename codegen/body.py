"""The ``forward`` of a scope: its items in their order, as statements a person would write.

A result that is read once, by what comes next, is written into its reader's expression; a variable that is not
read any more gives its name to what was made of it; blocks in a chain become a loop. None of this changes the
order in which anything is computed: Python evaluates operands from left to right, and a result moves into an
expression only where that keeps it in its place.
"""

import operator
from dataclasses import dataclass, field

from torch import fx

from dpart.codegen.items import Item, augments, chain_at, is_light, path_of, results_of, tuple_length
from dpart.codegen.names import RESERVED, Names
from dpart.codegen.scopes import Scope, is_number, is_unpacking, operands, rows_of
from dpart.codegen.source import ATOM, AUGMENTED, Context, Expr, expression, index
from dpart.codegen.stages import is_tuple, writes
from dpart.codegen.state import Slot, built, reference
from dpart.codegen.variables import Variables
from dpart.codegen.wording import module_name, operand_hints, parameter_names, plain_name
from dpart.compiler.captured import CapturedModel

_LONGEST = 80
_LONGEST_STATEMENT = 85
_DEEPEST = 3


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


@dataclass
class _Body:
    scope: Scope
    slot: Slot
    captured: CapturedModel
    text: list[str] = field(default_factory=list)
    pending: list[_Pending] = field(default_factory=list)
    read: dict[fx.Node, None] = field(default_factory=dict)

    def lines(self, changed: tuple[fx.Node, ...]) -> list[str]:
        self._prepare()
        annotated = []
        for node, name in zip(self.scope.inputs, self.arguments, strict=True):
            self.variables.bind(node, name)
            annotated.append(f"{name}: {'int' if is_number(node) else 'Tensor'}")
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
        names = Names(*RESERVED)
        wishes = parameter_names(self.scope, self.captured, operand_hints(items))
        self.arguments = [names.new(wish) for wish in wishes]
        self.first = self.arguments[0] if self.arguments else None
        self.variables = Variables(self.arguments, self.items, self.scope.outputs)
        rows = rows_of(self.scope, self.captured)
        for place, item in enumerate(self.items):
            if rows is not None and isinstance(item, fx.Node) and item.name == "batch_size":
                self.variables.read(rows[0], place)
        self.kept = {n for i in self.items if augments(i) for n in operands(i)[:1]}
        # One block a line.
        blocks = {n for i in self.items if path_of(i).rpartition(".")[2].isdigit() for n in results_of(i)}
        self.kept |= blocks - set(self.scope.outputs)

    def _item(self, place: int) -> int:
        item = self.items[place]
        if isinstance(item, fx.Node) and (augments(item) or item.target is operator.setitem):
            self._change(item, place)
            return 1
        taken = self._taken(item)
        self.read = {}
        expr = self._call(item) if isinstance(item, Scope) else self._expression(item)
        if taken and len(expr.text) > _LONGEST_STATEMENT:
            self._flush()
            taken, self.read = [], {}
            expr = self._call(item) if isinstance(item, Scope) else self._expression(item)
        depth = max((p.depth for p in taken), default=0) + (not is_light(item))
        reads = tuple(self.read)
        results = item.outputs if isinstance(item, Scope) else self.parts.get(item, [item])
        self.pending = self.pending[: len(self.pending) - len(taken)]
        node = results[0]
        fits = len(expr.text) <= _LONGEST and depth <= _DEEPEST
        if (
            len(results) == 1
            and item not in self.parts
            and self.variables.counts[node] == 1
            and fits
            and node not in self.kept
        ):
            self.pending.append(_Pending(node, expr, reads, place, depth))
            return 1
        self._flush()
        if not any(self.variables.counts[n] for n in results):
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
            rows = rows_of(self.scope, self.captured)
            assert rows is not None
            return Expr(f"{self._ref(rows[0]).text}.size({rows[1]})")
        if item.op == "call_module":
            module = reference(self.slot, str(item.target))
            return Expr(f"{module}({', '.join(self._ref(n).text for n in operands(item))})")
        return expression(item, Context(self._ref, self._device()))

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
        for node, name in zip(self.scope.inputs, self.arguments, strict=True):
            if not is_number(node) and node.op != "get_attr":
                return f"{name}.device"
        for name, child in self.slot.children.items():
            if child.tensor is not None:
                return f"self.{name}.device"
        return None

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
            self.variables.alias(item, left.text)

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
            targets = [self.variables.fresh(n, base if i == 0 else None) for i, n in enumerate(results)]
            self.text.append(f"{', '.join(targets)} = {text}")
            return
        indices = {int(str(n.args[1])): n for n in results}
        count = tuple_length(item)
        if min(indices) < 0 or len(indices) < len(results) or (count or max(indices)) > 8:
            name = self.variables.new("parts")
            self.text.append(f"{name} = {text}")
            for n in results:
                self._assign(n, self.variables.new(self.variables.hints.get(n, "part")), f"{name}[{n.args[1]}]")
            return
        size = count or max(indices) + 1
        targets = [self.variables.fresh(indices[i], None) if i in indices else "_" for i in range(size)]
        rest = "" if count else ", *_"
        self.text.append(f"{', '.join(targets)}{rest} = {text}")

    def _name(self, item: Item, node: fx.Node, reads: tuple[fx.Node, ...], place: int) -> str:
        first = self.first if self.scope.parent is not None else None
        return self.variables.choose(item, node, reads, place, first, self.captured)

    def _assign(self, node: fx.Node, name: str, text: str) -> None:
        if text != name:
            self.text.append(f"{name} = {text}")
        self.variables.bind(node, name)

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
        run, carrier = chain_at(self.items, place, self.slot.path, self.variables.counts)
        if len(run) < 2:
            return 0
        first, result = run[0], results_of(run[-1])[0]
        self._flush()
        start = operands(first)[carrier]
        name = self._ref(start).text
        others = [self._ref(n).text for i, n in enumerate(operands(first)) if i != carrier]
        if name in others or not self.variables.is_dead(start, place + len(run) - 1, result):
            name = self.variables.new(plain_name(first, self.first))
            self.text.append(f"{name} = {self._ref(start).text}")
        arguments = ", ".join([*others[:carrier], name, *others[carrier:]])
        parent, _, number = path_of(first).rpartition(".")
        container, listed = self._slot(parent), reference(self.slot, parent)
        if len(run) == len(container.children):
            block = self.variables.new("block" if isinstance(first, Scope) else "layer")
            is_list = container.is_list and built(container) is not None
            self.text.append(f"for {block} in {listed}{'' if is_list else '.values()'}:")
        else:
            i = self.variables.new("i")
            start_text = f"{number}, " if int(number) else ""
            self.text.append(f"for {i} in range({start_text}{int(number) + len(run)}):")
            by_number = reference(self.slot, path_of(first)).endswith(f"[{number}]")
            block = f"{listed}[{i if by_number else f'str({i})'}]"
        self.text.append(f"    {name} = {block}({arguments})")
        self.variables.bind(result, name)
        return len(run)

    def _slot(self, path: str) -> Slot:
        return self.slot.at(path.removeprefix(self.slot.path).lstrip("."))

    def _is_pure(self, item: Item) -> bool:
        """Whether leaving out an item whose result nobody reads changes nothing."""
        if isinstance(item, Scope) or item.op == "call_module":
            return False
        return not writes(item, self.captured.module) and item.meta.get("layer") is None
