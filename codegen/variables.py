"""The variables of a forward: which value has which name, and when a name may be given to another value."""

from collections import Counter
from collections.abc import Sequence

from torch import fx

from dpart.codegen.items import Item
from dpart.codegen.names import RESERVED, Names
from dpart.codegen.scopes import operands
from dpart.codegen.wording import module_name, operand_hints, plain_name, telling_name
from dpart.compiler.captured import CapturedModel


class Variables:
    """The names of one forward's values.

    A value lives from the item that makes it to the last item that reads it. Several values have one name where
    they are one tensor, changed in place.

    Attributes:
        counts: How often each value is read.
        last: The place of the last item that reads it; for what the forward returns, the number of items.
        hints: Names that operands have by what reads them.
    """

    def __init__(self, arguments: Sequence[str], items: Sequence[Item], returned: Sequence[fx.Node]) -> None:
        self.counts: Counter[fx.Node] = Counter()
        self.last: dict[fx.Node, int] = {}
        for place, item in enumerate(items):
            for node in operands(item):
                self.read(node, place)
        for node in returned:
            self.read(node, len(items))
        self.hints = operand_hints(items)
        self._names = Names(*RESERVED, *arguments)
        self._of: dict[fx.Node, str] = {}
        self._bound: dict[str, set[fx.Node]] = {}

    def __contains__(self, node: object) -> bool:
        return node in self._of

    def __getitem__(self, node: fx.Node) -> str:
        return self._of[node]

    def read(self, node: fx.Node, place: int) -> None:
        """Notes one more reader."""
        self.counts[node] += 1
        self.last[node] = max(place, self.last.get(node, place))

    def new(self, wish: str) -> str:
        """A name that no value has had."""
        return self._names.new(wish)

    def bind(self, node: fx.Node, name: str) -> None:
        """The name is this value's from now on."""
        self._of[node] = name
        self._bound[name] = {node}

    def alias(self, node: fx.Node, name: str) -> None:
        """The name is this value's too: the same tensor, changed."""
        self._of[node] = name
        self._bound.setdefault(name, set()).add(node)

    def fresh(self, node: fx.Node, wish: str | None) -> str:
        """Binds a new name, or ``_`` for what nobody reads."""
        if not self.counts[node]:
            return "_"
        self.bind(node, self.new(self.hints.get(node) or wish or "part"))
        return self._of[node]

    def is_dead(self, node: fx.Node, place: int, result: fx.Node) -> bool:
        """Whether the variable of a value may take `result`, a tensor of its kind, at this place."""
        name = self._of.get(node)
        if name is None or "." in name or node.meta.get("dtype") != result.meta.get("dtype"):
            return False
        return "dtype" in node.meta and self._is_free(name, place)

    def choose(
        self,
        item: Item,
        node: fx.Node,
        reads: Sequence[fx.Node],
        place: int,
        first: str | None,
        captured: CapturedModel,
    ) -> str:
        """The name for what an item makes: a telling one, else that of a value it uses up, else a plain one.

        Args:
            reads: The values in its expression, from left to right.
            first: The forward's first argument.
        """
        wish = telling_name(item, self.hints)
        if wish is not None:
            return wish if wish in self._bound and self._is_free(wish, place) else self.new(wish)
        dead = [self._of[n] for n in reads if self.is_dead(n, place, node)]
        direct = [name for n in operands(item) if (name := self._of.get(n)) in dead]
        if dead:
            return min([*direct, *dead], key=lambda name: name not in ("x", "hidden", "out", first))
        return self.new(module_name(item, captured) or plain_name(item, first))

    def _is_free(self, name: str, place: int) -> bool:
        return all(self.last.get(n, -1) <= place for n in self._bound[name])
