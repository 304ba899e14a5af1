"""Proves a schedule complete, ordered and free of deadlock before anything runs. No torch, no processes.

Sends never block, so a replica can wait only for what a message brings. Performing every action as soon as
what it needs has been performed is then a proof: if all actions get their turn in some order, they do in
any; if they do not, those left wait for one another.
"""

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
        forward_edges: (from, to) stages of the values that travel forward.
        backward_edges: (from, to) stages of the gradients that travel back.

    Raises:
        ValueError: All faults, one a line.
    """
    faults = _disorder(schedule, num_replicas, num_microbatches)
    if not faults:
        faults = _deadlock(schedule, set(forward_edges), set(backward_edges))
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
    faults: list[str] = []
    replicas = {Replica(stage, q) for stage, r in enumerate(num_replicas) for q in range(r)}
    for replica in schedule.rows.keys() ^ replicas:
        what = "is missing" if replica in replicas else "does not exist"
        faults.append(f"stage {replica.stage}, replica {replica.index} {what}.")
    for replica in schedule.rows.keys() & replicas:
        row = schedule.rows[replica]
        who = f"stage {replica.stage}, replica {replica.index}"
        own = range(replica.index, num_microbatches, num_replicas[replica.stage])
        wanted = {Action(replica.stage, phase, m) for phase in Phase for m in own}
        faults += [f"{who}: {a} is missing." for a in sorted(wanted - set(row), key=str)]
        faults += [f"{who}: {a} is not its work." for a in sorted(set(row) - wanted, key=str)]
        faults += [f"{who}: {a} stands {row.count(a)} times." for a in sorted(wanted, key=str) if row.count(a) > 1]
        forwards = [a.microbatch for a in row if a.phase is Phase.FORWARD]
        backwards = [a.microbatch for a in row if a.phase is Phase.BACKWARD]
        # Gradients are sums in floating point: another order of the microbatches gives other last bits.
        if forwards != sorted(forwards) or backwards != sorted(backwards):
            faults.append(f"{who}: its microbatches are out of order.")
        place = {action: i for i, action in reversed(list(enumerate(row)))}
        for m in own:
            forward, backward = (Action(replica.stage, phase, m) for phase in Phase)
            if place.get(backward, len(row)) < place.get(forward, -1):
                faults.append(f"{who}: {backward} comes before {forward}.")
    return faults


def _deadlock(
    schedule: Schedule, forward_edges: set[tuple[int, int]], backward_edges: set[tuple[int, int]]
) -> list[str]:
    """The actions that never get their turn, each with what it waits for."""
    sources: dict[tuple[Phase, int], list[int]] = {}
    for phase, edges in ((Phase.FORWARD, forward_edges), (Phase.BACKWARD, backward_edges)):
        for source, target in sorted(edges):
            sources.setdefault((phase, target), []).append(source)
    done: set[Action] = set()
    position = dict.fromkeys(schedule.rows, 0)

    def missing(action: Action) -> list[Action]:
        needed = (
            Action(source, action.phase, action.microbatch) for source in sources.get((action.phase, action.stage), ())
        )
        return [other for other in needed if other not in done]

    progress = True
    while progress:
        progress = False
        for replica, row in schedule.rows.items():
            while position[replica] < len(row) and not missing(row[position[replica]]):
                done.add(row[position[replica]])
                position[replica] += 1
                progress = True
    stuck = [row[position[r]] for r, row in schedule.rows.items() if position[r] < len(row)]
    return [f"{action} waits for {', '.join(map(str, missing(action)))}, which cannot come." for action in stuck]
