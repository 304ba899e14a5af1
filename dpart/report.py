"""`Report`: how far a split model is from the whole one, and whether that is allowed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

REPLICA_TOLERANCE = 1e-6
"""Relative difference allowed where replicas add gradients up in another order."""


@dataclass(frozen=True)
class Comparison:
    """One kind of number, compared.

    Attributes:
        what: For people.
        count: Tensors compared.
        absolute: The largest difference; NaN or infinite if one side has what the other lacks.
        relative: That, relative to the largest number of this kind in the whole model.
        worst: The name of the tensor where it is; empty if all are equal.
    """

    what: str
    count: int
    absolute: float
    relative: float
    worst: str

    @staticmethod
    def of(what: str, whole: Mapping[str, Tensor], split: Iterable[tuple[str, Tensor]]) -> "Comparison":
        """Compares tensors by name; where one side has none, zeros stand in for it."""
        found = list(split)
        names = {name for name, _ in found}
        differences = [(name, _distance(whole.get(name), tensor)) for name, tensor in found]
        differences += [(name, _largest(tensor)) for name, tensor in whole.items() if name not in names]
        worst, absolute = max(differences, key=lambda d: math.inf if math.isnan(d[1]) else d[1], default=("", 0.0))
        scale = max(map(_largest, whole.values()), default=0.0)
        relative = absolute / scale if scale > 0 else (0.0 if absolute == 0 else math.inf)
        return Comparison(what, len(names | whole.keys()), absolute, relative, worst if absolute != 0 else "")


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        replicas: Of each stage.
        optimizer: That took the steps.
        comparisons: Loss and gradients of every step, then parameters and buffers.
    """

    model: str
    replicas: tuple[int, ...]
    steps: int
    optimizer: str
    comparisons: tuple[Comparison, ...]

    @property
    def exact(self) -> bool:
        """Whether every number is the same to the last bit."""
        return all(c.absolute == 0 for c in self.comparisons)

    @property
    def agrees(self) -> bool:
        """Whether the split model computes what the whole one does, as near as it must."""
        if max(self.replicas) == 1:
            return self.exact
        return all(c.relative <= REPLICA_TOLERANCE for c in self.comparisons)

    @property
    def verdict(self) -> str:
        """One sentence."""
        tensors = sum(c.count for c in self.comparisons)
        if self.exact:
            return f"Exactly equal: all {tensors} losses, gradients, parameters and buffers, to the last bit."
        worst = max(self.comparisons, key=lambda c: math.inf if math.isnan(c.relative) else c.relative)
        if self.agrees:
            return (
                f"Equal within {worst.relative:.1e} relative, and {REPLICA_TOLERANCE:.0e} is allowed: "
                "replicas add gradients up in another order."
            )
        allowed = "nothing" if max(self.replicas) == 1 else f"{REPLICA_TOLERANCE:.0e}"
        return (
            f"NOT equal: {worst.what} differ by {worst.relative:.1e} relative in {worst.worst}; {allowed} is allowed."
        )

    def table(self) -> RenderableType:
        """All comparisons and the verdict; a console prints it."""
        split = "-".join(map(str, self.replicas))
        title = f"{self.model}: whole in one process, and split over {split} workers; {self.optimizer}"
        table = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("compared")
        for column in ("tensors", "largest difference", "relative"):
            table.add_column(column, justify="right")
        table.add_column("in", overflow="fold")
        for c in self.comparisons:
            table.add_row(c.what, str(c.count), _number(c.absolute), _number(c.relative), escape(c.worst))
        return Group(table, Text(self.verdict))


def _distance(whole: Tensor | None, split: Tensor) -> float:
    if whole is None:
        return _largest(split)
    if whole.shape != split.shape or whole.dtype != split.dtype:
        return math.inf
    return _largest(whole.double() - split.double())


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def _number(number: float) -> str:
    return "0" if number == 0 else f"{number:.2e}"
