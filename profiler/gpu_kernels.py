"""What a GPU runs where torch chooses by device: attention and dropout as one kernel each.

Estimates for a GPU are counted on the meta device, where torch would take both apart into what any device can do.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ATEN = torch.ops.aten


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention: the flash kernel where there is one, else the memory-efficient one."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and half and query.dim() == 4:
        flash = _ATEN._scaled_dot_product_flash_attention
        result: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return result
    if query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(query.dtype) if attn_mask.dtype is torch.bool else attn_mask
        bias = bias.expand(*query.shape[:3], key.shape[2])
    efficient = _ATEN._scaled_dot_product_efficient_attention
    result = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return result


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout with its mask in bytes; nothing at all where nothing is dropped."""
    if p == 0 or not training:
        return input
    result: Tensor = torch.native_dropout(input, p, True)[0]
    return result


def on_gpu(target: Any) -> Any:
    """What a GPU runs for a function or module: itself, but for the two above."""
    if target is F.scaled_dot_product_attention:
        return attention
    if target is F.dropout:
        return dropout
    if type(target) is nn.Dropout:
        return lambda input: dropout(input, target.p, target.training)
    return target
