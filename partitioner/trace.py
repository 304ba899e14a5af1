"""A `Timeline` as a Chrome trace: a JSON file that Perfetto and chrome://tracing draw.

One row a worker with its actions, an arrow for every message, and one row for the all-reduces of every stage::

    workers      stage 0, replica 0   [F0][F1]      [B0][F2] ...
                 stage 1, replica 0       [F0][B0][F1] ...
    all-reduce   stage 0                                      [1/2][2/2]

Times are in microseconds, as the format has them.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

from dpart.partitioner.timeline import Span, Timeline
from dpart.runtime.files import write_text
from dpart.runtime.schedule import Phase, Replica

_CATEGORIES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.WEIGHT_BACKWARD: "weight backward"}
_WORKERS, _ALL_REDUCES = 0, 1


def write_trace(timeline: Timeline, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Writes the trace of a timeline, atomically.

    Raises:
        UserError: The file exists and `force` is false, or its folder cannot be written.
    """
    write_text(json.dumps(chrome_trace(timeline), allow_nan=False) + "\n", path, force=force)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as the JSON object that its file holds."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*_names(timeline), *_actions(timeline), *_messages(timeline), *_all_reduces(timeline)],
        "otherData": {"step_seconds": timeline.step_seconds, "bubble": timeline.bubble},
    }


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _WORKERS, 0, "workers")
    for row, worker in enumerate(timeline.spans):
        yield _named("thread_name", _WORKERS, row, _title(timeline, worker))
    if any(timeline.buckets):
        yield _named("process_name", _ALL_REDUCES, 0, "all-reduce")
        for stage, buckets in enumerate(timeline.buckets):
            if buckets:
                yield _named("thread_name", _ALL_REDUCES, stage, f"stage {stage}")


def _title(timeline: Timeline, worker: Replica) -> str:
    stages = sorted({worker.stage} | {action.stage for action in timeline.schedule.rows[worker]})
    which = "stage" if len(stages) == 1 else "stages"
    return f"{which} {', '.join(map(str, stages))}, replica {worker.index}"


def _named(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}


def _complete(name: str, category: str, process: int, row: int, times: tuple[float, float]) -> dict[str, Any]:
    start, end = times
    ts = start * 1e6
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": row, "ts": ts, "dur": end * 1e6 - ts}


def _actions(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for row, spans in enumerate(timeline.spans.values()):
        for span in spans:
            action, times = span.action, (span.start_seconds, span.end_seconds)
            event = _complete(f"{action.phase}{action.microbatch}", _CATEGORIES[action.phase], _WORKERS, row, times)
            yield event | {"args": {"stage": action.stage, "microbatch": action.microbatch}}


def _messages(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Arrows: from the middle of the action that sends, where the format finds it, to the start of the other."""
    at: dict[Any, tuple[int, Span]] = {}
    for row, spans in enumerate(timeline.spans.values()):
        at |= {span.action: (row, span) for span in spans}
    for number, message in enumerate(timeline.messages):
        (source_row, source), (target_row, target) = at[message.source], at[message.target]
        same = {"name": "message", "cat": "message", "id": number, "pid": _WORKERS}
        middle = (source.start_seconds + source.end_seconds) / 2
        sent = {"sent": message.start_seconds * 1e6, "arrived": message.end_seconds * 1e6}
        yield {"ph": "s", **same, "tid": source_row, "ts": middle * 1e6, "args": sent}
        yield {"ph": "f", "bp": "e", **same, "tid": target_row, "ts": target.start_seconds * 1e6}


def _all_reduces(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for stage, buckets in enumerate(timeline.buckets):
        for i, times in enumerate(buckets, start=1):
            yield _complete(f"{i}/{len(buckets)}", "all-reduce", _ALL_REDUCES, stage, times)
