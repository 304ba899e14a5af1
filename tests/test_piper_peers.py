"""Piper's inputs under Piper's conventions: its values on what is published, and trying everything on small ones.

DPART_PEERS names the folder with the published inputs and what the published programs said of them.
"""

import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FOLDER = Path(os.environ.get("DPART_PEERS", "")) / "piper"
ROWS: list[dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text()) if "DPART_PEERS" in os.environ else []
RUN = [row for row in ROWS if row["mode"] == "piper" and not row["note"].startswith("NOT RUN")]
SAMPLE = [row for n, row in enumerate(RUN) if n % 4 == 0 or row["devices"] == 2048 or row["input"] == "gnmt"]

needs_peers = pytest.mark.skipif(not ROWS, reason="DPART_PEERS is unset: the published inputs are not here")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import peers

    return peers


def answer(peers: Any, capsys: pytest.CaptureFixture[str], path: Path, arguments: str) -> dict[str, Any]:
    assert peers.main(["piper", str(path), *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@needs_peers
@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: f"{row['input'].split()[0]} {row['devices']}")
def test_values_are_those_of_the_published_program(
    row: dict[str, Any], peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = row["input"].split()[0]
    path = FOLDER / ("gnmt.json" if name == "gnmt" else "bert32a100.json")
    arguments = (
        f"--devices {row['devices']} --microbatches {row['microbatches']} --memory {row['memory_bytes']}"
        f" --bandwidth {row['bandwidth_bytes_per_second']}"
    )
    if name.startswith("bert") and name != "bert32":
        arguments += f" --layers {name.removeprefix('bert')}"
    found = answer(peers, capsys, path, arguments)
    if row["time_per_microbatch"] is None:
        assert found["value"] is None and found["lower_bound"] is None
        return
    assert found["value"] == pytest.approx(row["time_per_microbatch"], rel=1e-9)
    assert found["lower_bound"] == found["value"]
    assert max(stage["seconds"] for stage in found["config"]["stages"]) == pytest.approx(found["value"])
    exact = answer(peers, capsys, path, arguments + " --exact-recompute")
    assert exact["value"] <= row["time_per_microbatch"] * (1 + 1e-9)


class Instance:
    """A random input, and its cost model written out once more, stage by stage."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.layers = rng.randint(1, 4)
        self.microbatches = rng.choice([1, 2, 4, 6])
        self.devices = rng.randint(1, 5)
        self.bandwidth = 4.0
        degrees = [1, 2] if rng.random() < 0.5 else [1]
        kinds = [(rng.randint(1, 6), rng.randint(0, 4)) for _ in range(2)]
        self.edges = {
            (u, v): float(rng.randint(0, 5))
            for v in range(self.layers)
            for u in range(v)
            if rng.random() < (0.9 if u == v - 1 else 0.3)
        }
        self.nodes: list[dict[int, list[dict[str, Any]]]] = []
        for v in range(self.layers):
            self.nodes.append({})
            stash, static = rng.choice(kinds)
            for t in degrees:
                if t > 1 and rng.random() < 0.2:
                    continue
                shared = {
                    "parameterSize": float(rng.randint(0, 9)),
                    "syncTimeFw": {str(u): float(rng.randint(0, 3)) for u, w in self.edges if w == v},
                    "syncTimeBw": {str(w): float(rng.randint(0, 3)) for u, w in self.edges if u == v},
                }
                seconds = float(rng.randint(1, 9))
                variants = [(seconds, stash, static)]
                if rng.random() < 0.8:
                    variants.append((seconds + rng.randint(0, 4), stash * rng.choice([0, 0.5]), static + stash / 4))
                rng.shuffle(variants)
                self.nodes[v][t] = [
                    {"timePerSample": p, "memoryUsageA": a / t, "memoryUsageB": b / t, **shared} for p, a, b in variants
                ]
        self.memory = rng.randint(3, 12 * self.layers) / rng.choice([1, 2])

    def write(self, path: Path) -> Path:
        nodes = [{"id": v + 10, "name": f"n{v}", "TMPCs": self._renamed(v)} for v in range(self.layers)]
        edges = [{"sourceId": u + 10, "destId": v + 10, "communicationCost": c} for (u, v), c in self.edges.items()]
        path.write_text(json.dumps({"nodes": nodes, "edges": edges}))
        return path

    def _renamed(self, v: int) -> dict[str, Any]:
        def shifted(sync: dict[str, float]) -> dict[str, float]:
            return {str(int(u) + 10): c for u, c in sync.items()}

        return {
            str(t): [
                {**x, "syncTimeFw": shifted(x["syncTimeFw"]), "syncTimeBw": shifted(x["syncTimeBw"])} for x in variants
            ]
            for t, variants in self.nodes[v].items()
        }

    def arguments(self) -> str:
        return (
            f"--devices {self.devices} --microbatches {self.microbatches}"
            f" --memory {self.memory} --bandwidth {self.bandwidth}"
        )

    def seconds(self, stage: frozenset[int], d: int, t: int, recompute: frozenset[int]) -> float:
        total = 0.0
        for v in stage:
            fast, slow = self.pair(v, t)
            total += (slow if v in recompute else fast)["timePerSample"] / d
            total += 4 * (d - 1) * fast["parameterSize"] / d / self.microbatches / self.bandwidth
        for (u, v), cost in self.edges.items():
            if v in stage and u not in stage:
                total += 2 * (cost + self.pair(v, t)[0]["syncTimeFw"][str(u)]) / d / self.bandwidth
            if u in stage and v not in stage:
                total += 2 * (cost + self.pair(u, t)[0]["syncTimeBw"][str(v)]) / d / self.bandwidth
        return total

    def pair(self, v: int, t: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The faster variant and the other one."""
        variants = sorted(self.nodes[v][t], key=lambda variant: variant["timePerSample"])
        return variants[0], variants[-1]

    def memory_of(self, stage: frozenset[int], t: int, recompute: frozenset[int], y: int) -> float:
        chosen = [self.pair(v, t)[v in recompute] for v in stage]
        return sum(variant["memoryUsageA"] * y + variant["memoryUsageB"] for variant in chosen)

    def by_rule(self, stage: frozenset[int], t: int, y: int) -> frozenset[int] | None:
        swaps = []
        for v in stage:
            fast, slow = self.pair(v, t)
            saved = (fast["memoryUsageA"] - slow["memoryUsageA"]) * y + fast["memoryUsageB"] - slow["memoryUsageB"]
            if saved > 0:
                swaps.append(((slow["timePerSample"] - fast["timePerSample"]) / saved, v))
        order = [v for _, v in sorted(swaps)]
        for count in range(len(order) + 1):
            chosen = frozenset(order[:count])
            if self.memory_of(stage, t, chosen, y) <= self.memory:
                return chosen
        return None

    def stage_seconds(self, stage: frozenset[int], d: int, t: int, y: int, exact: bool) -> float:
        if any(t not in self.nodes[v] for v in stage):
            return math.inf
        if exact:
            subsets = (frozenset(s) for n in range(len(stage) + 1) for s in itertools.combinations(sorted(stage), n))
            fitting = [s for s in subsets if self.memory_of(stage, t, s, y) <= self.memory]
        else:  # The rule for more in flight does for less in flight too.
            by_rule = (self.by_rule(stage, t, more) for more in range(y, min(self.devices, self.microbatches) + 1))
            fitting = [s for s in by_rule if s is not None]
        return min((self.seconds(stage, d, t, s) for s in fitting), default=math.inf)

    def least_bottleneck(self, exact: bool) -> float:
        """By trying all rows of stages, from the last."""

        @cache
        def rest(behind: frozenset[int], replicas: int, devices: int) -> float:
            ahead = frozenset(range(self.layers)) - behind
            best = 0.0 if not ahead else math.inf
            for stage in self.closed(ahead):
                for d, t in itertools.product(range(1, self.devices + 1), (1, 2)):
                    most = min(self.devices, self.microbatches)
                    if self.microbatches % d or devices + d * t > self.devices or replicas + d > most:
                        continue
                    own = self.stage_seconds(stage, d, t, -(-(replicas + d) // d), exact)
                    if own < best:
                        best = min(best, max(own, rest(behind | stage, replicas + d, devices + d * t)))
            return best

        return rest(frozenset(), 0, 0)

    def closed(self, ahead: frozenset[int]) -> Iterator[frozenset[int]]:
        """Sets of the layers ahead that none of the others reads from."""
        for n in range(1, len(ahead) + 1):
            for some in itertools.combinations(sorted(ahead), n):
                if not any(u in some and v in ahead and v not in some for u, v in self.edges):
                    yield frozenset(some)


@pytest.mark.parametrize("many_ideals", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_the_value_is_that_of_trying_everything(
    exact: bool,
    many_ideals: bool,
    tmp_path: Path,
    peers: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where one topological order is tried first and only what may be better afterwards."""
    if many_ideals:
        monkeypatch.setattr(peers.peers_piper, "FEW_IDEALS", 0)
    flags = " --exact-recompute" if exact else ""
    infeasible = recomputing = 0
    for seed in range(80):
        instance = Instance(seed)
        path = instance.write(tmp_path / "input.json")
        found = answer(peers, capsys, path, instance.arguments() + flags)
        best = instance.least_bottleneck(exact)
        if best == math.inf:
            infeasible += 1
            assert found["value"] is None and found["config"] is None
            continue
        assert found["value"] == pytest.approx(best, rel=1e-9), seed
        assert found["lower_bound"] == found["value"]
        replicas = devices = 0
        everything: set[int] = set()
        for stage in reversed(found["config"]["stages"]):
            layers = frozenset(v - 10 for v in stage["node_ids"])
            chosen = frozenset(v - 10 for v in stage["recompute_ids"])
            recomputing += len(chosen)
            replicas, devices = replicas + stage["d"], devices + stage["d"] * stage["t"]
            in_flight = -(-replicas // stage["d"])
            assert instance.memory_of(layers, stage["t"], chosen, in_flight) <= instance.memory
            assert stage["seconds"] == pytest.approx(instance.seconds(layers, stage["d"], stage["t"], chosen))
            assert stage["seconds"] <= found["value"] * (1 + 1e-12)
            everything |= layers
        assert devices <= instance.devices and everything == set(range(instance.layers))
    assert infeasible > 3 and recomputing > 10


def test_past_the_limit_a_plan_and_an_honest_bound(
    tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.peers_piper, "FEW_IDEALS", 0)
    monkeypatch.setattr(peers.peers_piper, "MAX_STAGES", 0)
    apart = 0
    for seed in range(60):
        instance = Instance(seed)
        found = answer(peers, capsys, instance.write(tmp_path / "input.json"), instance.arguments())
        best = instance.least_bottleneck(exact=False)
        if found["value"] is not None:
            assert found["lower_bound"] <= best * (1 + 1e-9) and best <= found["value"] * (1 + 1e-9)
            apart += found["lower_bound"] < found["value"]
        elif found["lower_bound"] is None:
            assert best == math.inf
    assert apart > 10


def chain_file(path: Path, copies: int) -> Path:
    """Input, `copies` layers of the same name, output; the first two of them read a mask too."""
    names = ["in", "mask", *["block"] * copies, "out"]
    blocks = list(range(2, 2 + copies))
    last = 2 + copies
    edges = [(0, 2, 3.0), (1, 2, 1.0), (1, 3, 1.0), *((u, u + 1, 2.0) for u in blocks[:-1]), (last - 1, last, 3.0)]
    nodes = []
    for v, name in enumerate(names):
        seconds = {"in": 1.0, "mask": 0.0, "block": 4.0, "out": 2.0}[name]
        variant = {
            "timePerSample": seconds, "parameterSize": 1.0, "memoryUsageA": 1.0, "memoryUsageB": 1.0,
            "syncTimeFw": {str(u): 1.0 for u, w, _ in edges if w == v},
            "syncTimeBw": {str(w): 2.0 for u, w, _ in edges if u == v},
        }  # fmt: skip
        nodes.append({"id": v, "name": name, "TMPCs": {"1": [variant]}})
    described = [{"sourceId": u, "destId": v, "communicationCost": c} for u, v, c in edges]
    path.write_text(json.dumps({"nodes": nodes, "edges": described}))
    return path


def test_layers_are_repeated_as_if_the_file_had_them(
    tmp_path: Path, peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = chain_file(tmp_path / "short.json", 4), chain_file(tmp_path / "long.json", 9)
    values = set()
    for devices in range(1, 7):
        arguments = f"--devices {devices} --microbatches 4 --memory 40 --bandwidth 8"
        repeated = answer(peers, capsys, short, arguments + " --layers 9")
        assert repeated["value"] == answer(peers, capsys, long, arguments)["value"]
        values.add(repeated["value"])
    assert len(values) > 3


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    path = chain_file(tmp_path / "input.json", 4)
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "piper", str(path), "--memory", "9", "--bandwidth", "1"]

    def run(*more: str) -> tuple[int, str]:
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    code, message = run("--devices", "0", "--microbatches", "1")
    assert code == 2 and "--devices: 0 is not above 0" in message
    code, message = run("--devices", "2", "--microbatches", "1", "--layers", "3")
    assert code == 1 and "4 layers 'block' already" in message
    path.write_text('{"nodes": [{"id": 1}], "edges": []}')
    code, message = run("--devices", "2", "--microbatches", "1")
    assert code == 1 and "no input of Piper" in message
