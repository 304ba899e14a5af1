"""Our searchers on the workloads of Tarnawski et al.: the values of the released exact programme, file by file.

DPART_PEERS names the folder with the published inputs and what the published programs said of them.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FOLDER = Path(os.environ.get("DPART_PEERS", "")) / "dnn-partitioning"
ROWS: list[dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text()) if "DPART_PEERS" in os.environ else []
EXACT = [row for row in ROWS if row["mode"] == "(DP)"]

needs_peers = pytest.mark.skipif(not ROWS, reason="DPART_PEERS is unset: the published inputs are not here")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import peers

    return peers


def answer(peers: Any, capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> dict[str, Any]:
    assert peers.main(["tarnawski", str(path), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def loads(path: Path, config: list[dict[str, Any]]) -> list[float]:
    """Of the devices, from the file alone."""
    content = json.loads(path.read_text())
    nodes = {node["id"]: node for node in content["nodes"]}
    cost = {edge["sourceId"]: edge["cost"] for edge in content["edges"]}
    result = []
    for device in config:
        mine = set(device["nodes"])
        if device["device"] == "processor":
            result.append(sum(nodes[node]["cpuLatency"] for node in mine))
            continue
        assert sum(nodes[node]["size"] for node in mine) <= content["maxSizePerFPGA"]
        sent = {e["sourceId"] for e in content["edges"] if (e["sourceId"] in mine) != (e["destId"] in mine)}
        result.append(sum(nodes[node]["fpgaLatency"] for node in mine) + sum(cost[node] for node in sent))
    return result


def check(path: Path, found: dict[str, Any]) -> None:
    """All nodes once, colours together, devices within their counts, loads as said, the value their largest."""
    content = json.loads(path.read_text())
    where = {node: number for number, device in enumerate(found["config"]) for node in device["nodes"]}
    assert sorted(where) == sorted(node["id"] for node in content["nodes"])
    assert sum(len(device["nodes"]) for device in found["config"]) == len(where)
    colours = defaultdict(set)
    for node in content["nodes"]:
        if node.get("colorClass") is not None:
            colours[node["colorClass"]].add(where[node["id"]])
    assert all(len(devices) == 1 for devices in colours.values())
    assert sum(device["device"] == "accelerator" for device in found["config"]) <= content["maxFPGAs"]
    assert sum(device["device"] == "processor" for device in found["config"]) <= content["maxCPUs"]
    recomputed = loads(path, found["config"])
    assert [device["load"] for device in found["config"]] == pytest.approx(recomputed, rel=1e-9)
    assert found["value"] == pytest.approx(max(recomputed), rel=1e-9)


@needs_peers
@pytest.mark.parametrize("row", EXACT, ids=lambda row: row["input"])
def test_values_and_ideals_are_those_of_the_exact_programme(
    row: dict[str, Any], peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FOLDER / f"{row['input']}.json"
    found = answer(peers, capsys, path)
    check(path, found)
    assert found["ideals"] == row["ideals"]
    assert found["lower_bound"] == pytest.approx(found["value"], rel=1e-6)
    if row["max_load"] is not None:
        assert found["value"] == pytest.approx(row["max_load"], rel=1e-9)
    for other in ROWS:
        if other["input"] == row["input"] and other["mode"] in ("-linearize", "-pipeDream"):
            assert found["value"] <= other["max_load"] * (1 + 1e-9)
    where = {node: number for number, device in enumerate(found["config"]) for node in device["nodes"]}
    content = json.loads(path.read_text())
    backward = {node["id"] for node in content["nodes"] if node["isBackwardNode"]}
    for edge in content["edges"]:
        if edge["sourceId"] not in backward and edge["destId"] not in backward:
            assert where[edge["sourceId"]] <= where[edge["destId"]]


@needs_peers
def test_the_integer_programme_proves_the_same_value(peers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER / "LayerGraphs" / "bert24_inference.json"
    found = answer(peers, capsys, path, "--method", "ilp")
    check(path, found)
    exact = answer(peers, capsys, path)
    assert found["value"] == pytest.approx(exact["value"], rel=1e-5)
    assert found["lower_bound"] == pytest.approx(found["value"], rel=1e-5)


@needs_peers
def test_plans_that_are_not_contiguous_are_better_than_the_local_search(
    peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FOLDER / "LayerGraphs" / "bert24_training.json"
    found = answer(peers, capsys, path, "--non-contiguous", "--time-limit", "9")
    check(path, found)
    theirs = [row["max_load"] for row in ROWS if row["input"] == "LayerGraphs/bert24_training"]
    assert found["lower_bound"] <= found["value"] < min(theirs)


def node(number: int, time: float, colour: int | None = None, backward: bool = False, **more: Any) -> dict[str, Any]:
    record = {"id": number, "supportedOnFpga": 1, "fpgaLatency": time, "cpuLatency": 10 * time}
    record |= {"isBackwardNode": int(backward), "size": 1.0, **more}
    return record if colour is None else record | {"colorClass": colour}


def edge(source: int, target: int, cost: float) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "cost": cost, "size": 0.0}


def write(path: Path, nodes: list[dict[str, Any]], edges: list[dict[str, Any]], **devices: Any) -> Path:
    counts = {"maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 100.0}
    path.write_text(json.dumps(counts | devices | {"nodes": nodes, "edges": edges}))
    return path


def test_a_chain_by_hand(tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Works 4, 4, 4, transfers of 1 and 2: {a} and {b, c}, which pay 1 each."""
    path = write(tmp_path / "w.json", [node(0, 4), node(1, 4), node(2, 4)], [edge(0, 1, 1), edge(1, 2, 2)], maxCPUs=1)
    found = answer(peers, capsys, path, "--processors", "0")
    assert found["value"] == 9
    assert [device["nodes"] for device in found["config"]] == [[0], [1, 2]]
    assert answer(peers, capsys, path, "--accelerators", "3", "--processors", "0")["value"] == 7
    assert answer(peers, capsys, path, "--accelerators", "0")["value"] == 120


