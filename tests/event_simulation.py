"""A pipeline played by a clock: a queue of events, and workers, ports and networks that are busy or free.

It knows the rules of the simulator and shares no code with it: nothing is computed ahead of its time. A worker
that is free looks whether its next action has all it needs; a port sends what has queued longest; a network
reduces what has queued longest.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dpart.partitioner.simulate import Flow, Link, StageTime
from dpart.runtime.schedule import Action, Phase, Replica, Schedule

F, B, W = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_BACKWARD
Token = tuple[object, ...]


@dataclass
class Port:
    """Does one thing at a time, in the order in which they are asked for."""

    queue: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    busy: bool = False


class Clock:
    """One run. Afterwards: when every action ended, when every stage's all-reduces ended, when all was done."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageTime],
        flows: Sequence[Flow],
        link: Callable[[Replica, Replica], Link],
        last_share: float,
        num_buckets: int,
    ) -> None:
        self.schedule, self.stages, self.flows, self.link = schedule, stages, flows, link
        self.num_buckets = num_buckets
        self.todo = {worker: deque(row) for worker, row in schedule.rows.items()}
        self.home = {(a.stage, a.microbatch): worker for worker, row in schedule.rows.items() for a in row}
        last = max(m for _, m in self.home)
        self.share = {m: last_share if m == last else 1.0 for m in range(last + 1)}
        self.split = any(a.phase is W for row in schedule.rows.values() for a in row)
        self.final = W if self.split else B
        self.inbox: set[Token] = set()
        self.computing: set[Replica] = set()
        self.ports = {worker: Port() for worker in schedule.rows}
        self.networks: dict[Replica, Port] = {}
        self.workers_of: dict[int, list[Replica]] = {}
        for (stage, _), worker in sorted(self.home.items(), key=str):
            if worker not in self.workers_of.setdefault(stage, []):
                self.workers_of[stage].append(worker)
        self.final_actions = {
            (stage, [a for a in schedule.rows[worker] if a.stage == stage and a.phase is self.final][-1].microbatch)
            for stage, workers in self.workers_of.items()
            for worker in workers
        }
        self.counts: dict[Token, int] = {}
        self.next_update = dict.fromkeys(self.workers_of, 0)
        self.ended: dict[Action, float] = {}
        self.reduced: dict[int, list[float]] = {stage: [] for stage in self.workers_of}
        self.step_seconds = 0.0
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> "Clock":
        for worker in self.todo:
            self.look(worker)
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        assert not any(self.todo.values()), "some actions never ran"
        self.step_seconds = max(self.closed())
        return self

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happen))

    def needs(self, action: Action) -> Iterator[Token]:
        stage, phase, m = action.stage, action.phase, action.microbatch
        for flow in self.flows:
            if phase is F and flow.target == stage and flow.forward_bytes is not None:
                yield (stage, F, m, flow.source)
            if phase is B and flow.source == stage and flow.backward_bytes is not None:
                yield (stage, B, m, flow.target)
        if phase is F and not self.schedule.synchronous and self.stages[stage].all_reduce_seconds > 0:
            update = self.schedule.awaited_update(stage, m)
            if update >= 0:
                yield ("update", stage, update)

    def look(self, worker: Replica) -> None:
        if worker in self.computing or not self.todo[worker]:
            return
        action = self.todo[worker][0]
        if not all(token in self.inbox for token in self.needs(action)):
            return
        self.todo[worker].popleft()
        self.computing.add(worker)
        time = self.stages[action.stage]
        seconds = {
            F: time.forward_seconds,
            B: time.backward_seconds - (time.weight_backward_seconds if self.split else 0),
            W: time.weight_backward_seconds,
        }[action.phase] * self.share[action.microbatch]
        self.after(seconds, lambda: self.end(worker, action))
        last = action.phase is self.final and (action.stage, action.microbatch) in self.final_actions
        if last and self.schedule.synchronous and time.all_reduce_seconds > 0:
            for i in range(1, self.num_buckets + 1):
                self.after(seconds * i / self.num_buckets, lambda i=i: self.bucket_ready(action.stage, i))

    def end(self, worker: Replica, action: Action) -> None:
        self.computing.discard(worker)
        self.ended[action] = self.now
        stage, m = action.stage, action.microbatch
        for flow in self.flows:
            if action.phase is F and flow.source == stage and flow.forward_bytes is not None:
                self.send(worker, flow.target, F, m, stage, flow.forward_bytes)
            if action.phase is B and flow.target == stage and flow.backward_bytes is not None:
                self.send(worker, flow.source, B, m, stage, flow.backward_bytes)
        if action.phase is B and not self.schedule.synchronous and self.stages[stage].all_reduce_seconds > 0:
            self.gradients_ready(stage, m)
        self.look(worker)

    def send(self, worker: Replica, target: int, phase: Phase, m: int, source: int, size: int) -> None:
        receiver = self.home[target, m]

        def arrive() -> None:
            self.inbox.add((target, phase, m, source))
            self.look(receiver)

        if receiver == worker:
            arrive()
            return
        path = self.link(worker, receiver)
        seconds = self.share[m] * size / path.bandwidth_bytes_per_second
        self.ask(self.ports[worker], seconds, lambda: self.after(path.latency_seconds, arrive))

    def ask(self, port: Port, seconds: float, then: Callable[[], None]) -> None:
        port.queue.append((seconds, then))
        if not port.busy:
            self.serve(port)

    def serve(self, port: Port) -> None:
        port.busy = bool(port.queue)
        if port.busy:
            seconds, then = port.queue.popleft()

            def finished() -> None:
                then()
                self.serve(port)

            self.after(seconds, finished)

    def network(self, stage: int) -> Port:
        return self.networks.setdefault(self.workers_of[stage][0], Port())

    def bucket_ready(self, stage: int, bucket: int) -> None:
        ready = self.counts[stage, bucket] = self.counts.get((stage, bucket), 0) + 1
        if ready == len(self.workers_of[stage]):
            seconds = self.stages[stage].all_reduce_seconds / self.num_buckets
            self.ask(self.network(stage), seconds, lambda: self.reduced[stage].append(self.now))

    def gradients_ready(self, stage: int, m: int) -> None:
        every = self.schedule.microbatches_per_update(stage)
        self.counts[stage, m // every] = self.counts.get((stage, m // every), 0) + 1

        def whole(update: int) -> bool:
            return self.counts.get((stage, update)) == len([n for n in self.share if n // every == update])

        while whole(self.next_update[stage]):
            update = self.next_update[stage]
            self.ask(
                self.network(stage), self.stages[stage].all_reduce_seconds, lambda u=update: self.updated(stage, u)
            )
            self.next_update[stage] += 1

    def updated(self, stage: int, update: int) -> None:
        self.reduced[stage].append(self.now)
        self.inbox.add(("update", stage, update))
        for worker in self.workers_of[stage]:
            self.look(worker)

    def closed(self) -> list[float]:
        done = [0.0] * len(self.stages)
        for action, end in self.ended.items():
            done[action.stage] = max([done[action.stage], end, *self.reduced[action.stage]])
        for flow in sorted(self.flows, key=lambda flow: (flow.source, flow.target)):
            if flow.closing_bytes is not None:
                seconds, source, target = 0.0, self.home[flow.source, 0], self.home[flow.target, 0]
                if source != target:
                    path = self.link(source, target)
                    seconds = path.latency_seconds + flow.closing_bytes / path.bandwidth_bytes_per_second
                done[flow.target] = max(done[flow.target], done[flow.source] + seconds)
        return done
