"""Simulator laws: equal to an event simulation that shares no code, never below a lower bound, deadlock named."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from dpart.partitioner import simulate as module
from dpart.partitioner.simulate import Flow, Link, StageTime, simulate
from dpart.runtime.schedule import SCHEDULES, Action, Phase, Replica, Schedule, one_f_one_b

FREE = Link(0.0, math.inf)
F, B = Phase.FORWARD, Phase.BACKWARD


def straight(num_stages: int, size: int = 0) -> list[Flow]:
    return [Flow(s, s + 1, size, size) for s in range(num_stages - 1)]


def free_link(source: Replica, target: Replica) -> Link:
    return FREE


def by_events(
    schedule: Schedule,
    stages: Sequence[StageTime],
    flows: Sequence[Flow],
    link: Callable[[Replica, Replica], Link],
    last_microbatch: float,
) -> float:
    """Of all actions that could come next anywhere, commits the one that starts first, until none is left."""
    rows = {replica: list(row) for replica, row in schedule.rows.items()}
    owner = {(a.stage, a.microbatch): r for r, row in rows.items() for a in row}
    last = max(m for _, m in owner)
    clock, port = dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0.0)
    inbox: dict[tuple[int, Phase, int, int], float] = {}
    while any(rows.values()):
        ready = []
        for replica, row in rows.items():
            if not row:
                continue
            s, phase, m = row[0].stage, row[0].phase, row[0].microbatch
            if phase is F:
                senders = [f.source for f in flows if f.target == s and f.forward_bytes is not None]
            else:
                senders = [f.target for f in flows if f.source == s and f.backward_bytes is not None] + [s]
            arrivals = [inbox.get((s, phase, m, sender)) for sender in senders]
            if None not in arrivals:
                ready.append((max([clock[replica], *arrivals]), replica.stage, replica.index, replica))
        start, s, _, replica = min(ready)
        action = rows[replica].pop(0)
        scale = last_microbatch if action.microbatch == last else 1.0
        spent = stages[s].forward_seconds if action.phase is F else stages[s].backward_seconds
        clock[replica] = start + scale * spent
        if action.phase is F:
            inbox[s, B, action.microbatch, s] = clock[replica]
        for f in sorted(flows, key=lambda f: (f.source, f.target)):
            here, there, size = (
                (f.source, f.target, f.forward_bytes) if action.phase is F else (f.target, f.source, f.backward_bytes)
            )
            if here == s and size is not None:
                path = link(replica, owner[there, action.microbatch])
                port[replica] = max(port[replica], clock[replica]) + scale * size / path.bandwidth_bytes_per_second
                inbox[there, action.phase, action.microbatch, s] = port[replica] + path.latency_seconds
    end = [max(clock[r] for r in rows if r.stage == s) + time.all_reduce_seconds for s, time in enumerate(stages)]
    for f in sorted(flows, key=lambda f: (f.source, f.target)):
        if f.closing_bytes is not None:
            path = link(Replica(f.source, 0), Replica(f.target, 0))
            end[f.target] = max(
                end[f.target],
                end[f.source] + path.latency_seconds + f.closing_bytes / path.bandwidth_bytes_per_second,
            )
    return max(end)


ALL_REPLICAS = [r for k in range(1, 5) for r in itertools.product((1, 2, 3), repeat=k)]


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_equals_an_event_simulation_on_all_small_schedules(kind: str) -> None:
    rng = random.Random(kind)
    for replicas, m in itertools.product(ALL_REPLICAS, range(1, 7)):
        stages = [StageTime(rng.choice([0, 1, rng.random()]), rng.random(), rng.random()) for _ in replicas]
        pairs = list(itertools.combinations(range(len(replicas)), 2))
        flows = [
            Flow(s, t, *(rng.choice([None, 0, 1, 2]) for _ in range(3)))
            for s, t in pairs
            if t == s + 1 or rng.random() < 0.5
        ]
        speed = {(s, t): Link(rng.choice([0, 0.3]), rng.choice([1.0, 5.0, math.inf])) for s, t in pairs}

        def link(a: Replica, b: Replica, speed: dict[tuple[int, int], Link] = speed) -> Link:
            return speed[min(a.stage, b.stage), max(a.stage, b.stage)]

        schedule, last = SCHEDULES[kind](replicas, m), rng.choice([1.0, 0.25])
        found = simulate(schedule, stages, flows, link, last_microbatch=last)
        assert found.step_seconds == pytest.approx(by_events(schedule, stages, flows, link, last), rel=1e-12)


def test_rows_are_kept_and_nothing_starts_before_its_messages() -> None:
    timeline = simulate(one_f_one_b((2, 1), 5), [StageTime(1, 2), StageTime(0.5, 1)], straight(2), free_link)
    ends = {span.action: span.end_seconds for row in timeline.spans.values() for span in row}
    starts = {span.action: span.start_seconds for row in timeline.spans.values() for span in row}
    for replica, row in one_f_one_b((2, 1), 5).rows.items():
        assert tuple(span.action for span in timeline.spans[replica]) == row
    for m in range(5):
        assert starts[Action(1, F, m)] >= ends[Action(0, F, m)]
        assert starts[Action(0, B, m)] >= ends[Action(1, B, m)]


@pytest.mark.parametrize("seed", range(40))
def test_never_below_the_lower_bounds(seed: int) -> None:
    """For strict 1F1B on a chain with link delays c, one replica a stage."""
    rng = random.Random(seed)
    p, m = rng.randint(1, 6), rng.randint(1, 12)
    f, b = [rng.uniform(0.5, 1.5) for _ in range(p)], [rng.uniform(1, 3) for _ in range(p)]
    c = [rng.uniform(0, 1) for _ in range(p - 1)]

    def link(one: Replica, other: Replica) -> Link:
        return Link(c[min(one.stage, other.stage)], math.inf)

    times = [StageTime(*fb) for fb in zip(f, b, strict=True)]
    step = simulate(one_f_one_b([1] * p, m), times, straight(p), link).step_seconds
    for s in range(p):
        ahead = sum(f[i] + b[i] + 2 * c[i] for i in range(s))
        assert ahead + m * (f[s] + b[s]) <= step + 1e-9
        once = sum(f) + sum(b) + 2 * sum(c)
        assert once + (m - 1) * (f[s] + b[s]) - (min(m, p - s) - 1) * f[s] <= step + 1e-9
    if not any(c):
        assert step <= (m - 1) * max(map(sum, zip(f, b, strict=True))) + sum(f) + sum(b) + 1e-9


def test_steady_period_is_the_formula_of_strict_1f1b() -> None:
    rng = random.Random(5)
    for p in (2, 4, 6):
        f, b = [rng.uniform(0.5, 1.5) for _ in range(p)], [rng.uniform(1, 3) for _ in range(p)]
        c = [rng.uniform(0, 1) for _ in range(p - 1)]
        times = [StageTime(*fb) for fb in zip(f, b, strict=True)]

        def link(one: Replica, other: Replica, c: list[float] = c) -> Link:
            return Link(c[min(one.stage, other.stage)], math.inf)

        short, long = (simulate(one_f_one_b([1] * p, m), times, straight(p), link).step_seconds for m in (120, 240))
        period = max(
            (sum(f[s : e + 1]) + sum(b[s : e + 1]) + 2 * sum(c[s:e])) / (1 + e - s)
            for s in range(p)
            for e in range(s, p)
        )
        assert (long - short) / 120 == pytest.approx(period, rel=1e-9)


def test_a_slow_link_bounds_the_step_by_its_bytes() -> None:
    """Messages of one worker leave one after another: many microbatches take their bytes / bandwidth."""
    flows, m = [Flow(0, 1, 10, None)], 50
    timeline = simulate(one_f_one_b((1, 1), m), [StageTime(0.1, 0)] * 2, flows, lambda a, b: Link(0.0, 1.0))
    assert timeline.step_seconds >= 10 * m


def test_closing_messages_and_all_reduces_come_last() -> None:
    flows = [Flow(0, 1, 0, 0, 6), Flow(1, 2, 0, 0, 6)]
    stages = [StageTime(1, 1, 5), StageTime(1, 1), StageTime(1, 1)]
    timeline = simulate(one_f_one_b((1, 1, 1), 1), stages, flows, lambda a, b: Link(0.5, 2.0))
    # Backwards end at 9 (four latencies of 0.5, and 6 of work); then 5, and two hops of 0.5 + 6 / 2.
    assert timeline.all_reduce[0] == (8.0, 13.0)
    assert timeline.step_seconds == 13 + 2 * 3.5


def test_a_smaller_last_microbatch_takes_its_share() -> None:
    timeline = simulate(one_f_one_b((1,), 3), [StageTime(1, 2)], [], free_link, last_microbatch=0.5)
    assert timeline.step_seconds == 7.5
    assert timeline.bubble == 0.0


def test_bubble_of_even_stages_is_the_textbook_one() -> None:
    for p, m in ((2, 4), (4, 8), (3, 1)):
        for kind in ("1f1b", "gpipe"):
            timeline = simulate(SCHEDULES[kind]([1] * p, m), [StageTime(1, 2)] * p, straight(p), free_link)
            assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


def test_a_deadlock_names_the_actions_that_wait() -> None:
    rows = {
        Replica(0, 0): (Action(0, F, 0), Action(0, B, 0), Action(0, F, 1), Action(0, B, 1)),
        Replica(1, 0): (Action(1, F, 1), Action(1, B, 1), Action(1, F, 0), Action(1, B, 0)),
    }
    with pytest.raises(ValueError, match=r"0B0 waits for 1B0; 1F1 waits for 0F1"):
        simulate(Schedule(rows), [StageTime(1, 1)] * 2, straight(2), free_link)


def test_the_drawing_is_what_the_simulator_does() -> None:
    timeline = simulate(one_f_one_b((1, 1), 3), [StageTime(1, 1)] * 2, straight(2), free_link)
    lines = []
    for row in timeline.spans.values():
        cells = [" . "] * int(timeline.step_seconds)
        for span in row:
            cells[int(span.start_seconds)] = str(span.action)
        lines.append("    " + " ".join(cells).rstrip())
    assert module.__doc__ is not None
    assert "\n".join(lines) in module.__doc__
