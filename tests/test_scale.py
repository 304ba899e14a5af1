"""`benchmarks/scale.py`: a row is what the command gives, whatever the devices; a failure is a row, too."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpart.partitioner.hosts import find_topology
from dpart.partitioner.partition import partition
from dpart.profiler.profile import Profile
from dpart.runtime.files import write_file

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import scale

    return scale


@pytest.fixture
def tiny(chain_profile: Callable[..., Profile]) -> Profile:
    """Twelve layers in 16 bits."""
    profile = chain_profile([1e-3] * 12)
    halves = tuple(
        replace(p, dtype="bfloat16", shape=(p.size_bytes // 2,), trainable=True) for p in profile.graph.parameters
    )
    return replace(profile, graph=replace(profile.graph, parameters=halves), batch_size=64)


def test_a_row_is_what_the_command_gives(tiny: Profile, tmp_path: Path) -> None:
    write_file(tiny, tmp_path / "tiny.json")
    command = [sys.executable, BENCHMARKS / "scale.py", "--profile", tmp_path / "tiny.json"]
    ran = subprocess.run(
        [*command, "--devices", "8", "3", "--batch-size", "32", "--json"], capture_output=True, text=True, check=True
    )
    rows = json.loads(ran.stdout)["rows"]
    assert [row["devices"] for row in rows] == [8, 3]
    for row in rows:
        plan = partition(tiny, find_topology(f"{row['devices']}xh100"), optimizer="adam-mixed", batch_size=32)
        assert plan.certificate is not None
        assert list(row) == ["model", "devices", "seconds", "peak_rss_bytes", "gap", "predicted_step_seconds"]
        assert row["model"] == plan.model
        assert row["predicted_step_seconds"] == plan.step_seconds
        assert row["gap"] == plan.certificate.gap
        assert row["seconds"] > 0
        # An interpreter with numpy in it takes tens of megabytes, not of kilobytes or gigabytes.
        assert 20e6 < row["peak_rss_bytes"] < 2e9
    # The memory of this process, or of the row before, is in none.
    assert rows[1]["peak_rss_bytes"] < 1.5 * rows[0]["peak_rss_bytes"]


def test_a_row_that_fails_says_why(tiny: Profile, tmp_path: Path) -> None:
    wide = tuple(replace(p, dtype="float32", shape=(p.size_bytes // 4,)) for p in tiny.graph.parameters)
    write_file(replace(tiny, graph=replace(tiny.graph, parameters=wide)), tmp_path / "wide.json")
    command = [sys.executable, BENCHMARKS / "scale.py", "--profile", tmp_path / "wide.json", "--devices", "8"]
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    rows = json.loads(ran.stdout)["rows"]
    assert [row["devices"] for row in rows] == [8]
    assert "adam-mixed" in rows[0]["error"] and rows[0]["seconds"] is None


def test_the_topology_has_so_many_devices(scale: Any) -> None:
    for devices in (1, 7, 8, 9, 1000, 1021, 16384):
        topology = find_topology(scale.topology_word(devices))
        assert topology.num_devices == devices
        assert topology.group_sizes[0] == min(8, devices)


def test_the_table_has_a_line_a_row(scale: Any) -> None:
    good = {"model": "m", "devices": 1024, "seconds": 2.5, "cpu_seconds": 2.2, "peak_rss_bytes": 3e8, "gap": 1e-3,
            "predicted_step_seconds": 1.5}  # fmt: skip
    bad = dict.fromkeys(good) | {"model": "m", "devices": 7, "error": "a long story\nno plan fits"}
    lines = scale.table([good, bad])
    assert lines[2] == "| m | 1,024 | 2.5 | 2.2 | 300 | 0.1000 % | 1.50 |"
    assert lines[3].startswith("| m | 7 | failed: no plan fits |")
