"""The classes of a stage's file: one for each distinct structure, however many modules have it.

Two module calls have one class if the source written for them is the same. Where it differs only in numbers,
those become arguments of the class, named as the model's own modules name them: ``Conv1D(nf=2304, nx=768)``.
"""

import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from dpart.codegen.body import forward_lines
from dpart.codegen.names import RESERVED, Names, checked
from dpart.codegen.scopes import InlineError, Scope
from dpart.codegen.source import wrapped
from dpart.codegen.state import Slot, built, init_lines
from dpart.compiler.captured import CapturedModel

_MOST_ARGUMENTS = 5


@dataclass(frozen=True)
class _Text:
    """A class's source without its name: statements of ``__init__`` and lines of ``forward``."""

    init: tuple[str, ...]
    forward: tuple[str, ...]

    @property
    def tokens(self) -> list[str]:
        """All numbers in it, in order."""
        return [t for line in (*self.init, *self.forward) for t in _split(line)[1::2]]

    @property
    def masked(self) -> str:
        """The text with a mark for every number."""
        return "\n".join("\0".join(_split(line)[::2]) for line in (*self.init, "", *self.forward))


@dataclass
class Classes:
    """Writes the classes of one stage.

    Attributes:
        written: Lines of the classes' source, callees first.
    """

    captured: CapturedModel
    root: Slot
    names: Names
    written: list[list[str]] = field(default_factory=list)

    def add(self, scopes: list[Scope]) -> None:
        """Writes the classes of these scopes and sets what builds each in its slot.

        Raises:
            InlineError: Calls of one module have different forwards.
        """
        depths = defaultdict(list)
        for scope in scopes:
            depths[scope.path.count(".")].append(scope)
        for depth in sorted(depths, reverse=True):
            by_kind: dict[str, list[Scope]] = defaultdict(list)
            for scope in depths[depth]:
                if scope.sequential:
                    self._check_sequential(scope)
                else:
                    by_kind[scope.kind].append(scope)
            for kind in sorted(by_kind):
                self._add_kind(kind, by_kind[kind])

    def _check_sequential(self, scope: Scope) -> None:
        """Whether the slot is built by one ``nn.Sequential``; the children that do nothing have no state."""
        slot = self.root.at(scope.path)
        if list(slot.sequential) != [str(i) for i in range(len(slot.sequential))] or built(slot) is None:
            raise InlineError(scope.path)

    def _add_kind(self, kind: str, scopes: list[Scope]) -> None:
        families: dict[str, dict[_Text, list[Scope]]] = defaultdict(dict)
        texts: dict[str, _Text] = {}
        for scope in scopes:
            slot = self.root.at(scope.path)
            if slot.digits:
                raise InlineError(scope.path)
            text = _Text(tuple(init_lines(slot)), tuple(forward_lines(scope, slot, self.captured, ())))
            if texts.setdefault(scope.path, text) != text:
                raise InlineError(scope.path)
            families[text.masked].setdefault(text, []).append(scope)
        for family in families.values():
            arguments = self._arguments(family)
            if len(arguments) > _MOST_ARGUMENTS:
                for text, members in family.items():
                    self._write(kind, {text: members}, {})
            else:
                self._write(kind, family, arguments)

    def _arguments(self, family: dict[_Text, list[Scope]]) -> dict[tuple[str, ...], str]:
        """A name for each tuple of numbers, one for each text, that is not the same in all of them."""
        rows = list(zip(*(text.tokens for text in family), strict=True))
        varying = list(dict.fromkeys(row for row in rows if len(set(row)) > 1))
        modules = [self.captured.model.model.get_submodule(m[0].path) for m in family.values()]
        names = Names(*RESERVED)
        return {row: names.new(_attribute(modules, row) or "size") for row in varying}

    def _write(self, kind: str, family: dict[_Text, list[Scope]], arguments: dict[tuple[str, ...], str]) -> None:
        name = self.names.new(checked(kind, "A module's class"))
        rows = list(zip(*(text.tokens for text in family), strict=True))
        text = next(iter(family))
        values = iter(rows)
        init = [_filled(line, values, arguments, "") for line in text.init]
        forward = [_filled(line, values, arguments, "self.") for line in text.forward]
        kept = [n for n in arguments.values() if any(f"self.{n}" in line for line in forward)]
        if kept:
            init = [f"{', '.join(f'self.{n}' for n in kept)} = {', '.join(kept)}", *init]
        typed = [f"{n}: {'int' if all(v.isdigit() for v in row) else 'float'}" for row, n in arguments.items()]
        self.written.append(class_lines(name, init, forward, typed))
        for place, members in enumerate(family.values()):
            given = ", ".join(f"{n}={row[place]}" for row, n in arguments.items())
            for scope in members:
                self.root.at(scope.path).source = f"{name}({given})"


def class_lines(
    name: str,
    init: list[str],
    forward: list[str],
    arguments: list[str] | None = None,
    doc: list[str] | None = None,
    base: str = "nn.Module",
) -> list[str]:
    """A class as source lines, long ones wrapped."""
    lines = [f"class {name}({base}):"]
    lines += [f"    {line}".rstrip() for line in doc or []]
    if doc:
        lines.append("")
    if init or arguments:
        head = f"    def __init__({', '.join(['self', *(arguments or [])])}) -> None:"
        lines += [*wrapped(head), "        super().__init__()"]
        lines += [part for line in init for part in wrapped(f"        {line}")]
        lines.append("")
    lines += [part for line in forward for part in wrapped(f"    {line}")]
    return lines


def _attribute(modules: list[nn.Module], row: tuple[str, ...]) -> str | None:
    """The name under which all the modules, or their children of one name, keep these numbers."""
    groups = [modules]
    groups += [[m._modules[n] for m in modules] for n in modules[0]._modules]  # type: ignore[misc]
    for group in groups:
        for name in vars(group[0]) if group[0] is not None else ():
            values = [vars(m).get(name) for m in group if m is not None]
            plain = not name.startswith("_") and all(type(v) in (int, float) for v in values)
            if plain and [repr(v) for v in values] == list(row):
                return name
    return None


def _filled(line: str, rows: Iterator[tuple[str, ...]], arguments: dict[tuple[str, ...], str], prefix: str) -> str:
    parts = _split(line)
    for i in range(1, len(parts), 2):
        row = next(rows)
        parts[i] = prefix + arguments[row] if row in arguments else parts[i]
    return "".join(parts)


def _split(line: str) -> list[str]:
    """The line cut around its numbers: text, number, text, number, ..., text."""
    parts, end = [], 0
    tokens = tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline)
    shift = len(line) - len(line.lstrip())
    try:
        for token in tokens:
            if token.type == tokenize.NUMBER:
                start = token.start[1] + shift
                parts += [line[end:start], line[start : token.end[1] + shift]]
                end = token.end[1] + shift
    except tokenize.TokenError:
        pass
    return [*parts, line[end:]]
