"""The modules, parameters and buffers of a stage under their original names, and the ``__init__`` that makes them.

They form a tree of *slots* along the dots of the names. A slot is a stock module, a module with a class of its
own, a container (``nn.ModuleList``, ``nn.ModuleDict``, ``nn.Sequential``, a bare ``nn.Module``), or a tensor.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpart.codegen.names import checked
from dpart.compiler.constructors import constructor
from dpart.runtime.errors import UserError


@dataclass(eq=False)
class Slot:
    """What stands under one name.

    Attributes:
        path: The name, original and fully qualified; empty for the stage.
        source: The expression that builds it, where it is known: a stock module's or a class's.
        tensor: The parameter or buffer, where it is one.
        persistent: For a buffer, whether it stands in the state_dict.
        sequential: Where it is called as an ``nn.Sequential``, the names of all its children in the model.
    """

    path: str
    source: str | None = None
    tensor: Tensor | None = None
    persistent: bool = True
    sequential: tuple[str, ...] = ()
    children: dict[str, "Slot"] = field(default_factory=dict)

    def at(self, path: str) -> "Slot":
        """The slot of a path below this one; made where there is none."""
        slot = self
        for part in path.split(".") if path else []:
            if part not in slot.children:
                slot.children[part] = Slot(f"{slot.path}.{part}".lstrip("."))
            slot = slot.children[part]
        return slot

    @property
    def digits(self) -> list["Slot"]:
        """The children that stand in a list: their names are numbers."""
        return [child for name, child in self.children.items() if name.isdigit()]

    @property
    def is_list(self) -> bool:
        """Whether the children are numbered from 0 without a gap, and all are modules or all are tensors."""
        names = list(self.children)
        kinds = {child.tensor is None for child in self.children.values()}
        return bool(names) and names == [str(i) for i in range(len(names))] and len(kinds) == 1


def build_slots(model: nn.Module, names: Iterable[str], modules: Iterable[str], extra: dict[str, Tensor]) -> Slot:
    """The slots of a stage.

    Args:
        names: Of parameters and buffers of the model that stand alone.
        modules: Of stock modules.
        extra: Tensors that the capture added, by name.

    Raises:
        UserError: A name cannot stand in source, or a module cannot be rebuilt.
    """
    root = Slot("")
    state = set(model.state_dict())
    modules = set(modules)
    for path in modules:
        root.at(path).source = _stock(model.get_submodule(path), path)
    for name in names:
        if name.rpartition(".")[0] in modules:
            continue
        slot = root.at(name)
        slot.tensor = extra[name] if name in extra else _tensor(model, name)
        slot.persistent = name in state
    _sort(root, model)
    _check_names(root)
    return root


def init_lines(slot: Slot, prefix: str = "self") -> list[str]:
    """The statements of an ``__init__`` that fill a slot, unindented."""
    lines = []
    for name, child in slot.children.items():
        target = f'{prefix}["{name}"]' if name.isdigit() else f"{prefix}.{name}"
        if child.tensor is not None and not isinstance(child.tensor, nn.Parameter):
            lines.append(_buffer(name, child, prefix))
            continue
        source = built(child)
        if source is not None:
            lines.append(f"{target} = {source}")
            continue
        bare = "nn.ModuleDict()" if any(d.tensor is None for d in child.digits) else "nn.Module()"
        lines.append(f"{target} = {bare}")
        lines += init_lines(child, target)
    return _numbered_runs(lines)


def _numbered_runs(lines: list[str]) -> list[str]:
    """Three or more statements in turn that differ in one number of an item, as a loop."""
    cut = [re.fullmatch(r'(.*)\["(\d+)"\] = (.*)', line) for line in lines]
    result, i = [], 0
    while i < len(lines):
        end, first = i + 1, cut[i]
        while first and end < len(lines) and (other := cut[end]):
            if other.group(1, 3) != first.group(1, 3) or int(other[2]) != int(first[2]) + end - i:
                break
            end += 1
        if first and end - i > 2:
            start = int(first[2])
            result += [f"for i in range({start}, {start + end - i}):", f"    {first[1]}[str(i)] = {first[3]}"]
        else:
            result += lines[i:end]
        i = end
    return result


def built(slot: Slot) -> str | None:
    """The one expression that builds a slot with all below it, or None if it takes statements."""
    if slot.tensor is not None:
        return _parameter(slot.tensor) if isinstance(slot.tensor, nn.Parameter) else None
    if slot.source is not None:
        return slot.source
    if not slot.children or len(slot.digits) < len(slot.children):
        return None
    parts = {name: built(child) for name, child in slot.children.items()}
    if any(part is None for part in parts.values()):
        return None
    sources = {name: str(part) for name, part in parts.items()}
    if slot.sequential:
        all_parts = [sources.get(name, "nn.Identity()") for name in slot.sequential]
        return _sequential(all_parts)
    kind = "Module" if next(iter(slot.children.values())).tensor is None else "Parameter"
    if slot.is_list:
        return f"nn.{kind}List({_list(list(sources.values()))})"
    return f"nn.{kind}Dict({_dict(sources)})"


def reference(root: Slot, path: str) -> str:
    """The source that reaches a path from ``self``, where `root` is self's slot."""
    slot, text = root, "self"
    for part in path.removeprefix(root.path).lstrip(".").split("."):
        if part.isdigit():
            is_list = slot.is_list and built(slot) is not None
            by_number = slot is not root and (slot.sequential or is_list)
            text += f"[{int(part)}]" if by_number else f'["{part}"]'
        else:
            text += f".{part}"
        slot = slot.children.get(part) or Slot(part)
    return text


