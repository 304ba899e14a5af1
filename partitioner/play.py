"""`Play`: the state of the simulator, and the rule that moves it: an action starts when all it needs is there.

Every action is a *cell*, a number made of phase, stage and microbatch; what is asked for once an action is a list
over cells. A cell knows how many of the things it needs are still missing, and when the latest one came::

    missing  2 -> 1 -> 0        a worker whose next cell has 0 missing performs it, and tells the cells that need it
    ready    0.0  1.3  2.1
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dpart.partitioner.timeline import Message, Span
from dpart.partitioner.timing import Flow, Links, StageTime
from dpart.runtime.schedule import Action, Phase, Replica, Schedule

_PHASES = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.WEIGHT_BACKWARD: 2}


@dataclass
class _Updates:
    """The all-reduces of one stage of an asynchronous schedule, one for each update of its weights.

    Attributes:
        every: Microbatches per update.
        missing: Of every update, backwards that have not run.
        ready: When the latest of those that have run ended.
        waiting: Of every update, the cells that need it.
        done: Start and end of the updates that are complete.
    """

    every: int
    seconds: float
    missing: list[int]
    ready: list[float]
    waiting: list[list[int]]
    done: list[tuple[float, float]] = field(default_factory=list)

    def add(self, microbatch: int, end: float) -> list[tuple[int, float]]:
        """A backward has ended; returns the cells whose update is now settled, each with the update's end."""
        update = microbatch // self.every
        self.missing[update] -= 1
        self.ready[update] = max(self.ready[update], end)
        settled: list[tuple[int, float]] = []
        while len(self.done) < len(self.missing) and self.missing[len(self.done)] == 0:
            this = len(self.done)
            start = max(self.ready[this], self.done[-1][1] if self.done else 0.0)
            self.done.append((start, start + self.seconds))
            settled += [(cell, start + self.seconds) for cell in self.waiting[this]]
        return settled


