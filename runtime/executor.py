"""The executor: one worker walks its row of the schedule.

A forward takes the stage's inputs from the batch or from channels, runs the module, and passes on what later
stages use. A backward starts from what later stages have summed, lets autograd add this stage's part, and
passes the sums on (see `program` for the chain). `torch.autograd.backward` gets leaves as roots too: the engine
adds a root's gradient before any other contribution, which is the order of the unsplit model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpart.runtime.check import check_schedule, program_edges
from dpart.runtime.entrance import Entrance
from dpart.runtime.errors import PeerError
from dpart.runtime.microbatch import Microbatch, split_batch
from dpart.runtime.program import Channel, Program, SharedParameter
from dpart.runtime.randomness import KeyedRandomness
from dpart.runtime.replicas import average_buffers, sum_gradients
from dpart.runtime.schedule import SCHEDULES, Action, Phase, Replica
from dpart.runtime.transport import Expected, Receipt, Transport, together

_AHEAD = 3
"""Actions ahead of the current one whose receives are posted."""


@dataclass
class _Stash:
    """What a microbatch's backward needs of its forward."""

    values: dict[str, Tensor]
    entrances: dict[str, Entrance]
    loss: Tensor | None = None


@dataclass(frozen=True)
class Message:
    """One tensor on its way in one direction.

    Attributes:
        number: Unique among all channels and shared parameters, in each direction.
        peer: The stage at the other end.
    """

    name: str
    number: int
    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None

    def expected(self, rows: int, size: int, what: str) -> Expected:
        """The tensor for a microbatch of `rows` rows, its sizes being given for `size`."""
        shape = tuple(n * rows // size if d == self.batch_dim else n for d, n in enumerate(self.shape))
        return Expected(what, shape, self.dtype)


@dataclass(frozen=True)
class _Tables:
    """The messages of one stage, from the program: both ends derive theirs from the same entries."""

    receives: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()
    gradient_receives: tuple[Message, ...] = ()
    gradient_sends: tuple[Message, ...] = ()
    parameter_receives: tuple[Message, ...] = ()
    parameter_sends: tuple[Message, ...] = ()


def _tables(program: Program, stage: int, module: nn.Module) -> _Tables:
    def message(number: int, channel: Channel, peer: int) -> Message:
        t = channel.tensor
        return Message(t.name, number, peer, t.shape, getattr(torch, t.dtype), t.batch_dim)

    into = [(i, c) for i, c in enumerate(program.channels) if c.target == stage]
    out = [(i, c) for i, c in enumerate(program.channels) if c.source == stage]
    later: list[Message] = []
    earlier: list[Message] = []
    number = len(program.channels)
    for shared in program.shared_parameters:
        for position in range(1, len(shared.stages)):
            first, second = shared.stages[position - 1], shared.stages[position]
            if stage in (first, second):
                name = _name(shared, stage)
                parameter = module.get_parameter(name)
                peer = second if stage == first else first
                entry = Message(name, number, peer, tuple(parameter.shape), parameter.dtype, None)
                (later if stage == first else earlier).append(entry)
            number += 1
    return _Tables(
        receives=tuple(message(i, c, c.source) for i, c in into),
        sends=tuple(message(i, c, c.target) for i, c in out),
        gradient_receives=tuple(message(i, c, c.target) for i, c in out if c.differentiable),
        gradient_sends=tuple(message(i, c, c.source) for i, c in into if c.differentiable),
        parameter_receives=tuple(later),
        parameter_sends=tuple(earlier),
    )


def _name(shared: SharedParameter, stage: int) -> str:
    return shared.names[shared.stages.index(stage)]


@dataclass
class Executor:
    """Runs the steps of one worker.

    Attributes:
        program: The whole run.
        rank: Of this worker.
        module: Its stage's module, with weights.
        seed: Of dropout and other random calls.
        doing: What it is doing, for messages.
    """

    program: Program
    rank: int
    module: nn.Module
    seed: int = 0
    doing: str = "starting"
    _transport: Transport = field(default_factory=Transport)
    _stashes: dict[int, _Stash] = field(default_factory=dict)
    _posted: dict[tuple[Phase, int, str], Receipt] = field(default_factory=dict)
    _losses: dict[int, float] = field(default_factory=dict)
    _rows: dict[int, tuple[Action, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stage, self.replica = self.program.workers[self.rank]
        self._first_rank = [self.program.workers.index((s, 0)) for s in range(len(self.program.stages))]
        self._num_replicas = [s.num_replicas for s in self.program.stages]
        self._own = self.program.stages[self.stage]
        self._tables = _tables(self.program, self.stage, self.module)
        self._num_messages = len(self.program.channels) + sum(len(s.stages) for s in self.program.shared_parameters)
        self._position = {tensor.name: i for i, tensor in enumerate(self.program.inputs)}
        self._group = self._replica_group()
        self._dispatch = {Phase.FORWARD: self._forward, Phase.BACKWARD: self._backward}

    @property
    def where(self) -> str:
        """Stage and replica, for messages."""
        return f"stage {self.stage}, replica {self.replica}"

    def step(self, leaves: Sequence[Tensor], step: int) -> float:
        """Forward and backward of one batch; gradients are complete afterwards, equal on all replicas.

        Returns:
            The loss of the whole batch, the same on every rank.
        """
        batch_dims = [tensor.batch_dim for tensor in self.program.inputs]
        self._microbatches = split_batch(leaves, batch_dims, self.program.microbatch_size)
        self._step = step
        self._losses.clear()
        buffers = {n: b.clone() for n, b in self.module.named_buffers()} if self._group is not None else {}
        actions = self._row(len(self._microbatches))
        for i, action in enumerate(actions):
            for ahead in actions[i : i + 1 + _AHEAD]:
                self._post(ahead)
            phase = "forward" if action.phase is Phase.FORWARD else "backward"
            self.doing = f"microbatch {action.microbatch}, {phase}"
            self._dispatch[action.phase](action.microbatch)
        self.doing = "the gradient all-reduce"
        if self._group is not None:
            with together("its replicas"):
                sum_gradients(self.module, self._group)
                average_buffers(self.module, buffers, self._group)
        self._return_shared()
        self.doing = "the end of the step"
        self._transport.finish()
        return self._total_loss()

    def _row(self, num_microbatches: int) -> tuple[Action, ...]:
        if num_microbatches not in self._rows:
            schedule = SCHEDULES[self.program.schedule](self._num_replicas, num_microbatches)
            check_schedule(schedule, self._num_replicas, num_microbatches, *program_edges(self.program))
            self._rows[num_microbatches] = schedule.rows[Replica(self.stage, self.replica)]
        return self._rows[num_microbatches]

    def _post(self, action: Action) -> None:
        m = action.microbatch
        if action.phase is Phase.FORWARD:
            self._receive(self._tables.receives, action.phase, m, "{}")
        else:
            self._receive(self._tables.gradient_receives, action.phase, m, "gradient of {}")
            self._receive(self._tables.parameter_receives, action.phase, m, "gradient of {}")

    def _receive(self, messages: Sequence[Message], phase: Phase, microbatch: int, form: str) -> None:
        for message in messages:
            key = (phase, microbatch, message.name)
            if key not in self._posted:
                expected = self._expected(message, microbatch, form.format(message.name))
                source = self._rank(message.peer, microbatch)
                self._posted[key] = self._transport.receive(expected, source, self._tag(message, phase, microbatch))

    def _forward(self, microbatch: int) -> None:
        part, values, arguments = self._microbatches[microbatch], {}, []
        for message in self._tables.receives:
            values[message.name] = self._wait(Phase.FORWARD, microbatch, message)
        entrances = {m.name: Entrance(values[m.name]) for m in self._tables.gradient_sends}
        values |= {name: entrance.value for name, entrance in entrances.items()}
        for name in self._own.inputs:
            arguments.append(values[name] if name in values else part.leaves[self._position[name]])
        results = self._run(arguments, microbatch)
        values |= zip(self._own.outputs, results if isinstance(results, tuple) else (results,), strict=True)
        for message in self._tables.sends:
            expected = self._expected(message, microbatch, message.name)
            tag = self._tag(message, Phase.FORWARD, microbatch)
            self._transport.send(values[message.name], expected, self._rank(message.peer, microbatch), tag)
        self._stashes[microbatch] = _Stash({m.name: values[m.name] for m in self._tables.gradient_receives}, entrances)
        if self.program.loss in self._own.outputs:
            loss = values[self.program.loss]
            self._stashes[microbatch].loss = loss
            self._losses[microbatch] = loss.item() * part.weight

    def _run(self, arguments: list[Tensor], microbatch: int) -> Tensor | tuple[Tensor, ...]:
        calls = self._own.random_calls
        if not calls or not self.module.training:
            results: Tensor | tuple[Tensor, ...] = self.module(*arguments)
            return results
        with KeyedRandomness(seed=self.seed, step=self._step, microbatch=microbatch, calls=calls):
            results = self.module(*arguments)
        return results

    def _backward(self, microbatch: int) -> None:
        stash = self._stashes.pop(microbatch)
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        if stash.loss is not None and stash.loss.requires_grad:
            roots.append(stash.loss)
            gradients.append(torch.full_like(stash.loss, self._microbatches[microbatch].weight))
        for message in self._tables.gradient_receives:
            gradient = self._wait(Phase.BACKWARD, microbatch, message)
            if stash.values[message.name].requires_grad:
                roots.append(stash.values[message.name])
                gradients.append(gradient)
        for message in self._tables.parameter_receives:
            roots.append(self.module.get_parameter(message.name))
            gradients.append(self._wait(Phase.BACKWARD, microbatch, message))
        if roots:
            torch.autograd.backward(roots, gradients)
        for message in self._tables.gradient_sends:
            self._send_gradient(stash.entrances[message.name].gradient, message, microbatch)
        for message in self._tables.parameter_sends:
            parameter = self.module.get_parameter(message.name)
            self._send_gradient(parameter.grad, message, microbatch)
            parameter.grad = None

    def _send_gradient(self, gradient: Tensor | None, message: Message, microbatch: int) -> None:
        expected = self._expected(message, microbatch, f"gradient of {message.name}")
        if gradient is None:
            gradient = torch.zeros(expected.shape, dtype=expected.dtype)
        tag = self._tag(message, Phase.BACKWARD, microbatch)
        self._transport.send(gradient, expected, self._rank(message.peer, microbatch), tag)

    def _return_shared(self) -> None:
        """Sends each shared parameter's total gradient along its chain, from its owner to all replicas."""
        step = len(self._microbatches)  # A microbatch number that no microbatch has.
        for message in self._tables.parameter_sends:
            source = self._rank(message.peer, self.replica)
            expected = Expected(f"total gradient of {message.name}", message.shape, message.dtype)
            self.doing = f"the end of the step, {expected.what}"
            receipt = self._transport.receive(expected, source, self._tag(message, Phase.FORWARD, step + self.replica))
            self.module.get_parameter(message.name).grad = receipt.wait()
        for message in self._tables.parameter_receives:
            gradient = self.module.get_parameter(message.name).grad
            assert gradient is not None
            for replica in range(self._num_replicas[message.peer]):
                if replica % self._num_replicas[self.stage] != self.replica:
                    continue
                expected = Expected(f"total gradient of {message.name}", message.shape, message.dtype)
                tag = self._tag(message, Phase.FORWARD, step + replica)
                self._transport.send(gradient, expected, self._first_rank[message.peer] + replica, tag)

    def _total_loss(self) -> float:
        losses = torch.zeros(len(self._microbatches), dtype=torch.float64)
        for microbatch, loss in self._losses.items():
            losses[microbatch] = loss
        with together("all ranks"):
            dist.all_reduce(losses)
        total: float = sum(losses.tolist())
        return total

    def _wait(self, phase: Phase, microbatch: int, message: Message) -> Tensor:
        receipt = self._posted.pop((phase, microbatch, message.name))
        try:
            return receipt.wait()
        except PeerError as error:
            stage, replica = self.program.workers[receipt.source]
            raise PeerError(f"{error} (stage {stage}, replica {replica})") from error

    def _expected(self, message: Message, microbatch: int, what: str) -> Expected:
        rows = self._microbatches[microbatch].rows
        return message.expected(rows, self.program.microbatch_size, what)

    def _rank(self, stage: int, microbatch: int) -> int:
        return self._first_rank[stage] + microbatch % self._num_replicas[stage]

    def _tag(self, message: Message, phase: Phase, microbatch: int) -> int:
        return 2 * (microbatch * self._num_messages + message.number) + (phase is Phase.BACKWARD)

    def _replica_group(self) -> dist.ProcessGroup | None:
        """The group of this stage's replicas. Every rank makes every group, in the same order."""
        mine = None
        for stage, first in enumerate(self._first_rank):
            if self._num_replicas[stage] > 1:
                group = dist.new_group(list(range(first, first + self._num_replicas[stage])))
                mine = group if stage == self.stage else mine
        return mine

    _microbatches: tuple[Microbatch, ...] = ()
    _step: int = 0
