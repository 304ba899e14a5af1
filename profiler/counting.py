"""Counts what a computation asks of a device: every kernel with its operations and the bytes it moves.

A dispatch mode sees each ATen operation, of the forward and of the backward, after autograd has taken part; on fake
tensors (shapes without numbers) as well as on real ones, and it counts the same on both. Views cost nothing.

Operations are counted where they can matter: matrix products, convolutions and attention, two for a multiplication
with its addition. A causal attention has half of them. Bytes are those of all tensors read and written, each once; a
look-up reads the rows that it takes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Kind = Literal["product", "convolution", "attention", "memory"]

_FREE = frozenset({
    "empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided", "detach", "alias",
    "_unsafe_view", "_reshape_alias", "lift_fresh", "device", "dim", "sym_size", "_local_scalar_dense", "set_",
})  # fmt: skip
_OVERWRITES = frozenset({"copy_", "zero_", "fill_", "bernoulli_", "normal_", "uniform_", "random_"})
_LOOK_UPS = frozenset({"embedding", "index", "index_select", "gather"})
_NEVER_READ = {"nll_loss_forward": 0, "nll_loss2d_forward": 0, "nll_loss_backward": 1, "nll_loss2d_backward": 1}


@dataclass(frozen=True)
class Kernel:
    """One operation on the device.

    Attributes:
        name: ATen's name for it.
        dtype: Of what it multiplies, as in ``bfloat16``; of its first tensor where it does not.
        flops: Of products, convolutions and attention; else 0.
        moved_bytes: Read and written.
    """

    name: str
    kind: Kind
    dtype: str
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class Counts:
    """The kernels of one layer.

    Attributes:
        forward: Of its forward.
        backward: Of its whole backward; gradients of parameters are added to those that are there.
        input_backward: Of the backward that gives the gradients of its inputs alone.
        stash_bytes: What autograd saves for the backward beyond parameters; each storage once.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    input_backward: tuple[Kernel, ...]
    stash_bytes: int


class KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the kernels of what runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, or the ones it stands for, and notes it."""
        kwargs = kwargs or {}
        if func._overloadpacket not in flop_registry and func is not torch.ops.prim.device.default:
            with self:
                parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
        result = func(*args, **kwargs)
        kernel = _kernel(func, args, kwargs, result)
        if kernel is not None:
            self.kernels.append(kernel)
        return result


def count(run: Callable[[], Sequence[Any]], inputs: Sequence[Tensor], state: Mapping[str, Tensor]) -> Counts:
    """Counts one forward and backward.

    Args:
        run: The forward; gives the layer's outputs.
        inputs: Those of its inputs whose gradients are wanted.
        state: Its parameters and buffers, which are no stash; those that need a gradient get one. `run` may
            add to it.
    """
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(_storage(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), KernelCounter() as forward:
        results = run()
    own = {_storage(t) for t in state.values()}
    parameters = [t for t in state.values() if t.requires_grad]
    stash_bytes = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own)
    roots = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if not roots:
        return Counts(tuple(forward.kernels), (), (), stash_bytes)
    gradients = [torch.empty_like(root) for root in roots]
    whole = _backward(roots, [*inputs, *parameters], gradients)
    sums = [_accumulation(p) for p in parameters]
    return Counts(tuple(forward.kernels), (*whole, *sums), _backward(roots, inputs, gradients), stash_bytes)


def _backward(roots: list[Tensor], wanted: Sequence[Tensor], gradients: list[Tensor]) -> tuple[Kernel, ...]:
    if not wanted:
        return ()
    with KernelCounter() as counter:
        torch.autograd.grad(roots, list(wanted), gradients, retain_graph=True, allow_unused=True)
    return tuple(counter.kernels)


def _accumulation(parameter: Tensor) -> Kernel:
    return Kernel("add_", "memory", _dtype(parameter), 0, 3 * _bytes(parameter))


def _kernel(func: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
    name = func._schema.name.split("::")[-1]
    if name in _FREE or func.is_view:
        return None
    read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    written = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    if not read and not written:
        return None
    moved = sum(map(_bytes, read)) + sum(map(_bytes, written))
    if name in _OVERWRITES:
        moved -= _bytes(read[0])
    elif name in _LOOK_UPS:
        moved -= max(0, _bytes(read[0]) - _bytes(written[0]))
    elif name in _NEVER_READ:
        moved -= _bytes(read[_NEVER_READ[name]])
    flops, kind = _flops(func, name, args, kwargs, result)
    return Kernel(name, kind, _dtype((read or written)[-1 if name == "addmm" else 0]), flops, moved)


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> tuple[int, Kind]:
    if name.startswith("_scaled_dot_product"):
        return _attention(name, args, kwargs), "attention"
    if name == "_grouped_mm":
        a, b = args[:2]
        rows, columns = (a.numel() // a.shape[-1], b.shape[-1]) if a.dim() == 2 else (a.shape[1], b.shape[1])
        return 2 * rows * a.shape[-1] * columns, "product"
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0, "memory"
    return int(formula(*args, **kwargs, out_val=result)), "convolution" if "conv" in name else "product"


def _attention(name: str, args: Any, kwargs: Any) -> int:
    """Two products in the forward, five in the backward, which computes the scores again."""
    backward = name.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    width, width_value = query.shape[-1], value.shape[-1]
    widths = 3 * width + 2 * width_value if backward else width + width_value
    flops = 2 * (query.numel() // width) * key.shape[-2] * widths
    arguments = torch.ops.aten.__getattr__(name).default._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return int(flops // 2 if given.get("is_causal") else flops)


def _bytes(tensor: Tensor) -> int:
    """What of it is touched: an expanded tensor has less than its sizes say."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
