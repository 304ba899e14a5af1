"""The trace of a timeline holds all of it, in microseconds, and is written like any other file."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpart.partitioner.simulate import Flow, Link, StageTime, Timeline, simulate
from dpart.partitioner.trace import write_trace
from dpart.runtime.errors import UserError
from dpart.runtime.schedule import SCHEDULES


def timeline(kind: str, replicas: tuple[int, ...]) -> Timeline:
    times = [StageTime(0.5 + s, 2.0, 1.5, 0.75) for s in range(len(replicas))]
    flows = [Flow(s, s + 1, 8, 4) for s in range(len(replicas) - 1)]
    return simulate(SCHEDULES[kind](replicas, 5), times, flows, lambda a, b: Link(0.25, 16.0), num_buckets=2)


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


CASES = [("1f1b", (2, 1, 3)), ("interleaved", (2, 2, 2, 2)), ("zb-h1", (1, 2)), ("pipedream", (2, 1))]


@pytest.mark.parametrize(("kind", "replicas"), CASES)
def test_every_action_is_in_its_workers_row(kind: str, replicas: tuple[int, ...], tmp_path: Path) -> None:
    played = timeline(kind, replicas)
    write_trace(played, tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    titles = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    assert len(titles) == len(played.spans)
    categories = {"F": "forward", "B": "backward", "W": "weight backward"}
    for row, (worker, spans) in enumerate(played.spans.items()):
        assert titles[row].endswith(f"replica {worker.index}") and str(worker.stage) in titles[row]
        drawn = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, row)]
        assert len(drawn) == len(spans)
        for event, span in zip(drawn, spans, strict=True):
            assert event["name"] == str(span.action)[len(str(span.action.stage)) :]
            assert event["args"] == {"stage": span.action.stage, "microbatch": span.action.microbatch}
            assert event["cat"] == categories[event["name"][0]]
            assert event["ts"] == pytest.approx(span.start_seconds * 1e6)
            assert event["ts"] + event["dur"] == pytest.approx(span.end_seconds * 1e6)


@pytest.mark.parametrize(("kind", "replicas"), CASES)
def test_every_message_is_an_arrow_from_inside_one_action_to_the_start_of_another(
    kind: str, replicas: tuple[int, ...], tmp_path: Path
) -> None:
    played = timeline(kind, replicas)
    write_trace(played, tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    boxes = [(e["tid"], e["ts"], e["ts"] + e["dur"], e) for e in events if e["ph"] == "X" and e["pid"] == 0]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() == set(range(len(played.messages)))
    assert len(starts) == 5 * 2 * (len(replicas) - 1)
    for number, message in enumerate(played.messages):
        start, end = starts[number], ends[number]
        (source,) = [e for tid, a, b, e in boxes if tid == start["tid"] and a < start["ts"] < b]
        (target,) = [e for tid, a, _, e in boxes if tid == end["tid"] and a == end["ts"]]
        assert source["args"] == {"stage": message.source.stage, "microbatch": message.source.microbatch}
        assert target["args"] == {"stage": message.target.stage, "microbatch": message.source.microbatch}
        assert start["args"]["arrived"] == pytest.approx(message.end_seconds * 1e6)
        assert start["args"]["arrived"] <= end["ts"] * (1 + 1e-9)
        assert start["args"]["sent"] == pytest.approx(message.start_seconds * 1e6)


def test_every_bucket_has_its_stages_row(tmp_path: Path) -> None:
    played = timeline("1f1b", (2, 1, 3))
    write_trace(played, tmp_path / "trace.json")
    drawn = [e for e in read(tmp_path / "trace.json") if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["tid"], e["name"]) for e in drawn] == [(s, n) for s in range(3) for n in ("1/2", "2/2")]
    wanted = [bucket for stage in played.buckets for bucket in stage]
    for event, (start, end) in zip(drawn, wanted, strict=True):
        assert event["ts"] == pytest.approx(start * 1e6)
        assert event["dur"] == pytest.approx((end - start) * 1e6)


def test_a_file_that_exists_stays(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        write_trace(timeline("gpipe", (1, 1)), path)
    assert path.read_text() == "mine"
    write_trace(timeline("gpipe", (1, 1)), path, force=True)
    assert read(path)
