"""The check before a capture is accepted: the same loss and gradients as eager, on the example inputs."""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from dpart.compiler.workload import LossModel
from dpart.runtime.errors import UserError
from dpart.runtime.randomness import KeyedRandomness

TOLERANCE = 1e-5
"""Largest accepted difference, relative to the largest gradient. Most captures are equal to the last bit; another
kernel chosen for the same mathematics (a mask in place of a causal flag) is not."""


def accept(model: LossModel, module: fx.GraphModule, leaves: tuple[Tensor, ...]) -> None:
    """Compares the captured graph with the eager model.

    Raises:
        UserError: They differ; the message names the worst parameter.
    """
    eager_loss, eager = loss_and_gradients(model, model, leaves)
    loss, gradients = loss_and_gradients(model, module, leaves)
    scale = max([g.abs().max().item() for g in eager.values() if g.numel()] + [abs(eager_loss.item()), 1e-30])
    problems = [("the loss", (loss - eager_loss).abs().item())]
    for name, gradient in eager.items():
        if (name in gradients) is False:
            raise UserError(f"The captured {model.title} gives {name} no gradient, and eager does.")
        problems.append((name, (gradients[name] - gradient).abs().max().item() if gradient.numel() else 0.0))
    if extra := sorted(set(gradients) - set(eager)):
        raise UserError(f"The captured {model.title} gives a gradient to {extra[0]}, and eager gives none.")
    name, worst = max(problems, key=lambda p: p[1] if p[1] == p[1] else float("inf"))
    if not worst <= TOLERANCE * scale:
        raise UserError(
            f"The captured {model.title} does not compute what eager computes: {name} differs by {worst:.3g} "
            f"(the largest gradient is {scale:.3g}). Please report this model."
        )


def loss_and_gradients(
    model: LossModel, run: Callable[..., Tensor], leaves: tuple[Tensor, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One forward and backward under fixed randomness; buffers and earlier gradients are left as they were."""
    named = dict(model.model.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    wanted = [(n, p) for n, p in named.items() if p.requires_grad]
    randomness = KeyedRandomness(seed=0, step=0, microbatch=0, remember=True)
    with randomness:
        loss = run(*(leaf.clone() for leaf in leaves))
    if not loss.requires_grad:
        raise UserError(f"The loss of {model.title} depends on no trainable parameter.")
    with randomness.replay():  # Activation checkpointing runs parts of the forward again.
        found = torch.autograd.grad(loss, [p for _, p in wanted], allow_unused=True)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return loss.detach(), {n: g for (n, _), g in zip(wanted, found, strict=True) if g is not None}