def walk(slot: Slot) -> Iterable[Slot]:
    """All slots, a parent before its children."""
    todo = [slot]
    while todo:
        slot = todo.pop()
        yield slot
        todo += reversed(slot.children.values())


def _stock(module: nn.Module, path: str) -> str:
    source = constructor(module)
    if source is None:
        raise UserError(f"{path}, a {type(module).__name__}, cannot be rebuilt from its attributes.")
    parameters = list(module.parameters())
    frozen = bool(parameters) and not any(p.requires_grad for p in parameters)
    return source + (".requires_grad_(False)" if frozen else "")


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), attribute)
    assert isinstance(tensor, Tensor)
    return tensor


def _sort(root: Slot, model: nn.Module) -> None:
    """Children in the order in which the model's own ``__init__`` made them."""
    for slot in walk(root):
        try:
            module = model.get_submodule(slot.path)
        except AttributeError:
            continue
        order = [*module._parameters, *module._buffers, *module._modules]
        place = {name: i for i, name in enumerate(order)}
        slot.children = dict(sorted(slot.children.items(), key=lambda c: place.get(c[0], len(order))))


def _check_names(root: Slot) -> None:
    for slot in walk(root):
        for name, child in slot.children.items():
            if not (name.isascii() and name.isdigit() and str(int(name)) == name):
                checked(name, f"{child.path!r} of the model")
            elif child.tensor is not None and (slot is root or not isinstance(child.tensor, nn.Parameter)):
                raise UserError(f"{child.path!r} of the model is named by a number; give it a name.")


def _parameter(tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad else ", requires_grad=False"
    return f"nn.Parameter({_empty(tensor)}{frozen})"


def _buffer(name: str, slot: Slot, prefix: str) -> str:
    assert slot.tensor is not None
    kept = "" if slot.persistent else ", persistent=False"
    return f'{prefix}.register_buffer("{name}", {_empty(slot.tensor)}{kept})'


def _empty(tensor: Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape)) or "()"
    dtype = "" if tensor.dtype is torch.float32 else f", dtype={tensor.dtype}"
    return f"torch.empty({sizes}{dtype})"


def _sequential(parts: list[str]) -> str:
    if len(parts) > 2 and len(set(parts)) == 1:
        return f"nn.Sequential(*[{parts[0]} for _ in range({len(parts)})])"
    return f"nn.Sequential({', '.join(parts)})"


def _list(parts: list[str]) -> str:
    if len(parts) > 1 and len(set(parts)) == 1:
        return f"[{parts[0]} for _ in range({len(parts)})]"
    return f"[{', '.join(parts)}]"


def _dict(parts: dict[str, str]) -> str:
    """``{"3": A(), "4": A(), "7": B()}``, runs of equal ones written as comprehensions."""
    runs: list[list[tuple[int, str]]] = []
    for name, part in parts.items():
        if runs and runs[-1][-1] == (int(name) - 1, part):
            runs[-1].append((int(name), part))
        else:
            runs.append([(int(name), part)])
    texts = []
    for run in runs:
        (first, part), (last, _) = run[0], run[-1]
        if len(run) > 1 and len(runs) == 1:
            return f"{{str(i): {part} for i in range({first}, {last + 1})}}"
        texts += [f'"{number}": {source}' for number, source in run]
    return "{" + ", ".join(texts) + "}"
