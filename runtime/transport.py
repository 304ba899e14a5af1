"""Point-to-point messages of tensors between workers, on torch.distributed.

A message is a header (sizes and strides) and the payload, sent apart and without blocking. Both ends know from
the program which dtype and how many elements to expect, so receives are posted early. The layout arrives as it
was sent, because a kernel may round otherwise on another layout. Tags name the message, so order never matters::

    sender     isend header ── isend payload ── goes on (a thread lets go of the tensor once it has arrived)
    receiver   irecv header, irecv payload (posted early) ── wait ── check ── a fresh tensor
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        self._reaper = _Reaper()

    def send(self, tensor: Tensor, expected: Expected, target: int, tag: int) -> None:
        """Starts to send a tensor and returns at once.

        Raises:
            ValueError: The tensor is not what the receiver expects.
            PeerError: The receiver of this message or of an earlier one is gone.
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
        whom = f"sending {expected.what} to rank {target}, which is gone"
        try:
            works = [dist.isend(header, target, tag=2 * tag), dist.isend(payload, target, tag=2 * tag + 1)]
        except RuntimeError as error:
            raise PeerError(whom) from error
        self._reaper.keep([w for w in works if w is not None], (header, payload), whom)

    def receive(self, expected: Expected, source: int, tag: int) -> Receipt:
        """Posts a receive.

        Raises:
            PeerError: The sender is gone.
        """
        header = torch.zeros(1 + 2 * _MAX_DIMS, dtype=torch.int64)
        payload = torch.empty(expected.numel, dtype=expected.dtype)
        try:
            works = [dist.irecv(header, source, tag=2 * tag), dist.irecv(payload, source, tag=2 * tag + 1)]
        except RuntimeError as error:
            raise PeerError(f"waiting for {expected.what} from rank {source}, which is gone") from error
        return Receipt(expected, source, header, payload, [w for w in works if w is not None])

    def finish(self) -> None:
        """Waits until everything sent has arrived.

        Raises:
            PeerError: A receiver is gone.
        """
        self._reaper.finish()


class _Reaper:
    """A thread that waits for sends in their order and lets go of their tensors.

    There is nothing to poll: a send's ``is_completed()`` stays False on gloo until someone has waited for it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[list[dist.Work], tuple[Tensor, ...], str] | threading.Event]
        self._queue = queue.SimpleQueue()
        self._failure: PeerError | None = None
        threading.Thread(target=self._run, name="dpart sends", daemon=True).start()

    def keep(self, works: list[dist.Work], tensors: tuple[Tensor, ...], whom: str) -> None:
        """Keeps the tensors until the works are done."""
        self._raise()
        self._queue.put((works, tensors, whom))

    def finish(self) -> None:
        """Waits until nothing is kept any more."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._wait(item[0], item[2])
            del item  # Or the tensors would live until the next message.

    def _wait(self, works: list[dist.Work], whom: str) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError:
            self._failure = self._failure or PeerError(whom)


@contextmanager
def together(whom: str) -> Iterator[None]:
    """Turns a connection that breaks during a collective into a `PeerError`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"waiting for {whom}, one of which is gone") from error


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if its elements fill its storage without gaps or overlap in any order of dimensions."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    return tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()
