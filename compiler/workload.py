"""`Workload`: what a user's ``file.py:callable`` returns: a model, example inputs, and how its loss is made.

Everything downstream sees the model through `LossModel`, one function from the flat tensor leaves of a batch
to the scalar loss, so a loss is captured, profiled and placed like any other layer.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpart.runtime.callables import load_callable, user_fault
from dpart.runtime.errors import UserError


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        model: The module, or a callable without arguments that builds it.
        args: Example positional inputs of one batch; tensors have the batch as their first dimension.
        kwargs: Example keyword inputs.
        targets: What the loss gets after the model's output.
        loss: ``loss(output, *targets)``, the mean over the rows of the batch; None where the model returns
            its loss itself (a scalar, or an object with ``.loss``).
        batches: Called without arguments, gives the training batches: structures whose tensors, in order,
            are those of ``(args, kwargs, targets)``.
        name: For people; the model's class by default.
    """

    model: nn.Module | Callable[[], nn.Module]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()
    loss: Callable[..., Tensor] | None = None
    batches: Callable[[], Iterable[Any]] | None = None
    name: str | None = None

    def build(self, *, meta: bool = False) -> "LossModel":
        """The model with its loss, in train mode.

        Args:
            meta: Build it on the meta device (shapes without numbers), if it is yet to be built and can be built
                there; a model that is there already stays where it is.

        Raises:
            UserError: The workload does not hold a module or any input tensor.
        """
        if meta and not isinstance(self.model, nn.Module):
            built = None
            with contextlib.suppress(RuntimeError, NotImplementedError), torch.device("meta"):
                built = self.model()
            if built is not None:
                return replace(self, model=built, **self._on_meta()).build()
        try:
            model = self.model if isinstance(self.model, nn.Module) else self.model()
        except Exception as error:
            raise user_fault("Building the model failed", error) from error
        if not isinstance(model, nn.Module):
            raise UserError(f"Workload.model must be an nn.Module or build one, got {type(model).__qualname__}.")
        return LossModel(model.train(), self)

    def _on_meta(self) -> dict[str, Any]:
        parts = {"args": self.args, "kwargs": dict(self.kwargs), "targets": self.targets}
        moved: dict[str, Any] = pytree.tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, parts)
        return moved


class LossModel(nn.Module):
    """The flat tensor leaves of a batch in, the scalar loss out.

    Attributes:
        model: The user's module, under whose own names everything stands.
        input_names: A name for each leaf: the argument's, where it is a tensor.
        example: The leaves of the example batch.
        batch_dims: For each leaf, 0 if its first dimension is the batch, else None.
        is_meta: Whether the model is on the meta device: shapes without numbers, to be estimated and never run.
    """

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        super().__init__()
        self.model = model
        self.title = workload.name or type(model).__name__
        self._loss = workload.loss
        structure = (tuple(workload.args), dict(workload.kwargs), tuple(workload.targets))
        leaves, self._spec = pytree.tree_flatten(structure)
        self._leaves = tuple(None if isinstance(x, Tensor) else x for x in leaves)
        self._is_tensor = tuple(isinstance(x, Tensor) for x in leaves)
        self.example = tuple(x for x in leaves if isinstance(x, Tensor))
        if not self.example or self.example[0].dim() == 0:
            raise UserError(
                "The workload has no example inputs: give tensors whose first dimension is the batch, as in "
                "Workload(model, args=(x,), targets=(y,), loss=...)."
            )
        self.batch_size = self.example[0].shape[0]
        self.batch_dims = tuple(0 if x.dim() > 0 and x.shape[0] == self.batch_size else None for x in self.example)
        self.input_names = _input_names(model, workload, structure)
        self.is_meta = any(t.is_meta for t in (*self.example, *model.parameters(), *model.buffers()))

    def forward(self, *leaves: Tensor) -> Tensor:
        """The loss of one (micro)batch.

        Raises:
            UserError: What the model and its loss return is not a scalar tensor.
        """
        rest = iter(leaves)
        full = [next(rest) if tensor else x for tensor, x in zip(self._is_tensor, self._leaves, strict=True)]
        args, kwargs, targets = pytree.tree_unflatten(full, self._spec)
        output = self.model(*args, **kwargs)
        loss = self._loss(output, *targets) if self._loss is not None else getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"The loss of {self.title} must be one number (a 0-dimensional tensor), got {what}; "
                "pass loss=..., a function of the model's output and the targets."
            )
        return loss

    def rows(self, count: int) -> tuple[Tensor, ...]:
        """The example's first `count` rows; where it has fewer, its rows over again."""
        repeats = -(-count // self.batch_size)
        return tuple(
            x if dim is None else torch.cat([x] * repeats)[:count].clone()
            for x, dim in zip(self.example, self.batch_dims, strict=True)
        )


def as_workload(value: Any, source: str) -> Workload:
    """What a user's callable returned, as a `Workload`: that itself, or a ``(model, args)`` pair."""
    if isinstance(value, Workload):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        model, args = value
        return Workload(model, args if isinstance(args, tuple) else (args,))
    raise UserError(f"{source} must return a dpart.Workload or a (model, args) pair, got {type(value).__qualname__}.")


def load_workload(spec: str) -> Workload:
    """The workload that ``file.py:callable`` or ``package.module:callable`` returns.

    Raises:
        UserError: There is no such file, module or callable, or it returns something else.
    """
    function = load_callable(spec)
    try:
        made = function()
    except Exception as error:
        raise user_fault(f"{spec} failed", error) from error
    return as_workload(made, spec)


def _input_names(model: nn.Module, workload: Workload, structure: Any) -> tuple[str, ...]:
    names: list[str] = []
    try:
        bound = inspect.signature(model.forward).bind(*workload.args, **workload.kwargs)
        heads = [n for n, v in bound.arguments.items() if not isinstance(v, dict)]
    except (TypeError, ValueError):
        heads = []
    for path, leaf in pytree.tree_flatten_with_path(structure)[0]:
        if not isinstance(leaf, Tensor):
            continue
        part, *inner = [getattr(key, "idx", getattr(key, "key", None)) for key in path]
        if part == 0:
            position = int(str(inner[0]))
            head = heads[position] if position < len(heads) else f"input_{position}"
        elif part == 1:
            head = str(inner[0])
        else:
            head = "target" if len(workload.targets) == 1 else f"target_{inner[0]}"
        name = "_".join([head, *map(str, inner[1:])])
        name = "".join(c if c.isalnum() else "_" for c in name).strip("_")
        while not name.isidentifier() or name in names:
            name = f"input_{name}" if not name.isidentifier() else f"{name}_{len(names)}"
        names.append(name)
    return tuple(names)
