"""The exact time of one step: every action of a Schedule played through, with its messages, in O(actions).

A replica performs the actions of its row in order, each as soon as its messages have arrived. When an action
ends, its messages leave one after another (a worker sends one message at a time, for bytes / bandwidth), and
arrive a latency later. Receiving and computing go on meanwhile. Two stages, three microbatches, every action
one second, messages free::

    0F0 0F1  .  0B0 0F2 0B1  .  0B2
     .  1F0 1B0 1F1 1B1 1F2 1B2  .

After its last backward a stage with several replicas all-reduces its gradients; then the totals of shared
parameters travel forward. Both are exposed: nothing of them is hidden behind other work.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dpart.runtime.schedule import Action, Phase, Replica, Schedule


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage: for a full microbatch on one replica, and of its all-reduce per step."""

    forward_seconds: float
    backward_seconds: float
    all_reduce_seconds: float = 0.0


@dataclass(frozen=True)
class Flow:
    """What goes from one stage to a later one, and back, for a full microbatch.

    Attributes:
        forward_bytes: Activations; None if there are none to wait for.
        backward_bytes: Gradients; None if there are none to wait for.
        closing_bytes: Totals of shared parameters, once a step after the all-reduce; None if there are none.
    """

    source: int
    target: int
    forward_bytes: int | None
    backward_bytes: int | None
    closing_bytes: int | None = None


@dataclass(frozen=True)
class Link:
    """From one replica to another, one way."""

    latency_seconds: float
    bandwidth_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it ran, in seconds from the start of the step."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """A step as it is predicted to run.

    Attributes:
        spans: Of every replica, in the order of its row.
        all_reduce: Start and end of every stage's all-reduce, equal where there is none.
        step_seconds: Until the last replica is done.
    """

    spans: Mapping[Replica, tuple[Span, ...]]
    all_reduce: tuple[tuple[float, float], ...]
    step_seconds: float

    @cached_property
    def bubble(self) -> float:
        """Share of the replicas' time spent neither computing nor in an all-reduce, between 0 and 1."""
        busy = sum(span.end_seconds - span.start_seconds for row in self.spans.values() for span in row)
        busy += sum(end - start for start, end in (self.all_reduce[replica.stage] for replica in self.spans))
        total = self.step_seconds * len(self.spans)
        return min(1.0, max(0.0, 1.0 - busy / total)) if total else 0.0


def simulate(
    schedule: Schedule,
    stages: Sequence[StageTime],
    flows: Sequence[Flow],
    link: Callable[[Replica, Replica], Link],
    *,
    last_microbatch: float = 1.0,
) -> Timeline:
    """Plays one step.

    Args:
        flows: At most one for a pair of stages.
        link: Between two replicas, in the direction of the message.
        last_microbatch: Rows of the last microbatch as a share of a full one; its seconds and bytes scale.

    Raises:
        ValueError: The schedule cannot run to its end; the message names the actions that wait.
    """
    play = _Play(schedule, stages, flows, link, last_microbatch)
    play.run()
    return _close(play, stages, flows, link)


