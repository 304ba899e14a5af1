"""The entrance of a stage: where a received value starts to require a gradient, and where that gradient ends.

A leaf's ``.grad`` would do, but autograd rewrites it in the leaf's own layout. The stage before would then sum it
in another order than the unsplit model does, in which the gradient stays as the kernels laid it out.
"""

from typing import Any

import torch
from torch import Tensor


class Entrance:
    """One received value of one microbatch.

    Attributes:
        value: The tensor to compute with; it requires a gradient.
        gradient: What the backward summed for it, laid out as it came; None before, or if nothing used it.
    """

    def __init__(self, received: Tensor) -> None:
        self.gradient: Tensor | None = None
        self.value: Tensor = _Keep.apply(received.requires_grad_(), self)  # type: ignore[no-untyped-call]


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance = entrance
        return received.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        ctx.entrance.gradient = gradients[0]
        return None, None