def test_a_value_is_paid_for_once_on_each_side(tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "w.json", [node(0, 9), node(1, 4), node(2, 5)], [edge(0, 1, 1), edge(0, 2, 1), edge(1, 2, 0.5)]
    )
    found = answer(peers, capsys, path)
    assert found["value"] == 10
    assert [device["load"] for device in found["config"]] == [10, 10]


def test_forward_and_backward_share_a_device(tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Both directions cross: 3 + 4 on each device, and 1 and 2 for the values that go over."""
    path = write(
        tmp_path / "w.json",
        [node(0, 3, 0), node(1, 3, 1), node(2, 4, 1, backward=True), node(3, 4, 0, backward=True)],
        [edge(0, 1, 1), edge(1, 2, 5), edge(2, 3, 2)],
    )
    assert answer(peers, capsys, path)["value"] == 10


def test_memory_colours_and_unsupported_nodes_bind(
    tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes, edges = [node(0, 1), node(1, 1), node(2, 1), node(3, 1)], [edge(0, 1, 0), edge(1, 2, 0), edge(2, 3, 0)]
    assert answer(peers, capsys, write(tmp_path / "w.json", nodes, edges))["value"] == 2
    tight = write(tmp_path / "w.json", nodes, edges, maxSizePerFPGA=1.0)
    nothing = answer(peers, capsys, tight)
    assert nothing["value"] is None and nothing["lower_bound"] is None and nothing["config"] == []
    coloured = [node(0, 1), node(1, 1, 7), node(2, 1), node(3, 1, 7)]
    assert answer(peers, capsys, write(tmp_path / "w.json", coloured, edges))["value"] == 3
    odd = [node(0, 1), node(1, 1, supportedOnFpga=0), node(2, 1), node(3, 1)]
    assert answer(peers, capsys, write(tmp_path / "w.json", odd, edges))["value"] is None
    assert answer(peers, capsys, write(tmp_path / "w.json", odd, edges, maxCPUs=1))["value"] == 10


def test_backward_edges_of_a_colour_without_a_forward_part_order_it(
    tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Backward d -> e -> f, where e has no forward part: it stands between f's colour and d's."""
    path = write(
        tmp_path / "w.json",
        [
            *(node(0, 1, 0), node(1, 1, 1), node(2, 1, 1, backward=True)),
            *(node(3, 1, 2, backward=True), node(4, 1, 0, backward=True)),
        ],
        [edge(0, 1, 0), edge(2, 3, 0), edge(3, 4, 0)],
        maxFPGAs=3,
    )
    found = answer(peers, capsys, path)
    assert [device["nodes"] for device in found["config"]] == [[0, 4], [3], [1, 2]]


def test_trivial_nodes_join_their_neighbour_again_and_again(
    tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has no time and one neighbour joins it, again and again; what has two neighbours stays.

    0 - 1 - 2 hang on 3; 4 is between 3 and 5.
    """
    nodes = [*(node(number, 0) for number in range(3)), node(3, 1), node(4, 0), node(5, 1)]
    edges = [edge(0, 1, 0), edge(1, 2, 0), edge(2, 3, 0), edge(3, 4, 0), edge(4, 5, 0)]
    # Three bytes a device: {0, 1, 2} and {3, 4, 5} would fit, but 0 to 3 are one layer.
    assert answer(peers, capsys, write(tmp_path / "w.json", nodes, edges, maxSizePerFPGA=3.0))["value"] is None
    assert answer(peers, capsys, write(tmp_path / "w.json", nodes, edges, maxSizePerFPGA=4.0))["value"] == 1
    # With time, if little, they are layers of their own.
    busy = [node(number, 2e-6) for number in range(3)] + nodes[3:]
    found = answer(peers, capsys, write(tmp_path / "w.json", busy, edges, maxSizePerFPGA=3.0))
    assert [device["nodes"] for device in found["config"]] == [[0, 1, 2], [3, 4, 5]]


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARKS / "peers.py"), "tarnawski", str(path), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    unlike = write(tmp_path / "unlike.json", [node(0, 1), node(1, 1), node(2, 1)], [edge(0, 1, 1), edge(0, 2, 2)])
    unknown = write(tmp_path / "unknown.json", [node(0, 1)], [edge(0, 5, 1)])
    (tmp_path / "broken.json").write_text("{")
    for path, said in [(unlike, "edges from node 0 cost"), (unknown, "no 5"), (tmp_path / "broken.json", "Expecting")]:
        result = run(path)
        assert result.returncode == 1 and said in result.stderr and "Traceback" not in result.stderr
    assert run(unlike, "--accelerators", "-1").returncode == 2


def test_a_plan_that_only_scattered_devices_hold(
    tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes 3, 3, 2, 2 in a chain, 5 bytes on each of two devices: only a 3 and a 2 fit together."""
    nodes = [node(number, 1) | {"size": size} for number, size in enumerate([3.0, 3.0, 2.0, 2.0])]
    edges = [edge(0, 1, 0), edge(1, 2, 0), edge(2, 3, 0)]
    path = write(tmp_path / "w.json", nodes, edges, maxSizePerFPGA=5.0)
    assert answer(peers, capsys, path)["value"] is None
    for method in ("dp", "ilp"):
        found = answer(peers, capsys, path, "--non-contiguous", "--method", method)
        check(path, found)
        assert found["value"] == 2
