"""Schedules do everything once, in an order that cannot deadlock, and stash no more than they must."""

import itertools
import math
import re

import pytest

from dpart.runtime import schedule as module
from dpart.runtime.check import check_schedule
from dpart.runtime.schedule import SCHEDULES, Action, Phase, Replica, Schedule, gpipe, one_f_one_b

SMALL = [r for stages in (1, 2, 3, 4) for r in itertools.product((1, 2, 3), repeat=stages)]


def drawing(text: str | None) -> list[str]:
    lines = [line.strip() for line in (text or "").splitlines()]
    return [line for line in lines if line and all(re.fullmatch(r"\d+[FB]\d+", word) for word in line.split())]


def chain(num_stages: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    forward = [(s, s + 1) for s in range(num_stages - 1)]
    return forward, [(b, a) for a, b in forward]


def test_the_drawings_are_the_schedules() -> None:
    assert str(one_f_one_b([1, 1, 1, 1], 6)).splitlines() == drawing(module.__doc__)
    assert str(gpipe([1, 1], 3)).splitlines() == drawing(gpipe.__doc__)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_small_schedule_is_complete_ordered_and_free_of_deadlock(name: str) -> None:
    for replicas in SMALL:
        forward, backward = chain(len(replicas))
        skip = [(0, len(replicas) - 1)] if len(replicas) > 1 else []
        for m in range(1, 10):
            made = SCHEDULES[name](replicas, m)
            check_schedule(made, replicas, m, [*forward, *skip], [*backward, *((b, a) for a, b in skip)])


def test_1f1b_stashes_what_the_stages_behind_need_and_no_more() -> None:
    for replicas in SMALL:
        made = one_f_one_b(replicas, 30)
        for stage, r in enumerate(replicas):
            assert made.peak_in_flight(Replica(stage, 0)) == math.ceil(sum(replicas[stage:]) / r)


def test_backwards_are_in_the_order_of_the_microbatches() -> None:
    for name, replicas in itertools.product(SCHEDULES, SMALL):
        for row in SCHEDULES[name](replicas, 7).rows.values():
            order = [a.microbatch for a in row if a.phase is Phase.BACKWARD]
            assert order == sorted(order)


def test_the_checker_finds_a_deadlock_a_loss_and_a_repetition() -> None:
    good = one_f_one_b([1, 1], 2)
    rows = dict(good.rows)
    first, second = rows[Replica(0, 0)], rows[Replica(1, 0)]
    waiting = (*first[:1], *sorted(first[1:], key=lambda a: a.phase is Phase.FORWARD))
    for broken in (
        {Replica(0, 0): waiting, Replica(1, 0): (second[0], second[2], second[1], second[3])},
        {Replica(0, 0): first[:-1], Replica(1, 0): second},
        {Replica(0, 0): (*first, Action(0, Phase.BACKWARD, 1)), Replica(1, 0): second},
    ):
        with pytest.raises(ValueError, match="cannot be run"):
            check_schedule(Schedule(broken), (1, 1), 2, [(0, 1)], [(1, 0)])


def test_no_microbatch_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_microbatches=0"):
        one_f_one_b([1], 0)
