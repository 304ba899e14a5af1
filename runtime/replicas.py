"""What replicas of a stage agree on after the flush: the sum of their gradients, and their buffers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 25 * 2**20


def sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Replaces every gradient by its sum over the replicas, in buckets.

    A parameter without a gradient on every replica keeps none; on some, the others count as zero.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        return
    has = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32)
    dist.all_reduce(has, group=group)
    used = [p for p, count in zip(trainable, has.tolist(), strict=True) if count]
    gradients = []
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view(gradient.shape))


def average_buffers(module: nn.Module, before: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Makes the replicas' buffers equal: floating ones are averaged, counters add up what each counted.

    Args:
        before: The buffers as they were before the step.
    """
    size = dist.get_world_size(group)
    for name, buffer in module.named_buffers():
        if not _any(not torch.equal(buffer, before[name]), group):
            continue
        if buffer.dtype.is_floating_point:
            dist.all_reduce(buffer, group=group)
            buffer /= size
        else:
            counted = buffer - before[name]
            dist.all_reduce(counted, group=group)
            buffer.copy_(before[name] + counted)


def _any(flag: bool, group: dist.ProcessGroup) -> bool:
    found = torch.tensor([int(flag)])
    dist.all_reduce(found, group=group)
    return bool(found.item())


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        fits = buckets and size + gradient.nbytes <= _BUCKET_BYTES and buckets[-1][0].dtype == gradient.dtype
        if fits:
            buckets[-1].append(gradient)
            size += gradient.nbytes
        else:
            buckets.append([gradient])
            size = gradient.nbytes
    return buckets
