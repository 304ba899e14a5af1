"""Simulator laws: equal to an event simulation that shares no code; what is hidden and what is not; deadlock named."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from event_simulation import Clock

from dpart.partitioner import simulate as module
from dpart.partitioner.simulate import Flow, Link, StageTime, simulate
from dpart.runtime.schedule import (
    SCHEDULES,
    Action,
    Phase,
    Replica,
    Schedule,
    Weights,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
)

FREE = Link(0.0, math.inf)
SLOW = Link(0.25, 2.0)
F, B = Phase.FORWARD, Phase.BACKWARD


def straight(num_stages: int, size: int = 0) -> list[Flow]:
    return [Flow(s, s + 1, size, size) for s in range(num_stages - 1)]


def free_link(source: Replica, target: Replica) -> Link:
    return FREE


def instance(rng: random.Random, num_stages: int, *, smallest: float) -> tuple[list[StageTime], list[Flow]]:
    """Times and flows of a chain with some skips; stages may do nothing, and some flows go one way only."""
    stages = []
    for _ in range(num_stages):
        weights = rng.uniform(0, 1)
        forward, backward = rng.choice([smallest, 1, rng.uniform(smallest, 1)]), weights + rng.uniform(smallest, 1)
        stages.append(StageTime(forward, backward, rng.choice([0, rng.uniform(0, 4)]), weights))
    pairs = [(s, t) for s, t in itertools.combinations(range(num_stages), 2) if t == s + 1 or rng.random() < 0.3]
    return stages, [Flow(s, t, *(rng.choice([None, 0, 1, 2]) for _ in range(3))) for s, t in pairs]


def made(kind: str, replicas: Sequence[int], m: int) -> Schedule | None:
    """None where an interleaved schedule has no such workers."""
    if kind == "deep":
        return one_f_one_b(replicas, m, depth=1.75)
    if kind == "interleaved":
        chunks = next((c for c in (2, 3, 5) if len(replicas) % c == 0), 0)
        return interleaved(replicas, m, chunks=chunks) if chunks and len(set(replicas)) == 1 else None
    return SCHEDULES[kind](replicas, m)


ALL_REPLICAS = [r for k in range(1, 6) for r in itertools.product((1, 2, 3), repeat=k)]


@pytest.mark.parametrize("kind", [*sorted(SCHEDULES), "deep"])
def test_equals_an_event_simulation_on_all_small_schedules(kind: str) -> None:
    rng, repeats = random.Random(kind), 20 if kind == "interleaved" else 1
    for replicas, m, _ in itertools.product(ALL_REPLICAS, range(1, 9), range(repeats)):
        if kind == "deep" and len(replicas) == 5:
            continue
        schedule = made(kind, replicas, m)
        if schedule is None:
            continue
        # Two stages of one worker that end at the same instant would leave open whose bucket goes first.
        stages, flows = instance(rng, len(replicas), smallest=0.01 if kind == "interleaved" else 0)
        speed = [[Link(rng.choice([0, 0.3]), rng.choice([1.0, 5.0, math.inf])) for _ in range(3)] for _ in range(3)]

        def link(a: Replica, b: Replica, speed: list[list[Link]] = speed) -> Link:
            return speed[(a.stage + a.index) % 3][(2 * b.stage + b.index) % 3]

        last, buckets = rng.choice([1.0, 0.25]), rng.choice([1, 2, 5])
        found = simulate(schedule, stages, flows, link, last_microbatch=last, num_buckets=buckets)
        wanted = Clock(schedule, stages, flows, link, last, buckets).run()
        assert found.step_seconds == pytest.approx(wanted.step_seconds, rel=1e-9), (replicas, m)
        for row in found.spans.values():
            for span in row:
                assert abs(span.end_seconds - wanted.ended[span.action]) < 1e-9, (replicas, m, span)
        for stage, ends in wanted.reduced.items():
            assert len(ends) == len(found.buckets[stage])
            assert all(abs(end - one) < 1e-9 for (_, end), one in zip(found.buckets[stage], ends, strict=True))


def test_rows_are_kept_and_nothing_starts_before_its_messages() -> None:
    timeline = simulate(one_f_one_b((2, 1), 5), [StageTime(1, 2), StageTime(0.5, 1)], straight(2), free_link)
    ends = {span.action: span.end_seconds for row in timeline.spans.values() for span in row}
    starts = {span.action: span.start_seconds for row in timeline.spans.values() for span in row}
    for replica, row in one_f_one_b((2, 1), 5).rows.items():
        assert tuple(span.action for span in timeline.spans[replica]) == row
    for m in range(5):
        assert starts[Action(1, F, m)] >= ends[Action(0, F, m)]
        assert starts[Action(0, B, m)] >= ends[Action(1, B, m)]


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


def test_every_link_is_asked_for_once() -> None:
    asked: list[tuple[Replica, Replica]] = []

    def link(source: Replica, target: Replica) -> Link:
        asked.append((source, target))
        return FREE

    timeline = simulate(interleaved([2] * 6, 9, chunks=3), [StageTime(1, 2)] * 6, straight(6), link)
    assert len(asked) == len(set(asked))
    assert all(source != target for source, target in asked)
    assert len(timeline.messages) == 2 * 9 * 5


def test_stages_of_one_worker_exchange_for_free() -> None:
    timeline = simulate(interleaved([1, 1], 4, chunks=2), [StageTime(1, 2)] * 2, straight(2, 5), lambda a, b: SLOW)
    assert timeline.step_seconds == 4 * 2 * 3
    assert timeline.messages == ()


def test_messages_leave_after_the_action_and_arrive_before_the_next() -> None:
    timeline = simulate(one_f_one_b((1, 2, 1), 6), [StageTime(1, 2)] * 3, straight(3, 3), lambda a, b: SLOW)
    spans = {span.action: span for row in timeline.spans.values() for span in row}
    for message in timeline.messages:
        assert spans[message.source].end_seconds <= message.start_seconds
        assert message.end_seconds == pytest.approx(message.start_seconds + 3 / 2 + 0.25)
        assert message.end_seconds <= spans[message.target].start_seconds


def test_buckets_are_hidden_behind_the_last_backward() -> None:
    """Of an all-reduce of 6 s in 4 buckets, a backward of 4 s hides three quarters of its own length."""
    times = [StageTime(1, 4, 6)]
    whole, parts = (simulate(gpipe((2,), 4), times, [], free_link, num_buckets=n) for n in (1, 4))
    assert whole.step_seconds == 2 * 5 + 6 and whole.exposed_seconds == (6.0,)
    assert parts.step_seconds == 2 * 5 + 6 - 3 and parts.exposed_seconds == (3.0,)
    assert parts.buckets == (((7.0, 8.5), (8.5, 10.0), (10.0, 11.5), (11.5, 13.0)),)
    assert whole.bubble == parts.bubble == 0.0


def test_more_buckets_are_never_slower_and_gain_at_most_the_last_backwards() -> None:
    rng = random.Random(2)
    for _ in range(200):
        replicas, m = [rng.randint(1, 3) for _ in range(rng.randint(1, 4))], rng.randint(1, 8)
        stages, flows = instance(rng, len(replicas), smallest=0)
        schedule = SCHEDULES[rng.choice(["1f1b", "gpipe", "zb-h1"])](replicas, m)
        steps = [simulate(schedule, stages, flows, free_link, num_buckets=n).step_seconds for n in (1, 2, 4, 8)]
        assert all(more <= fewer + 1e-9 for fewer, more in itertools.pairwise(steps))
        assert steps[-1] >= steps[0] - max(time.backward_seconds for time in stages) - 1e-9


def test_a_stage_of_an_interleaved_worker_reduces_while_the_other_goes_on() -> None:
    """Stage 1 has its last backward first; stage 0 then waits for the network that stage 1 uses."""
    times = [StageTime(1, 1, 4), StageTime(1, 1, 4)]
    timeline = simulate(interleaved([2, 2], 2, chunks=2), times, straight(2), free_link)
    assert timeline.all_reduce == ((7.0, 11.0), (3.0, 7.0))
    assert timeline.exposed_seconds == (7.0, 4.0)


def test_weight_backwards_take_their_part_of_the_backward() -> None:
    timeline = simulate(zb_h1([1], 3), [StageTime(1, 5, 0, 2)], [], free_link)
    lengths = {span.action.phase.value: span.end_seconds - span.start_seconds for span in timeline.spans[Replica(0, 0)]}
    assert lengths == {"F": 1, "B": 3, "W": 2}
    assert timeline.step_seconds == simulate(gpipe([1], 3), [StageTime(1, 5, 0, 2)], [], free_link).step_seconds == 18


def test_an_asynchronous_all_reduce_is_hidden_until_it_is_longer_than_the_work() -> None:
    """Two replicas compute 3 s a round; reduces of 2 s do not show, reduces of 5 s set the pace."""
    for seconds, period in ((2.0, 1.5), (5.0, 2.5)):
        timeline = simulate(SCHEDULES["pipedream"]((2, 2), 80), [StageTime(1, 2, seconds)] * 2, straight(2), free_link)
        assert timeline.period_seconds == pytest.approx(period)
        assert len(timeline.buckets[0]) == 40


def test_peaks_are_those_of_the_schedule() -> None:
    schedule = interleaved([1] * 4, 6)
    timeline = simulate(schedule, [StageTime(1, 2)] * 4, straight(4), free_link)
    assert timeline.peak_in_flight == {worker: schedule.peak_in_flight(worker) for worker in schedule.rows}
    assert timeline.peak_stash_bytes([10, 10, 1, 1]) == {
        w: schedule.peak_bytes(w, [10, 10, 1, 1]) for w in schedule.rows
    }


def test_an_update_that_cannot_come_is_named() -> None:
    schedule = Schedule(one_f_one_b([1] * 4, 6).rows, Weights.DOUBLE_BUFFERED, 1)
    with pytest.raises(ValueError, match="0F2 waits for an update of its weights"):
        simulate(schedule, [StageTime(1, 1, 1)] * 4, straight(4), free_link)


def test_no_bucket_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_buckets=0"):
        simulate(one_f_one_b([1], 1), [StageTime(1, 1)], [], free_link, num_buckets=0)
