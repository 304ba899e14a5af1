"""Proves a schedule complete, ordered and free of deadlock before anything runs. No torch, no processes.

Sends never block, so a worker can wait only for what a message brings, or in an asynchronous schedule for an
update of its weights. Performing every action as soon as what it needs has been performed is then a proof: if
all actions get their turn in some order, they do in any; if they do not, those left wait for one another.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from dpart.runtime.program import Program
from dpart.runtime.schedule import Action, Phase, Replica, Schedule


def check_schedule(
    schedule: Schedule,
    num_replicas: Sequence[int],
    num_microbatches: int,
    forward_edges: Iterable[tuple[int, int]],
    backward_edges: Iterable[tuple[int, int]],
) -> None:
    """Raises unless the schedule can be run.

    Args:
        num_replicas: Of each stage.
        forward_edges: (from, to) stages of the values that travel forward.
        backward_edges: (from, to) stages of the gradients that travel back.

    Raises:
        ValueError: All faults, one a line.
    """
    faults = _disorder(schedule, num_replicas, num_microbatches)
    if not faults:
        faults = _Turns(schedule, set(forward_edges), set(backward_edges)).stuck()
    if faults:
        raise ValueError("The schedule cannot be run:\n" + "\n".join(faults))


def program_edges(program: Program) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The (from, to) stages of a program's messages: forward, and backward."""
    forward = {(channel.source, channel.target) for channel in program.channels}
    backward = {(channel.target, channel.source) for channel in program.channels if channel.differentiable}
    for shared in program.shared_parameters:
        backward.update(zip(shared.stages[1:], shared.stages, strict=False))
    return forward, backward


def _disorder(schedule: Schedule, num_replicas: Sequence[int], num_microbatches: int) -> list[str]:
    """What is missing, doubled, misplaced or out of order in single rows."""
    has_weight_backwards = any(a.phase is Phase.WEIGHT_BACKWARD for row in schedule.rows.values() for a in row)
    phases = [phase for phase in Phase if has_weight_backwards or phase is not Phase.WEIGHT_BACKWARD]
    hosted, faults = _hosted(schedule, num_replicas, num_microbatches)
    for worker, row in schedule.rows.items():
        who = f"stage {worker.stage}, replica {worker.index}"
        own = [(r.stage, m) for r in hosted[worker] for m in range(r.index, num_microbatches, num_replicas[r.stage])]
        wanted = {Action(stage, phase, m) for stage, m in own for phase in phases}
        seen = set(row)
        faults += [f"{who}: {a} is missing." for a in sorted(wanted - seen, key=str)]
        faults += [f"{who}: {a} is not its work." for a in sorted(seen - wanted, key=str)]
        if len(seen) < len(row):
            faults += [f"{who}: {a} stands {row.count(a)} times." for a in sorted(seen, key=str) if row.count(a) > 1]
        faults += _out_of_order(who, row)
    return faults


def _hosted(
    schedule: Schedule, num_replicas: Sequence[int], num_microbatches: int
) -> tuple[dict[Replica, list[Replica]], list[str]]:
    """The replicas that each worker runs: that of its name, and those whose work it has; and what is wrong there."""
    at: dict[tuple[int, int], set[Replica]] = {}
    for worker, row in schedule.rows.items():
        for action in row:
            if 0 <= action.stage < len(num_replicas):
                at.setdefault((action.stage, action.microbatch % num_replicas[action.stage]), set()).add(worker)
    hosted: dict[Replica, list[Replica]] = {worker: [] for worker in schedule.rows}
    faults = []
    for stage, r in enumerate(num_replicas):
        for q in range(r):
            replica, workers = Replica(stage, q), at.get((stage, q), set())
            if replica in hosted:
                hosted[replica].append(replica)
            elif len(workers) == 1:
                hosted[next(iter(workers))].append(replica)
            elif workers or q < num_microbatches:
                where = f"stands in the rows of {len(workers)} workers" if workers else "is missing"
                faults.append(f"stage {stage}, replica {q} {where}.")
    strays = [worker for worker, replicas in hosted.items() if worker not in replicas]
    faults += [f"stage {worker.stage}, replica {worker.index} does not exist." for worker in strays]
    return hosted, faults


def _out_of_order(who: str, row: Sequence[Action]) -> list[str]:
    faults = []
    place = {action: i for i, action in reversed(list(enumerate(row)))}
    order: dict[tuple[int, Phase], list[int]] = {}
    for action in row:
        order.setdefault((action.stage, action.phase), []).append(action.microbatch)
    # Gradients are sums in floating point: another order of the microbatches gives other last bits.
    if any(microbatches != sorted(microbatches) for microbatches in order.values()):
        faults.append(f"{who}: its microbatches are out of order.")
    for action, i in place.items():
        before = _own_before(action)
        if before is not None and place.get(before, -1) > i:
            faults.append(f"{who}: {action} comes before {before}.")
    return faults


def _own_before(action: Action) -> Action | None:
    """What the same stage does with the same microbatch first."""
    if action.phase is Phase.FORWARD:
        return None
    before = Phase.FORWARD if action.phase is Phase.BACKWARD else Phase.BACKWARD
    return Action(action.stage, before, action.microbatch)


class _Turns:
    """Plays a schedule without time: how far each row is, and what has been performed."""

    def __init__(
        self, schedule: Schedule, forward_edges: set[tuple[int, int]], backward_edges: set[tuple[int, int]]
    ) -> None:
        self._schedule = schedule
        self._sources: dict[tuple[Phase, int], list[int]] = {}
        for phase, edges in ((Phase.FORWARD, forward_edges), (Phase.BACKWARD, backward_edges)):
            for source, target in sorted(edges):
                self._sources.setdefault((phase, target), []).append(source)
        self._num_microbatches = 1 + max((a.microbatch for row in schedule.rows.values() for a in row), default=-1)
        self._done: set[Action] = set()

    def stuck(self) -> list[str]:
        """The actions that never get their turn, each with what it waits for."""
        rows, position = self._schedule.rows, dict.fromkeys(self._schedule.rows, 0)
        waiting: dict[Action, list[Replica]] = {}
        ready = deque(rows)
        while ready:
            worker = ready.popleft()
            row = rows[worker]
            while position[worker] < len(row):
                action = row[position[worker]]
                missing = self._missing(action)
                if missing:
                    waiting.setdefault(missing[0], []).append(worker)
                    break
                self._done.add(action)
                position[worker] += 1
                ready.extend(waiting.pop(action, ()))
        last = [row[position[worker]] for worker, row in rows.items() if position[worker] < len(row)]
        return [f"{a} waits for {', '.join(map(str, self._missing(a)))}, which cannot come." for a in last]

    def _missing(self, action: Action) -> list[Action]:
        stage, m = action.stage, action.microbatch
        needed = [Action(source, action.phase, m) for source in self._sources.get((action.phase, stage), ())]
        before = _own_before(action)
        if before is not None:
            needed.append(before)
        elif (update := self._schedule.awaited_update(stage, m)) >= 0:
            every = self._schedule.microbatches_per_update(stage)
            summed = range(update * every, min((update + 1) * every, self._num_microbatches))
            needed += [Action(stage, Phase.BACKWARD, other) for other in summed]
        return [other for other in needed if other not in self._done]
