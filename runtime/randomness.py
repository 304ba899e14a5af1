"""Random numbers that do not depend on how the model is split.

Before every random call of a model torch's generator is seeded from (seed, step, microbatch, index of the call
among the unsplit model's random calls). A stage that makes calls 3 and 4 of the model draws the numbers that
the unsplit model draws in its calls 3 and 4.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dpart.runtime.errors import UserError

_DROPOUTS = frozenset(
    {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
        torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout,
    }
)  # fmt: skip
_ALWAYS = frozenset(
    {
        torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.normal, torch.multinomial,
        torch.rand_like, torch.randn_like, torch.randint_like, torch.poisson, F.gumbel_softmax,
        torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.normal_, torch.Tensor.uniform_,
        torch.Tensor.random_, torch.Tensor.exponential_, torch.Tensor.geometric_, torch.Tensor.cauchy_,
        torch.Tensor.log_normal_, torch.Tensor.multinomial,
    }
)  # fmt: skip


def is_random_call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of torch with these arguments draws random numbers."""
    if function in _ALWAYS:
        return True
    if function in _DROPOUTS:
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        probability, training = given.get("p", 0.5), given.get("training", given.get("train", True))
        return bool(training) and (not isinstance(probability, int | float) or probability > 0)
    if function is F.scaled_dot_product_attention:
        probability = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        return bool(probability)
    return False


class KeyedRandomness(TorchFunctionMode):
    """Seeds torch before every random call made inside it; torch's own state is restored at the end.

    Args:
        seed: Of the run.
        calls: For each random call that will be made, in order, its index in the unsplit model; None counts
            0, 1, 2, ..., as the unsplit model does.
    """

    def __init__(self, *, seed: int, step: int, microbatch: int, calls: Sequence[int] | None = None) -> None:
        super().__init__()
        self._key = f"{seed}/{step}/{microbatch}"
        self._calls = calls
        self._made = 0

    def __enter__(self) -> "KeyedRandomness":
        self._fork = torch.random.fork_rng()
        self._fork.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fork.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random_call(func, args, kwargs):
            torch.manual_seed(self._next_seed())
        return func(*args, **kwargs)

    def _next_seed(self) -> int:
        if self._calls is None:
            index = self._made
        elif self._made < len(self._calls):
            index = self._calls[self._made]
        else:
            raise UserError(
                f"The stage makes more random calls than the {len(self._calls)} its program lists; "
                "emit the build again."
            )
        self._made += 1
        digest = hashlib.blake2b(f"{self._key}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