class _Play:
    """The state of the simulation: how far each row is, and which messages have arrived when."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageTime],
        flows: Sequence[Flow],
        link: Callable[[Replica, Replica], Link],
        last_microbatch: float,
    ) -> None:
        self.rows, self.stages, self.link = schedule.rows, stages, link
        self.spans: dict[Replica, list[Span]] = {replica: [] for replica in schedule.rows}
        self.port_free = dict.fromkeys(schedule.rows, 0.0)
        self._replica = {
            (action.stage, action.microbatch): replica for replica, row in self.rows.items() for action in row
        }
        self._last = max((action.microbatch for row in self.rows.values() for action in row), default=0)
        self._last_share = last_microbatch
        self._outgoing: dict[tuple[int, Phase], list[tuple[int, int]]] = {}
        self._incoming: dict[tuple[int, Phase], list[int]] = {}
        for flow in flows:
            self._connect(flow.source, flow.target, Phase.FORWARD, flow.forward_bytes)
            self._connect(flow.target, flow.source, Phase.BACKWARD, flow.backward_bytes)
        # When the message for an action from a stage arrives; for its own backward, when the forward ended.
        self._arrived: dict[tuple[Action, int], float] = {}

    def _connect(self, source: int, target: int, phase: Phase, size: int | None) -> None:
        if size is not None:
            self._outgoing.setdefault((source, phase), []).append((target, size))
            self._incoming.setdefault((target, phase), []).append(source)

    def run(self) -> None:
        """Plays all rows; a replica is looked at again whenever a message for it has arrived."""
        waiting = deque(self.rows)
        while waiting:
            replica = waiting.popleft()
            row, done = self.rows[replica], self.spans[replica]
            while len(done) < len(row) and not self._missing(row[len(done)]):
                waiting.extend(self._perform(replica, row[len(done)]))
        stuck = [row[len(self.spans[r])] for r, row in self.rows.items() if len(self.spans[r]) < len(row)]
        if stuck:
            faults = "; ".join(f"{a} waits for {', '.join(map(str, self._missing(a)))}" for a in stuck)
            raise ValueError(f"The schedule cannot run to its end: {faults}.")

    def _needs(self, action: Action) -> list[int]:
        needs = self._incoming.get((action.stage, action.phase), [])
        return [*needs, action.stage] if action.phase is Phase.BACKWARD else needs

    def _missing(self, action: Action) -> list[Action]:
        """The actions whose message this one still waits for."""
        missing = [stage for stage in self._needs(action) if (action, stage) not in self._arrived]
        return [Action(s, Phase.FORWARD if s == action.stage else action.phase, action.microbatch) for s in missing]

    def _perform(self, replica: Replica, action: Action) -> list[Replica]:
        """Runs an action that has all it needs; returns the replicas that got a message."""
        stage, microbatch = action.stage, action.microbatch
        scale = self._last_share if microbatch == self._last else 1.0
        time = self.stages[stage]
        forward = action.phase is Phase.FORWARD
        start = self.spans[replica][-1].end_seconds if self.spans[replica] else 0.0
        start = max([start, *(self._arrived[action, source] for source in self._needs(action))])
        end = start + scale * (time.forward_seconds if forward else time.backward_seconds)
        self.spans[replica].append(Span(action, start, end))
        if forward:
            self._arrived[Action(stage, Phase.BACKWARD, microbatch), stage] = end
        reached = []
        for target, size in self._outgoing.get((stage, action.phase), []):
            receiver = self._replica.get((target, microbatch))
            if receiver is None:
                continue
            link = self.link(replica, receiver)
            left = max(end, self.port_free[replica]) + scale * size / link.bandwidth_bytes_per_second
            self.port_free[replica] = left
            self._arrived[Action(target, action.phase, microbatch), stage] = left + link.latency_seconds
            reached.append(receiver)
        return reached


def _close(
    play: _Play, stages: Sequence[StageTime], flows: Sequence[Flow], link: Callable[[Replica, Replica], Link]
) -> Timeline:
    """The end of the step: all-reduces, then the totals of shared parameters, stage by stage."""
    ended = [0.0] * len(stages)
    for replica, row in play.spans.items():
        last = row[-1].end_seconds if row else 0.0
        ended[replica.stage] = max(ended[replica.stage], last)
    all_reduce = tuple((end, end + time.all_reduce_seconds) for end, time in zip(ended, stages, strict=True))
    done = [end for _, end in all_reduce]
    for flow in sorted(flows, key=lambda flow: flow.source):
        if flow.closing_bytes is not None:
            path = link(Replica(flow.source, 0), Replica(flow.target, 0))
            seconds = path.latency_seconds + flow.closing_bytes / path.bandwidth_bytes_per_second
            done[flow.target] = max(done[flow.target], done[flow.source] + seconds)
    spans = {replica: tuple(row) for replica, row in play.spans.items()}
    return Timeline(spans, all_reduce, max(done, default=0.0))
