"""Schedules do everything once, in an order that cannot deadlock, and stash no more than they must."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

import pytest

from dpart.runtime import actions, check
from dpart.runtime import schedule as module
from dpart.runtime.check import check_schedule
from dpart.runtime.schedule import (
    EXECUTABLE_SCHEDULES,
    SCHEDULES,
    Action,
    Phase,
    Replica,
    Schedule,
    Weights,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    two_buffered_weights,
    weight_versions,
    zb_h1,
)

SMALL = [r for stages in (1, 2, 3, 4) for r in itertools.product((1, 2, 3), repeat=stages)]
MAKERS: dict[str, Callable[[Sequence[int], int], Schedule]] = {
    **SCHEDULES,
    "deep": functools.partial(one_f_one_b, depth=2),
    "deeper": functools.partial(one_f_one_b, depth=3.3),
    "one chunk": functools.partial(interleaved, chunks=1),
    "three chunks": functools.partial(interleaved, chunks=3),
}
CHUNKS = {"interleaved": 2, "one chunk": 1, "three chunks": 3}


def small(name: str) -> Iterator[tuple[int, ...]]:
    """Replicas that a schedule can have."""
    if name in CHUNKS:
        yield from ((r,) * (CHUNKS[name] * workers) for r in (1, 2, 3) for workers in (1, 2, 3, 4))
    else:
        yield from SMALL


def drawing(text: str | None) -> list[str]:
    lines = [line.strip() for line in (text or "").splitlines()]
    return [line for line in lines if line and all(re.fullmatch(r"\d+[FBW]\d+", word) for word in line.split())]


def chain(num_stages: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    forward = [(s, s + 1) for s in range(num_stages - 1)]
    return forward, [(b, a) for a, b in forward]


@pytest.mark.parametrize(
    ("text", "made"),
    [
        (module.__doc__, one_f_one_b([1, 1, 1, 1], 6)),
        (one_f_one_b.__doc__, one_f_one_b([1, 1, 1], 6, depth=2)),
        (gpipe.__doc__, gpipe([1, 1], 3)),
        (interleaved.__doc__, interleaved([1, 1, 1, 1], 4)),
        (zb_h1.__doc__, zb_h1([1, 1, 1], 4)),
        (pipedream.__doc__, pipedream([2, 1], 6)),
        (two_buffered_weights.__doc__, two_buffered_weights([1, 1], 4)),
    ],
)
def test_the_drawings_are_the_schedules(text: str | None, made: Schedule) -> None:
    assert drawing(text) == str(made).splitlines()


def test_rows_of_the_page_on_actions_are_those_of_an_interleaved_schedule() -> None:
    found = re.findall(r"Replica\((\d), 0\) +((?:\d[FB]\d )+)\.\.\.", actions.__doc__ or "")
    rows = interleaved([1, 1, 1, 1], 4).rows
    assert len(found) == 2
    for worker, text in found:
        assert text.split() == [str(action) for action in rows[Replica(int(worker), 0)][:4]]


@pytest.mark.parametrize("name", MAKERS)
def test_every_small_schedule_is_complete_ordered_and_free_of_deadlock(name: str) -> None:
    for replicas in small(name):
        forward, backward = chain(len(replicas))
        skip = [(0, len(replicas) - 1)] if len(replicas) > 1 else []
        for m in range(1, 10):
            made = MAKERS[name](replicas, m)
            check_schedule(made, replicas, m, [*forward, *skip], [*backward, *((b, a) for a, b in skip)])


def test_1f1b_stashes_what_the_stages_behind_need_and_no_more() -> None:
    for replicas in SMALL:
        made = one_f_one_b(replicas, 30)
        for stage, r in enumerate(replicas):
            assert made.peak_in_flight(Replica(stage, 0)) == math.ceil(sum(replicas[stage:]) / r)


def test_a_deeper_warm_up_stashes_as_much_more() -> None:
    for p in range(1, 6):
        made = one_f_one_b([1] * p, 40, depth=2)
        assert [made.peak_in_flight(Replica(s, 0)) for s in range(p)] == [2 * (p - s) - 1 for s in range(p)]


def test_gpipe_stashes_all() -> None:
    made = gpipe([1, 2, 3], 8)
    assert [made.peak_in_flight(Replica(s, 0)) for s in range(3)] == [8, 4, 3]


def test_interleaved_workers_stash_for_their_warm_up() -> None:
    for p, v, turns in itertools.product((1, 2, 3, 5), (2, 3), (2, 3)):
        made = interleaved([1] * (p * v), p * turns, chunks=v)
        for w in range(p):
            assert made.peak_in_flight(Replica(w, 0)) == 2 * (p - w - 1) + (v - 1) * p + 1
        for m in range(1, p * turns):
            struck = interleaved([1] * (p * v), m, chunks=v)
            for w in range(p):
                assert struck.peak_in_flight(Replica(w, 0)) <= min(m * v, made.peak_in_flight(Replica(w, 0)))


def test_zb_h1_stashes_no_more_than_the_fullest_replica_of_1f1b() -> None:
    for replicas, m in itertools.product(SMALL, (1, 3, 8, 20)):
        fullest = max(one_f_one_b(replicas, m).peak_in_flight(Replica(s, 0)) for s in range(len(replicas)))
        made = zb_h1(replicas, m)
        assert max(map(made.peak_in_flight, made.rows)) == fullest


def test_bytes_of_stashes_are_added_up_over_the_stages_of_a_worker() -> None:
    sizes = [7, 1, 5, 11]
    for made in (interleaved([1] * 4, 6), zb_h1([1] * 4, 6), one_f_one_b([1] * 4, 6)):
        for worker, row in made.rows.items():
            last = "W" if "W" in str(made) else "B"
            held = [
                sum(sizes[a.stage] * ((a.phase == "F") - (a.phase == last)) for a in row[: i + 1])
                for i in range(len(row))
            ]
            assert made.peak_bytes(worker, sizes) == max(held)
            assert held[-1] == 0


@pytest.mark.parametrize("name", MAKERS)
def test_backwards_are_in_the_order_of_the_microbatches(name: str) -> None:
    for replicas in small(name):
        for row in MAKERS[name](replicas, 7).rows.values():
            for stage in range(len(replicas)):
                order = [a.microbatch for a in row if a.phase is Phase.BACKWARD and a.stage == stage]
                assert order == sorted(order)


def test_versions_of_weights_are_those_of_the_papers() -> None:
    for p in (1, 2, 4):
        made = {name: SCHEDULES[name]([1] * p, 12) for name in SCHEDULES if name != "interleaved"}
        for s in range(p):
            assert weight_versions(made["pipedream"], s) == p - s
            assert weight_versions(made["2bw"], s) == 2
            assert all(weight_versions(one, s) == 1 for one in made.values() if one.synchronous)
    assert weight_versions(pipedream([15, 1], 60), 0) == 2


def test_synchronous_are_those_with_a_flush_and_the_executor_runs_simple_ones() -> None:
    made = {name: make([1, 1], 4) for name, make in SCHEDULES.items()}
    assert {name for name, one in made.items() if not one.synchronous} == {"pipedream", "2bw"}
    for name in EXECUTABLE_SCHEDULES:
        assert made[name].synchronous
        assert all(a.stage == r.stage and a.phase in "FB" for r, row in made[name].rows.items() for a in row)


def test_a_forward_waits_for_the_update_its_weights_need() -> None:
    two = two_buffered_weights([1, 1], 8, batch=3)
    assert [two.awaited_update(0, m) for m in range(8)] == [-1] * 6 + [0, 0]
    stashed = pipedream([2, 1], 8)
    # Stage 0 has 2 in flight on each of its 2 replicas: microbatches 6 and 7 need the sum over 0 and 1.
    assert [stashed.awaited_update(0, m) for m in range(8)] == [-1] * 6 + [0, 0]
    assert [stashed.awaited_update(1, m) for m in range(5)] == [-1, -1, 0, 1, 2]
    assert {one_f_one_b([2, 1], 8).awaited_update(s, m) for s in (0, 1) for m in range(8)} == {-1}


def rows(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple(schedule.rows.values())


def words(text: str) -> tuple[Action, ...]:
    """A row from its drawing, of one-digit numbers."""
    return tuple(Action(int(word[0]), Phase(word[1]), int(word[2])) for word in text.split())


ZERO, ONE = Replica(0, 0), Replica(1, 0)
FIRST, SECOND = rows(one_f_one_b([1, 1], 2))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({ZERO: words("0F0 0B0 0F1 0B1"), ONE: words("1F0 1F1 1B0 1B1")}, "0B0 waits for 1B0"),
        ({ZERO: FIRST[:-1], ONE: SECOND}, "0B1 is missing"),
        ({ZERO: (*FIRST, Action(0, Phase.BACKWARD, 1)), ONE: SECOND}, "0B1 stands 2 times"),
        ({ZERO: (*FIRST, Action(0, Phase.FORWARD, 2)), ONE: SECOND}, "0F2 is not its work"),
        ({ZERO: FIRST, ONE: words("1F1 1B1 1F0 1B0")}, "out of order"),
        ({ZERO: FIRST, ONE: words("1B0 1F0 1F1 1B1")}, "1B0 comes before 1F0"),
        ({ZERO: FIRST, ONE: words("1F0 1B0 1W0 1F1 1B1")}, "0W0 is missing"),
        ({ZERO: words("0F0 0F1 0B0 0W0 0B1 0W1"), ONE: words("1F0 1W0 1B0 1F1 1B1 1W1")}, "1W0 comes before 1B0"),
        ({ZERO: FIRST}, "stage 1, replica 0 is missing"),
        ({ZERO: FIRST, ONE: SECOND, Replica(2, 0): ()}, "stage 2, replica 0 does not exist"),
    ],
)
def test_the_checker_names_what_is_wrong(broken: dict[Replica, tuple[Action, ...]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_schedule(Schedule(broken), (1, 1), 2, [(0, 1)], [(1, 0)])


def test_the_checker_finds_a_stage_on_two_workers() -> None:
    good = interleaved([1] * 4, 2).rows
    moved = [a for a in good[ZERO] if (a.stage, a.microbatch) == (2, 1)]
    broken = {ZERO: tuple(a for a in good[ZERO] if a not in moved), ONE: (*good[ONE], *moved)}
    with pytest.raises(ValueError, match="stage 2, replica 0 stands in the rows of 2 workers"):
        check_schedule(Schedule(broken), (1,) * 4, 2, *chain(4))


def test_the_checker_finds_weights_that_change_too_often_for_two_versions() -> None:
    """With batches of one microbatch, the third forward waits for a backward that only comes after it."""
    strict = one_f_one_b([1] * 4, 6)
    check_schedule(Schedule(strict.rows, Weights.DOUBLE_BUFFERED, 4), (1,) * 4, 6, *chain(4))
    with pytest.raises(ValueError, match="0F2 waits for 0B0"):
        check_schedule(Schedule(strict.rows, Weights.DOUBLE_BUFFERED, 1), (1,) * 4, 6, *chain(4))


def test_the_checker_is_quick_enough_for_what_it_is_asked() -> None:
    """It looks at an action again only when what it waited for has come: its looks are counted, not timed."""
    made, looks = one_f_one_b([1] * 16, 64), 0
    turns = check._Turns(made, set(chain(16)[0]), set(chain(16)[1]))
    look = turns._missing

    def counted(action: Action) -> list[Action]:
        nonlocal looks
        looks += 1
        return look(action)

    turns._missing = counted  # type: ignore[method-assign]
    assert turns.stuck() == []
    assert looks <= 3 * sum(map(len, rows(made)))


def test_what_cannot_be_a_schedule_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_microbatches=0"):
        one_f_one_b([1], 0)
    with pytest.raises(ValueError, match=r"num_replicas=\(1, 0\)"):
        zb_h1([1, 0], 2)
    with pytest.raises(ValueError, match=r"depth=0\.5"):
        one_f_one_b([1, 1], 2, depth=0.5)
    with pytest.raises(ValueError, match="cannot have 3 stages"):
        interleaved([1, 1, 1], 2)
    with pytest.raises(ValueError, match=r"same number of replicas, got num_replicas=\(1, 2\)"):
        interleaved([1, 2], 2)
    with pytest.raises(ValueError, match="at least 3 microbatches here, got 2"):
        two_buffered_weights([1, 1, 1], 8, batch=2)
