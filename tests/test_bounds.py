"""Bounds are never above the simulator, formulas are what it says where they promise to be."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dpart.partitioner.bounds import Pipeline, Transfer, interleaved_lower_bound, step_lower_bound
from dpart.partitioner.formulas import (
    asynchronous_period,
    gpipe_seconds,
    interleaved_seconds,
    steady_period,
    upper_bound,
    zb_h1_seconds,
)
from dpart.partitioner.simulate import Flow, Link, StageTime, Timeline, simulate
from dpart.runtime.schedule import SCHEDULES, Replica, Schedule, interleaved, one_f_one_b, two_buffered_weights, zb_h1

ABOUT = 1 + 1e-9


def straight(num_stages: int) -> list[Flow]:
    return [Flow(s, s + 1, 0, 0) for s in range(num_stages - 1)]


def free_link(source: Replica, target: Replica) -> Link:
    return Link(0.0, math.inf)


def drawn(
    rng: random.Random, schedule: Schedule, replicas: Sequence[int], m: int, *, queues: bool = True, gaps: float = 0.0
) -> tuple[Timeline, Pipeline]:
    """A random step on links between neighbours, as the simulator plays it and as the bounds see it.

    Args:
        queues: Whether messages have a bandwidth, smaller last microbatches and flows past a stage occur.
        gaps: How often a stage does not wait for its neighbour.
    """
    p = len(replicas)
    times = []
    for _ in range(p):
        weights = rng.uniform(0, 1)
        times.append(
            StageTime(rng.uniform(0, 1), weights + rng.uniform(0, 1), rng.choice([0, rng.uniform(0, 4)]), weights)
        )
    links = [
        Link(
            rng.choice([0.0, rng.uniform(0, 0.5)]), rng.choice([math.inf, rng.uniform(0.5, 9)]) if queues else math.inf
        )
        for _ in range(p)
    ]
    sizes = [[None if rng.random() < gaps else rng.randint(0, 2) for _ in range(2)] for _ in range(p - 1)]
    flows = [Flow(s, s + 1, forward, backward) for s, (forward, backward) in enumerate(sizes)]
    if queues and p > 2 and rng.random() < 0.3:
        flows.append(Flow(0, p - 1, 1, 1, 1))
    last = rng.choice([1.0, 0.3]) if queues else 1.0
    buckets = rng.choice([1, 2, 6])

    def link(a: Replica, b: Replica) -> Link:
        return links[min(a.stage, b.stage)] if abs(a.stage - b.stage) == 1 else slowest

    slowest = Link(max(way.latency_seconds for way in links), min(way.bandwidth_bytes_per_second for way in links))
    # Neighbours among the stages of an interleaved schedule may be first and last worker.
    between = [links[s] if (Replica(s + 1, 0) in schedule.rows) else Link(0.0, math.inf) for s in range(p - 1)]
    ways = [
        [
            None if size is None else Transfer(way.latency_seconds, size / way.bandwidth_bytes_per_second)
            for size, way in zip(column, between, strict=True)
        ]
        for column in zip(*sizes, strict=True)
    ] or [[], []]
    pipeline = Pipeline(
        stages=times,
        num_replicas=replicas,
        in_flight=[schedule.peak_in_flight(Replica(s, 0)) if Replica(s, 0) in schedule.rows else m for s in range(p)],
        num_microbatches=m,
        forward=ways[0],
        backward=ways[1],
        last_microbatch=last,
        num_buckets=buckets,
    )
    return simulate(schedule, times, flows, link, last_microbatch=last, num_buckets=buckets), pipeline


@pytest.mark.parametrize("kind", ["1f1b", "deep", "gpipe", "zb-h1"])
def test_lower_bounds_of_a_step_are_below_it(kind: str) -> None:
    """Replicas of any number, latencies and queues, skips, gaps, small last microbatches, overlapped all-reduces."""
    rng, tight = random.Random(kind), 0
    for _ in range(1500):
        replicas, m = [rng.choice([1, 1, 2, 3]) for _ in range(rng.randint(1, 6))], rng.randint(1, 16)
        made = one_f_one_b(replicas, m, depth=rng.uniform(1, 3)) if kind == "deep" else SCHEDULES[kind](replicas, m)
        played, pipeline = drawn(rng, made, replicas, m, gaps=rng.choice([0, 0.2]))
        pipeline = replace(pipeline, weights_apart=kind == "zb-h1")
        if kind == "zb-h1" and rng.random() < 0.5:
            strict = one_f_one_b(replicas, m)
            warm = [strict.peak_in_flight(Replica(s, 0)) for s in range(len(replicas))]
            pipeline = replace(pipeline, in_flight=warm)
        bound = step_lower_bound(pipeline)
        assert bound <= played.step_seconds * ABOUT, (replicas, m)
        tight += bound > 0.9 * played.step_seconds
    assert tight > 500


def test_lower_bound_of_an_interleaved_step_is_below_it_and_reached() -> None:
    rng, ratios = random.Random(4), []
    for _ in range(1000):
        workers, chunks, r, m = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 14)
        replicas = [r] * (workers * chunks)
        played, pipeline = drawn(rng, interleaved(replicas, m, chunks=chunks), replicas, m, gaps=rng.choice([0, 0.2]))
        bound = interleaved_lower_bound(pipeline, chunks)
        assert bound <= played.step_seconds * ABOUT, (workers, chunks, r, m)
        ratios.append(bound / played.step_seconds)
    assert max(ratios) > 1 - 1e-9


def test_1f1b_of_any_depth_lies_between_its_bounds() -> None:
    """Replicas may stand side by side, all-reduces are counted; only queues and skips are not."""
    rng = random.Random(6)
    for _ in range(2000):
        r, m = rng.randint(1, 3), rng.randint(1, 24)
        replicas = [r] * rng.randint(1, 6)
        made = one_f_one_b(replicas, m, depth=rng.choice([1, 1, 1.5, 2]))
        played, pipeline = drawn(rng, made, replicas, m, queues=False)
        assert step_lower_bound(pipeline) <= played.step_seconds * ABOUT
        assert played.step_seconds <= upper_bound(pipeline) * ABOUT, (replicas, m)


def test_steady_period_and_one_trip_are_no_upper_bound() -> None:
    """Forwards are slow in the middle, backwards at the ends: the step takes 2 % more than the simple formula."""
    f, b, m = [0.06, 0.69, 0.89, 0.1], [0.99, 0.19, 0.41, 0.01], 14
    times = [StageTime(*fb) for fb in zip(f, b, strict=True)]
    played = simulate(one_f_one_b([1] * 4, m), times, straight(4), free_link)
    free = [Transfer(0.0)] * 3
    pipeline = Pipeline(times, [1] * 4, [4, 3, 2, 1], m, free, free)
    assert steady_period(pipeline) == pytest.approx(1.3)
    simple = (m - 1) * steady_period(pipeline) + sum(f) + sum(b)
    assert 1.02 * simple < played.step_seconds <= upper_bound(pipeline) * ABOUT


@pytest.mark.parametrize("depth", [1, 1.5, 2])
def test_steady_period_of_1f1b_is_its_formula(depth: float) -> None:
    rng = random.Random(7)
    for _ in range(12):
        replicas, m = [rng.randint(1, 2)] * rng.randint(1, 6), 400
        played, pipeline = drawn(rng, one_f_one_b(replicas, m, depth=depth), replicas, m, queues=False)
        assert played.period_seconds == pytest.approx(steady_period(pipeline), rel=1e-6)


def test_a_step_of_gpipe_is_its_formula_without_queues_and_longer_with_them() -> None:
    rng = random.Random(8)
    for _ in range(600):
        r, queues = rng.randint(1, 2), rng.random() < 0.5
        replicas, m = [r] * rng.randint(1, 6), r * rng.randint(1, 9)
        played, pipeline = drawn(rng, SCHEDULES["gpipe"](replicas, m), replicas, m, queues=queues)
        if not queues:
            assert played.step_seconds == pytest.approx(gpipe_seconds(pipeline), rel=1e-9)
        elif pipeline.last_microbatch == 1:
            assert gpipe_seconds(pipeline) <= played.step_seconds * ABOUT


def even(schedule: Schedule, time: StageTime, num_stages: int) -> Timeline:
    return simulate(schedule, [time] * num_stages, straight(num_stages), free_link)


def test_an_interleaved_step_is_its_formula_for_whole_turns_and_longer_for_others() -> None:
    for p, v, m in itertools.product(range(1, 6), range(1, 5), range(1, 16)):
        step = even(interleaved([1] * (p * v), m, chunks=v), StageTime(1, 2), p * v).step_seconds
        formula = interleaved_seconds(p, v, m, 1, 2)
        assert step == pytest.approx(formula) if m % p == 0 else step >= formula - 1e-9, (p, v, m)


def test_a_step_of_zb_h1_is_its_formula_where_weight_backwards_are_short_and_longer_elsewhere() -> None:
    for p, m, f, b, w in itertools.product(range(1, 6), range(1, 12), (1, 2, 3), (1, 2, 3), (0, 1, 2, 3)):
        time = StageTime(f, b + w, 0, w)
        step, formula = even(zb_h1([1] * p, m), time, p).step_seconds, zb_h1_seconds(p, m, time)
        if m >= p and w <= min(f, b):
            assert step == pytest.approx(formula), (p, m, f, b, w)
        assert step >= formula - 1e-9, (p, m, f, b, w)
        if m >= p and w <= min(f, b):
            assert step <= even(one_f_one_b([1] * p, m), time, p).step_seconds


@pytest.mark.parametrize("kind", ["pipedream", "2bw"])
def test_asynchronous_period_is_that_of_the_slowest_resource(kind: str) -> None:
    """Computing, sending, all-reducing: never faster, just so where messages are free; start-up is worth a percent."""
    rng, binding = random.Random(kind), set()
    for _ in range(80):
        replicas, m = [rng.randint(1, 3)] * rng.randint(1, 4), 360
        free = rng.random() < 0.6
        if not free:
            replicas = [rng.randint(1, 3) for _ in replicas]
        least = max(r * one_f_one_b(replicas, m).peak_in_flight(Replica(s, 0)) for s, r in enumerate(replicas))
        made = SCHEDULES[kind](replicas, m)
        if kind == "2bw" and free:
            made = two_buffered_weights(replicas, m, batch=least + replicas[0] * rng.randint(0, 3))
        updates = [made.microbatches_per_update(s) for s in range(len(replicas))]
        played, pipeline = drawn(rng, made, replicas, m)
        if free:
            hops = [Transfer(0.0)] * (len(replicas) - 1)
            pipeline = replace(pipeline, forward=hops, backward=hops)
            played = simulate(made, pipeline.stages, straight(len(replicas)), free_link)
        period = asynchronous_period(pipeline, updates)
        assert period <= played.period_seconds * (1 + 1e-2)
        in_time = kind == "pipedream" or all(
            t.all_reduce_seconds <= (u - r * (w - 1)) * period
            for t, u, r, w in zip(pipeline.stages, updates, replicas, pipeline.in_flight, strict=True)
        )
        if free and in_time:
            assert played.period_seconds == pytest.approx(period, rel=1e-2)
            binding.add(period == max(t.all_reduce_seconds / u for t, u in zip(pipeline.stages, updates, strict=True)))
    assert binding == {True, False}
