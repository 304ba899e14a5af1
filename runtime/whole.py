"""The unsplit model over the same microbatches in one process: what a split run is compared with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpart.runtime.microbatch import split_batch
from dpart.runtime.randomness import KeyedRandomness


class WholeModel:
    """Runs steps of a function from a microbatch's inputs to its scalar loss.

    Args:
        loss: The model with its loss; gradients accumulate in its parameters.
        batch_dims: For each input, the dimension of the rows, or None.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        batch_dims: Sequence[int | None],
        microbatch_size: int,
        *,
        seed: int = 0,
    ) -> None:
        self._loss, self._batch_dims, self._size, self._seed = loss, tuple(batch_dims), microbatch_size, seed

    def step(self, leaves: Sequence[Tensor], step: int) -> float:
        """Forward and backward of one batch; returns its loss, and leaves gradients in the parameters."""
        total = 0.0
        for number, part in enumerate(split_batch(leaves, self._batch_dims, self._size)):
            randomness = KeyedRandomness(seed=self._seed, step=step, microbatch=number, remember=True)
            with randomness:
                # Copies: what the model does to its inputs in place must not reach the batch.
                loss = self._loss(*(leaf.clone() for leaf in part.leaves))
            with randomness.replay():
                torch.autograd.backward(loss, torch.full_like(loss, part.weight))
            total += loss.item() * part.weight
        return total
