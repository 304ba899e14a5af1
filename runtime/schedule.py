"""Pipeline schedules: which worker computes which microbatch, and in what order.

A schedule is plain data, built without devices or process groups. The executor walks it, the simulator
times it, the cost model counts stashes in it, the tests check it: nothing else describes 1F1B.

1F1B over 4 stages and 6 microbatches, one row a replica (``2F0`` is stage 2, forward, microbatch 0)::

    0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
    3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from dpart.runtime.actions import Action as Action
from dpart.runtime.actions import Phase as Phase
from dpart.runtime.actions import Replica as Replica
from dpart.runtime.actions import Schedule as Schedule
from dpart.runtime.actions import Weights as Weights
from dpart.runtime.actions import weight_versions as weight_versions


def one_f_one_b(num_replicas: Sequence[int], num_microbatches: int, *, depth: float = 1.0) -> Schedule:
    """1F1B with a flush, stage ``s`` having ``num_replicas[s]`` replicas (Narayanan et al., PipeDream, 2019).

    Replica ``q`` of a stage with ``r`` takes microbatches ``q, q + r, q + 2r, ...`` (round robin).
    After its warm-up it alternates one forward and one backward.

    A warm-up deeper than the stages behind need hides the latency of links, and stashes more. Over 3 stages and
    6 microbatches, with `depth` 2::

        0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5

    Args:
        depth: Microbatches that a warm-up sends ahead for every replica behind the stage, at least 1: with one
            replica a stage, ``p`` stages and ``depth`` 2, stage ``s`` has ``2 (p - s) - 1`` in flight.
    """
    if not (math.isfinite(depth) and depth >= 1):
        raise ValueError(f"The depth of a warm-up is at least 1, got depth={depth}; 1 is strict 1F1B.")
    return _round_robin(num_replicas, num_microbatches, lambda stage: _warm_up(num_replicas, stage, depth))


def gpipe(num_replicas: Sequence[int], num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order (Huang et al., GPipe, 2019).

    Over 2 stages and 3 microbatches::

        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
    """
    return _round_robin(num_replicas, num_microbatches, lambda stage: num_microbatches)


def interleaved(num_replicas: Sequence[int], num_microbatches: int, *, chunks: int = 2) -> Schedule:
    """1F1B on workers with several stages each (Narayanan et al., Megatron-LM, 2021).

    With ``p`` workers worker ``w`` runs stages ``w, w + p, w + 2p, ...``, and takes ``p`` microbatches through one
    stage before it turns to the next one. The bubble shrinks by the number of stages a worker has.

    Over 4 stages on 2 workers and 4 microbatches::

        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    Where ``p`` does not divide the microbatches, those missing are struck from the schedule of the next multiple.
    A worker waits only for other actions of the same microbatch, so what is left can be run like the whole.

    Args:
        num_replicas: Of all stages; a multiple of `chunks` of them, all with the same number of replicas.
        chunks: Stages a worker.
    """
    _check(num_replicas, num_microbatches)
    if chunks < 1 or len(num_replicas) % chunks:
        raise ValueError(
            f"An interleaved schedule with {chunks} stages a worker cannot have {len(num_replicas)} stages; "
            f"give a multiple of chunks={chunks}, or change chunks."
        )
    if len(set(num_replicas)) != 1:
        raise ValueError(
            "All stages of an interleaved schedule have the same number of replicas, "
            f"got num_replicas={tuple(num_replicas)}."
        )
    num_workers, r = len(num_replicas) // chunks, num_replicas[0]
    return Schedule(
        {
            Replica(w, q): tuple(_interleaved_row(w, num_workers, chunks, range(q, num_microbatches, r)))
            for w in range(num_workers)
            for q in range(r)
        }
    )


def zb_h1(num_replicas: Sequence[int], num_microbatches: int) -> Schedule:
    """1F1B whose gradients of parameters wait for idle time (Qi et al., Zero Bubble, 2023, schedule H1).

    Over 3 stages and 4 microbatches (``0W1`` computes the gradients of stage 0's parameters)::

        0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
        1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
        2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3

    Later stages put off more of them. No replica holds more microbatches than the fullest one of 1F1B does.
    """
    base = one_f_one_b(num_replicas, num_microbatches)
    held = {replica: base.peak_in_flight(replica) for replica in base.rows}

    def put_off(replica: Replica) -> int:
        ahead = math.ceil(sum(num_replicas[: replica.stage]) / num_replicas[replica.stage])
        return min(ahead, max(held.values()) - held[replica])

    return Schedule(
        {replica: tuple(_with_weight_backwards(row, put_off(replica))) for replica, row in base.rows.items()}
    )


