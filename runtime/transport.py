"""Point-to-point messages of tensors between workers, on torch.distributed.

A message is a header (sizes and strides) and the payload, sent apart and without blocking. Both ends know from
the program which dtype and how many elements to expect, so receives are posted early. The layout arrives as it
was sent, because a kernel may round otherwise on another layout. Tags name the message, so order never matters::

    sender     isend header ── isend payload ── goes on
    receiver   irecv header, irecv payload (posted early) ── wait ── check ── a fresh tensor
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dpart.runtime.errors import PeerError

_MAX_DIMS = 16


@dataclass(frozen=True)
class Expected:
    """What a message must be.

    Attributes:
        what: For people, as in ``hidden`` or ``gradient of hidden``.
        shape: With the microbatch's rows.
    """

    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass
class Receipt:
    """A posted receive."""

    expected: Expected
    source: int
    header: Tensor
    payload: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """The tensor, once it is there.

        Raises:
            PeerError: The sender is gone, or sent something else.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(f"waiting for {self.expected.what} from rank {self.source}, which is gone") from error
        dims, *rest = self.header.tolist()
        shape, strides = tuple(rest[:dims]), tuple(rest[_MAX_DIMS : _MAX_DIMS + dims])
        if shape != self.expected.shape:
            raise PeerError(
                f"{self.expected.what} from rank {self.source} has shape {shape}, expected {self.expected.shape}"
            )
        return self.payload.as_strided(shape, strides)


class Transport:
    """This worker's sends and receives."""

    def __init__(self) -> None:
        self._sending: list[tuple[list[dist.Work], Tensor, Tensor, str]] = []

    def send(self, tensor: Tensor, expected: Expected, target: int, tag: int) -> None:
        """Starts to send a tensor and returns at once.

        Raises:
            ValueError: The tensor is not what the receiver expects.
        """
        if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
            raise ValueError(
                f"{expected.what} should be {expected.dtype} of shape {expected.shape}, "
                f"but the stage made {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        tensor = dense(tensor.detach())
        header = torch.zeros(1 + 2 * _MAX_DIMS, dtype=torch.int64)
        dims = tensor.dim()
        header[0] = dims
        header[1 : 1 + dims] = torch.tensor(tensor.shape, dtype=torch.int64)
        header[1 + _MAX_DIMS : 1 + _MAX_DIMS + dims] = torch.tensor(tensor.stride(), dtype=torch.int64)
        payload = tensor.as_strided((tensor.numel(),), (1,))
        self._reap()
        works = [dist.isend(header, target, tag=2 * tag), dist.isend(payload, target, tag=2 * tag + 1)]
        self._sending.append(([w for w in works if w is not None], header, payload, expected.what))

    def receive(self, expected: Expected, source: int, tag: int) -> Receipt:
        """Posts a receive."""
        header = torch.zeros(1 + 2 * _MAX_DIMS, dtype=torch.int64)
        payload = torch.empty(expected.numel, dtype=expected.dtype)
        works = [dist.irecv(header, source, tag=2 * tag), dist.irecv(payload, source, tag=2 * tag + 1)]
        return Receipt(expected, source, header, payload, [w for w in works if w is not None])

    def finish(self) -> None:
        """Waits until everything sent has arrived.

        Raises:
            PeerError: A receiver is gone.
        """
        for works, _, _, what in self._sending:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise PeerError(f"sending {what} to a rank which is gone") from error
        self._sending.clear()

    def _reap(self) -> None:
        self._sending = [s for s in self._sending if not all(w.is_completed() for w in s[0])]


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if its elements fill its storage without gaps or overlap in any order of dimensions."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    return tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()
