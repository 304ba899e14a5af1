"""How a batch is cut into microbatches: by rows, the last one smaller, none empty."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dpart.runtime.errors import UserError
from dpart.runtime.program import Tensor as Input


@dataclass(frozen=True)
class Microbatch:
    """Rows of a batch.

    Attributes:
        leaves: The inputs' rows; inputs without a batch dimension whole.
        rows: How many.
        weight: Their share of the batch, by which the loss counts.
    """

    leaves: tuple[Tensor, ...]
    rows: int
    weight: float


def batch_rows(leaves: Sequence[Tensor], batch_dims: Sequence[int | None]) -> int:
    """Rows of a batch: the size of its inputs' batch dimension.

    Raises:
        UserError: Inputs disagree, or there are no rows.
    """
    counts = {x.shape[d] for x, d in zip(leaves, batch_dims, strict=True) if d is not None}
    if len(counts) != 1 or 0 in counts:
        raise UserError(f"The inputs of a batch must have one number of rows and at least one, got {sorted(counts)}.")
    return counts.pop()


def split_batch(
    leaves: Sequence[Tensor], batch_dims: Sequence[int | None], microbatch_size: int
) -> tuple[Microbatch, ...]:
    """The microbatches of a batch, `microbatch_size` rows each and the rest in the last one."""
    rows = batch_rows(leaves, batch_dims)
    found = []
    for start in range(0, rows, microbatch_size):
        count = min(microbatch_size, rows - start)
        part = tuple(x if d is None else x.narrow(d, start, count) for x, d in zip(leaves, batch_dims, strict=True))
        found.append(Microbatch(part, count, count / rows))
    return tuple(found)


def check_batch(leaves: Sequence[Tensor], inputs: Sequence[Input]) -> None:
    """Compares a batch with the program's inputs: number, dtype, and shape but for the rows.

    Raises:
        UserError: It does not fit; all faults are listed.
    """
    if len(leaves) != len(inputs):
        names = ", ".join(i.name for i in inputs)
        raise UserError(f"A batch must have {len(inputs)} tensors ({names}), got {len(leaves)}.")
    faults = []
    for leaf, wanted in zip(leaves, inputs, strict=True):
        dtype = str(leaf.dtype).removeprefix("torch.")
        if dtype != wanted.dtype:
            faults.append(f"{wanted.name} must be {wanted.dtype}, got {dtype}")
        if _without(leaf.shape, wanted.batch_dim) != _without(wanted.shape, wanted.batch_dim):
            shape = tuple("rows" if d == wanted.batch_dim else n for d, n in enumerate(wanted.shape))
            faults.append(f"{wanted.name} must have shape {shape}, got {tuple(leaf.shape)}")
    if faults:
        raise UserError("A batch does not fit the model: " + "; ".join(faults) + ".")


def _without(shape: Sequence[int], dim: int | None) -> list[int]:
    return [n for d, n in enumerate(shape) if d != dim] + [len(shape)]