class Play:
    """Plays all actions of a schedule.

    Attributes:
        workers: The rows' names; a worker is its place among them.
        worker_at: By stage and microbatch, stage by stage; -1 where nothing computes it.
        spans: Of every worker; filled by `run`.
        messages: Filled by `run`.
        updates: Of stages whose updates have an all-reduce.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageTime],
        flows: Sequence[Flow],
        link: Links,
        last_microbatch: float,
    ) -> None:
        self.workers: list[Replica] = list(schedule.rows)
        self.spans: list[list[Span]] = [[] for _ in self.workers]
        self.messages: list[Message] = []
        self._rows = list(schedule.rows.values())
        self._link, self._last_share = link, last_microbatch
        self._num_stages = len(stages)
        self.num_microbatches = 1 + max((a.microbatch for row in self._rows for a in row), default=0)
        num_cells = 3 * self._num_stages * self.num_microbatches
        self._missing, self._ready = [0] * num_cells, [0.0] * num_cells
        self._actions: list[Action | None] = [None] * num_cells
        self.worker_at = [-1] * (self._num_stages * self.num_microbatches)
        self._cells = [self._lower(worker, row) for worker, row in enumerate(self._rows)]
        self._position = [0] * len(self._rows)
        self._seconds = self._durations(stages)
        self._sends: list[list[tuple[int, int]]] = [[] for _ in range(3 * self._num_stages)]
        self._sources: list[list[int]] = [[] for _ in range(3 * self._num_stages)]
        for flow in flows:
            self._connect(flow.source, flow.target, 0, flow.forward_bytes)
            self._connect(flow.target, flow.source, 1, flow.backward_bytes)
        for kind, sources in enumerate(self._sources):
            needs = len(sources) + (kind >= self._num_stages)
            first = kind * self.num_microbatches
            self._missing[first : first + self.num_microbatches] = [needs] * self.num_microbatches
        self.updates = {} if schedule.synchronous else self._all_updates(schedule, stages)

    def _lower(self, worker: int, row: Sequence[Action]) -> list[int]:
        cells, n, m = [], self._num_stages, self.num_microbatches
        for action in row:
            cells.append((_PHASES[action.phase] * n + action.stage) * m + action.microbatch)
            self._actions[cells[-1]] = action
            self.worker_at[action.stage * m + action.microbatch] = worker
        return cells

    def _durations(self, stages: Sequence[StageTime]) -> list[float]:
        apart = {a.stage for row in self._rows for a in row if a.phase is Phase.WEIGHT_BACKWARD}
        return [
            *(time.forward_seconds for time in stages),
            *(
                time.backward_seconds - (time.weight_backward_seconds if stage in apart else 0.0)
                for stage, time in enumerate(stages)
            ),
            *(time.weight_backward_seconds for time in stages),
        ]

    def _connect(self, source: int, target: int, phase: int, size: int | None) -> None:
        if size is not None:
            self._sends[phase * self._num_stages + source].append((phase * self._num_stages + target, size))
            self._sources[phase * self._num_stages + target].append(source)

    def _all_updates(self, schedule: Schedule, stages: Sequence[StageTime]) -> dict[int, _Updates]:
        made: dict[int, _Updates] = {}
        m = self.num_microbatches
        for stage, time in enumerate(stages):
            if time.all_reduce_seconds > 0:
                every = schedule.microbatches_per_update(stage)
                sizes = [min(every, m - first) for first in range(0, m, every)]
                waiting: list[list[int]] = [[] for _ in sizes]
                for microbatch in range(m):
                    update = schedule.awaited_update(stage, microbatch)
                    if update >= 0:
                        waiting[update].append(stage * m + microbatch)
                        self._missing[stage * m + microbatch] += 1
                made[stage] = _Updates(every, time.all_reduce_seconds, sizes, [0.0] * len(sizes), waiting)
        return made

    def run(self) -> None:
        """Plays all rows; a worker is looked at again when the cell it waits for has all it needs.

        Raises:
            ValueError: Some actions never get what they need.
        """
        port_free = [0.0] * len(self._rows)
        speeds: dict[tuple[int, int], tuple[float, float]] = {}
        awake = deque(range(len(self._rows)))
        while awake:
            worker = awake.popleft()
            cells, position, spans = self._cells[worker], self._position[worker], self.spans[worker]
            clock = spans[-1].end_seconds if spans else 0.0
            while position < len(cells) and not self._missing[cells[position]]:
                cell = cells[position]
                kind, microbatch = divmod(cell, self.num_microbatches)
                scale = self._last_share if microbatch == self.num_microbatches - 1 else 1.0
                action = self._actions[cell]
                assert action is not None
                start = max(clock, self._ready[cell])
                clock = start + scale * self._seconds[kind]
                spans.append(Span(action, start, clock))
                position += 1
                self._position[worker] = position
                self._tell_own(kind, cell, microbatch, clock, awake)
                for target_kind, size in self._sends[kind]:
                    target = target_kind * self.num_microbatches + microbatch
                    receiver = self.worker_at[target % len(self.worker_at)]
                    other = self._actions[target]
                    if other is None:
                        continue
                    arrival = clock
                    if receiver != worker:
                        if (worker, receiver) not in speeds:
                            path = self._link(self.workers[worker], self.workers[receiver])
                            speeds[worker, receiver] = path.bandwidth_bytes_per_second, path.latency_seconds
                        bandwidth, latency = speeds[worker, receiver]
                        leave = max(clock, port_free[worker])
                        port_free[worker] = leave + scale * size / bandwidth
                        arrival = port_free[worker] + latency
                        self.messages.append(Message(action, other, leave, arrival))
                    self._tell(target, arrival, awake)
        self._refuse_stuck()

    def _tell_own(self, kind: int, cell: int, microbatch: int, end: float, awake: deque[int]) -> None:
        """What follows at the same stage: the next phase of the microbatch; updates of the weights."""
        following = cell + len(self.worker_at)
        if following < len(self._missing):
            self._missing[following] -= 1
            self._ready[following] = max(self._ready[following], end)
        if self.updates and self._num_stages <= kind < 2 * self._num_stages:
            updates = self.updates.get(kind - self._num_stages)
            if updates is not None:
                for settled, settled_end in updates.add(microbatch, end):
                    self._tell(settled, settled_end, awake)

    def _tell(self, cell: int, arrival: float, awake: deque[int]) -> None:
        """Something that a cell needs has come; its worker wakes if it waited for nothing else."""
        self._missing[cell] -= 1
        if arrival > self._ready[cell]:
            self._ready[cell] = arrival
        if not self._missing[cell]:
            worker = self.worker_at[cell % len(self.worker_at)]
            position = self._position[worker]
            if position < len(self._cells[worker]) and self._cells[worker][position] == cell:
                awake.append(worker)

    def _refuse_stuck(self) -> None:
        done = {span.action for row in self.spans for span in row}
        faults = []
        for worker, row in enumerate(self._rows):
            if self._position[worker] < len(row):
                action = row[self._position[worker]]
                kind = self._cells[worker][self._position[worker]] // self.num_microbatches
                needs = [Action(source, action.phase, action.microbatch) for source in self._sources[kind]]
                if action.phase is not Phase.FORWARD:
                    own = Phase.FORWARD if action.phase is Phase.BACKWARD else Phase.BACKWARD
                    needs.append(Action(action.stage, own, action.microbatch))
                names = [str(other) for other in needs if other not in done]
                faults.append(f"{action} waits for {', '.join(names) or 'an update of its weights'}")
        if faults:
            raise ValueError(f"The schedule cannot run to its end: {'; '.join(faults)}.")
