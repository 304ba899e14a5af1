"""Our searcher on PipeDream's own profiles: the values of the released optimizer, row by row.

DPART_PEERS names the folder with the published inputs and what the published programs said of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FOLDER = Path(os.environ.get("DPART_PEERS", "")) / "pipedream"
ROWS: list[dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text()) if "DPART_PEERS" in os.environ else []

needs_peers = pytest.mark.skipif(not ROWS, reason="DPART_PEERS is unset: the published inputs are not here")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import peers

    return peers


def answer(peers: Any, capsys: pytest.CaptureFixture[str], path: Path, arguments: str) -> dict[str, Any]:
    assert peers.main(["pipedream", str(path), *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@needs_peers
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['input']} {row['args']}")
def test_values_and_states_are_those_of_the_released_program(
    row: dict[str, Any], peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(peers, capsys, FOLDER / f"{row['input']}.graph.txt", row["args"])
    assert found["states"] == row["states"]
    assert found["value"] == pytest.approx(row["seconds_per_minibatch"], rel=1e-9)
    for level in found["config"]:
        ends = [0, *(stage["states"][1] for stage in level["stages"])]
        assert [*(stage["states"][0] for stage in level["stages"]), row["states"]] == ends


def node(name: str, milliseconds: float = 1, activation: str = "8.0", parameters: float = 0, kind: str = "Conv") -> str:
    times = f"forward_compute_time={milliseconds}, backward_compute_time={milliseconds}"
    return f"{name} -- {kind} -- {times}, activation_size={activation}, parameter_size={parameters}"


def edges(*pairs: str) -> list[str]:
    return [f"\t{pair[0]} -- {pair[1]}" for pair in pairs]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_chain_by_hand(tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Three layers of 2, 2 and 4 ms; inputs and unused getitems leave no state."""
    path = write(
        tmp_path / "graph.txt",
        node("x", 0, kind="Input0"),
        node("a", 1, "[6e6; 2e6]", parameters=1e6),
        node("b", 1, "4e6", parameters=1e6),
        node("g", 9, kind="__getitem__(1)"),
        node("c", 2, "1e6", parameters=1e6),
        *edges("xa", "ab", "bc", "bg"),
    )
    pipeline = answer(peers, capsys, path, "-n 2 --straight_pipeline")
    assert pipeline["value"] == pytest.approx(4e-3)
    assert pipeline["states"] == 3
    assert pipeline["config"][0]["stages"][0]["states"] == [0, 2]
    # Transfers at 1 GB/s, twice, hidden behind compute: 8 ms behind b, 16 ms behind a.
    assert answer(peers, capsys, path, "-n 2 --straight_pipeline --activation_compression_ratio 1")[
        "value"
    ] == pytest.approx(8e-3)
    # Replicated: (8 ms + 4 * 1 * 3 MB / (1 GB/s * 2)) / 2.
    assert answer(peers, capsys, path, "-n 2 --activation_compression_ratio 1")["value"] == pytest.approx(7e-3)
    # One machine behind the first stage, so it may hold its activations and weights once: a alone has 9 MB.
    memory = "-n 2 --straight_pipeline --use_memory_constraint -s"
    assert answer(peers, capsys, path, f"{memory} 14e6")["value"] == pytest.approx(4e-3)
    assert answer(peers, capsys, path, f"{memory} 13.9e6")["value"] == pytest.approx(6e-3)
    assert answer(peers, capsys, path, f"{memory} 8.9e6")["value"] is None


def test_fewer_machines_where_the_all_reduce_is_dear(
    tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "graph.txt", node("a", 1, parameters=1e9), node("b", 1, parameters=1e9), *edges("ab"))
    assert answer(peers, capsys, path, "-n 4")["value"] > 2e-3
    found = answer(peers, capsys, path, "-n 4 --use_fewer_machines")
    assert found["value"] == pytest.approx(2e-3)
    assert [stage["replicas"] for stage in found["config"][0]["stages"]] == [1, 1]


def test_other_sources_ride_along_with_the_first_layer_that_needs_them(
    tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search starts from the first source of the file: {a}, {a, b, t} and everything, {t} never."""
    path = write(tmp_path / "graph.txt", *map(node, "abtc"), *edges("ab", "tb", "bc"))
    assert answer(peers, capsys, path, "-n 1")["states"] == 3


def test_parallel_branches_are_states_of_their_own(
    tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "graph.txt", *map(node, "abcd"), *edges("ab", "ac", "bd", "cd"))
    assert answer(peers, capsys, path, "-n 2")["states"] == 5


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    path = write(tmp_path / "graph.txt", node("a"), "nonsense")
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "pipedream", str(path)]
    levels = subprocess.run([*command, "-n", "2", "2"], capture_output=True, text=True)
    assert levels.returncode == 2
    assert "1 bandwidths for 2 levels" in levels.stderr
    broken = subprocess.run([*command, "-n", "2"], capture_output=True, text=True)
    assert broken.returncode == 1
    assert "line 2" in broken.stderr
    assert "Traceback" not in broken.stderr