def pipedream(num_replicas: Sequence[int], num_microbatches: int) -> Schedule:
    """1F1B without a flush: weights change after every backward (Narayanan et al., PipeDream, 2019).

    The first microbatches of a run that goes on and on; in it a stage keeps a version of its weights for every
    microbatch in flight. Over a stage with 2 replicas and one with 1::

        0F0 0F2 0B0 0F4 0B2 0B4
        0F1 0F3 0B1 0F5 0B3 0B5
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5
    """
    return Schedule(one_f_one_b(num_replicas, num_microbatches).rows, Weights.STASHED)


def two_buffered_weights(num_replicas: Sequence[int], num_microbatches: int, *, batch: int | None = None) -> Schedule:
    """1F1B without a flush and with two versions of weights (Narayanan et al., PipeDream-2BW, 2021).

    Weights change after every batch of microbatches, while the next batch is on its way with the weights from
    before. Over 2 stages, batches of 2::

        0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    Args:
        batch: Microbatches; at least as many as are in flight in all, which is the default.
    """
    rows = one_f_one_b(num_replicas, num_microbatches).rows
    least = max(r * (1 + _warm_up(num_replicas, stage, 1)) for stage, r in enumerate(num_replicas))
    if batch is not None and batch < least:
        raise ValueError(f"Two versions of weights need batches of at least {least} microbatches here, got {batch}.")
    return Schedule(rows, Weights.DOUBLE_BUFFERED, least if batch is None else batch)


class _Maker(Protocol):
    def __call__(self, num_replicas: Sequence[int], num_microbatches: int) -> Schedule: ...


SCHEDULES: Mapping[str, _Maker] = MappingProxyType(
    {
        "1f1b": one_f_one_b,
        "gpipe": gpipe,
        "interleaved": interleaved,
        "zb-h1": zb_h1,
        "pipedream": pipedream,
        "2bw": two_buffered_weights,
    }
)
"""Every schedule that can be planned with."""

EXECUTABLE_SCHEDULES = ("1f1b", "gpipe")
"""Those the executor runs: synchronous, one stage a worker, forwards and whole backwards."""


def _check(num_replicas: Sequence[int], num_microbatches: int) -> None:
    if num_microbatches < 1 or not num_replicas or any(r < 1 for r in num_replicas):
        raise ValueError(
            "A schedule needs at least one stage, one microbatch and one replica a stage, got "
            f"num_microbatches={num_microbatches}, num_replicas={tuple(num_replicas)}."
        )


def _warm_up(num_replicas: Sequence[int], stage: int, depth: float) -> int:
    """Forwards a replica does ahead, so that every replica behind it has `depth` microbatches to work on."""
    return math.ceil(depth * sum(num_replicas[stage + 1 :]) / num_replicas[stage])


def _round_robin(num_replicas: Sequence[int], num_microbatches: int, warm_up: Callable[[int], int]) -> Schedule:
    """Each replica's row; `warm_up` gives the forwards that a replica of a stage does before it alternates."""
    _check(num_replicas, num_microbatches)
    return Schedule(
        {
            Replica(stage, q): tuple(_row(stage, range(q, num_microbatches, r), warm_up(stage)))
            for stage, r in enumerate(num_replicas)
            for q in range(r)
        }
    )


def _row(stage: int, microbatches: Sequence[int], warm_up: int) -> Iterator[Action]:
    warm_up = min(warm_up, len(microbatches))
    for m in microbatches[:warm_up]:
        yield Action(stage, Phase.FORWARD, m)
    for i, m in enumerate(microbatches):
        if warm_up + i < len(microbatches):
            yield Action(stage, Phase.FORWARD, microbatches[warm_up + i])
        yield Action(stage, Phase.BACKWARD, m)


def _interleaved_row(worker: int, num_workers: int, chunks: int, microbatches: Sequence[int]) -> Iterator[Action]:
    turns = math.ceil(len(microbatches) / num_workers)
    order = [
        (chunk, turn * num_workers + i) for turn in range(turns) for chunk in range(chunks) for i in range(num_workers)
    ]
    forwards = [(worker + chunk * num_workers, i) for chunk, i in order]
    backwards = [(worker + (chunks - 1 - chunk) * num_workers, i) for chunk, i in order]
    warm_up = min(2 * (num_workers - worker - 1) + (chunks - 1) * num_workers, len(order))
    row = [(Phase.FORWARD, *forward) for forward in forwards[:warm_up]]
    for n, backward in enumerate(backwards):
        row += [(Phase.FORWARD, *forward) for forward in forwards[warm_up + n : warm_up + n + 1]]
        row.append((Phase.BACKWARD, *backward))
    return (Action(stage, phase, microbatches[i]) for phase, stage, i in row if i < len(microbatches))


def _with_weight_backwards(row: Sequence[Action], put_off: int) -> Iterator[Action]:
    waiting: list[Action] = []
    for action in row:
        yield action
        if action.phase is Phase.BACKWARD:
            waiting.append(Action(action.stage, Phase.WEIGHT_BACKWARD, action.microbatch))
            if len(waiting) > put_off:
                yield waiting.pop(0)
    yield from waiting
