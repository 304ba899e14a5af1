"""`KeyedRandomness`: random numbers that depend on what is computed, not on where or when.

Before every random call torch's generator is seeded from (seed, step, microbatch, index of the call), where the
index counts the random calls of the *unsplit* model. A stage knows the indices of its own calls, so a dropout
mask is the same whether the model runs whole or in pieces::

    unsplit   dropout 0   dropout 1   randn 2   dropout 3
    stage 0   dropout 0   dropout 1
    stage 1                           randn 2   dropout 3
"""

import hashlib
import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ALWAYS = frozenset({
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_",
    "normal", "normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_",
    "multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "gumbel_softmax",
    "fractional_max_pool2d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d",
    "fractional_max_pool3d_with_indices", "trunc_normal_", "xavier_uniform_", "xavier_normal_",
    "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_",
})  # fmt: skip

# Random only with a probability above 0 and in training. The names of the arguments, for those built in C++.
_DROPOUT = ("input", "p", "training")
_CONDITIONAL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout"), _DROPOUT),
    **dict.fromkeys(("feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"), _DROPOUT),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "native_dropout"), _DROPOUT),
    **dict.fromkeys(("rrelu", "rrelu_"), ("input", "lower", "upper", "training")),
    "rrelu_with_noise": ("input", "noise", "lower", "upper", "training"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p"),
    "multi_head_attention_forward": (),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ()),
}


def is_random_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether calling `func` so draws random numbers (a dropout of 0, or one out of training, does not)."""
    name = _name(func)
    if name in _CONDITIONAL:
        given = _named(func, name, args, kwargs)
        chances = [given[key] for key in ("p", "dropout_p", "dropout") if key in given]
        modes = [given[key] for key in ("training", "train") if key in given]
        return all(chance != 0 for chance in chances) and all(mode is not False for mode in modes)
    if isinstance(func, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in func.tags
    return name in _ALWAYS


def _name(func: Callable[..., Any]) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.split("::")[-1]
    return getattr(func, "__name__", "")


def _named(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments by name, defaults included where they decide."""
    if isinstance(func, torch._ops.OpOverload):
        names: Sequence[str] = [argument.name for argument in func._schema.arguments]
        defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    if inspect.isfunction(func):
        bound = inspect.signature(func).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        # (input, hx, params, has_biases, num_layers, dropout, train, ...), with batch_sizes second where packed.
        start = 5 if len(args) > 3 and isinstance(args[3], bool) else 6
        return {**dict(zip(("dropout", "train"), args[start : start + 2], strict=False)), **kwargs}
    default = {"dropout_p": 0.0} if "dropout_p" in _CONDITIONAL[name] else {}
    return {**default, **dict(zip(_CONDITIONAL[name], args, strict=False)), **kwargs}


class KeyedRandomness(TorchFunctionMode):
    """Seeds torch's generator before every random call made inside; restores its state on leaving.

    Attributes:
        num_calls: Random calls made so far.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        microbatch: int,
        calls: Sequence[int] | None = None,
        *,
        remember: bool = False,
    ) -> None:
        """
        Args:
            seed: The user's.
            step: Of the run, from 0.
            microbatch: Of the step, from 0.
            calls: The index of each random call to come, in order; 0, 1, 2, ... by default.
            remember: Keep what `replay` needs.
        """
        super().__init__()
        self._key = (seed, step, microbatch)
        self._calls = calls
        self._indices: dict[bytes, int] | None = {} if remember else None
        self._before: torch.Tensor | None = None
        self.num_calls = 0

    def __enter__(self) -> "KeyedRandomness":
        self._before = torch.get_rng_state()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._before is not None:
            torch.set_rng_state(self._before)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random_call(func, args, kwargs):
            index = self._next(func)
            if self._indices is not None:
                self._indices[_state()] = index
            self.reseed(index)
        return func(*args, **kwargs)

    def reseed(self, index: int) -> None:
        """Seeds torch's generators for random call `index` of this microbatch."""
        seed = mixed_seed(*self._key, index)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)

    def replay(self) -> "Replay":
        """For the backward: gives calls that activation checkpointing repeats the numbers they had."""
        assert self._indices is not None, "made without remember=True"
        return Replay(self, self._indices)

    def _next(self, func: Any) -> int:
        position, self.num_calls = self.num_calls, self.num_calls + 1
        if self._calls is None:
            return position
        if position >= len(self._calls):
            raise RuntimeError(
                f"{_name(func)} is random call {position + 1} of this stage, and its program lists "
                f"{len(self._calls)}; emit the build again."
            )
        return self._calls[position]


class Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recognises a repeated random call by the generator's state, which checkpointing restores before it.

    It watches kernels and not functions, because ``torch.autograd.backward`` is itself a function that modes
    intercept: one of the other kind is set aside while the backward runs.
    """

    def __init__(self, randomness: KeyedRandomness, indices: Mapping[bytes, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._randomness = randomness
        self._indices = indices

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._indices and torch.Tag.nondeterministic_seeded in func.tags:
            index = self._indices.get(_state())
            if index is not None:
                self._randomness.reseed(index)
        return func(*args, **(kwargs or {}))


def mixed_seed(*key: int) -> int:
    """63 bits that change altogether when any number of the key changes."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _state() -> bytes:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).digest()
