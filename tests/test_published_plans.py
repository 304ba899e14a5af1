"""`benchmarks/published_plans.py`: the best asynchronous plan is the best of all, and no published one beats it.

DPART_PEERS names the folder with the published profiles.
"""

import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dpart.partitioner.topology import Device, Level, Topology

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

needs_peers = pytest.mark.skipif(
    "DPART_PEERS" not in os.environ, reason="DPART_PEERS is unset: the published inputs are not here"
)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import published_plans

    return published_plans


@pytest.fixture
def asynchronous(published: Any) -> Any:
    import asynchronous

    return asynchronous


@pytest.fixture
def profile_of(published: Any) -> Any:
    from peers_pipedream_graph import read_graph
    from published_profiles import profile_of

    return lambda text: profile_of(read_graph(text), "random")


class Instance:
    """A random graph on two hosts, and the value of a plan on it written out once more, set by set."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.layers = rng.randint(1, 5)
        self.edges = {
            (u, v)
            for v in range(self.layers)
            for u in range(v)
            if rng.random() < (0.8 if u == v - 1 else 0.3)
        }  # fmt: skip
        self.milliseconds = [rng.choice([0, 1, 2, 5, 9]) for _ in range(self.layers)]
        self.activation = [4 * rng.randint(0, 5) for _ in range(self.layers)]
        self.parameter = [4 * rng.choice([0, 1, 4, 40]) for _ in range(self.layers)]
        self.host = rng.choice([2, 3])
        self.inside, self.between = rng.choice([(2e4, 5e3), (1e4, 1e4), (1e6, 2e3)])
        self.topology = Topology(
            Device("d", 1 << 30), (Level("host", self.host, self.inside, 1e-4), Level("all", 2, self.between, 5e-4))
        )

    @property
    def text(self) -> str:
        """As a profile; nodes in no particular order."""
        nodes = [
            f"n{v} -- Layer() -- forward_compute_time={self.milliseconds[v] / 2}, backward_compute_time="
            f"{self.milliseconds[v] / 2}, activation_size={self.activation[v]}, parameter_size={self.parameter[v]}"
            for v in reversed(range(self.layers))
        ]
        return "\n".join([*nodes, *(f"\tn{u} -- n{v}" for u, v in sorted(self.edges))])

    def period(self, stage_of: Sequence[int], replicas: Sequence[int]) -> float:
        """Of layers by stage; the stages side by side from the first device on."""
        starts = [0, *itertools.accumulate(replicas)]
        worst = 0.0
        for s, r in enumerate(replicas):
            mine = {v for v in range(self.layers) if stage_of[v] == s}
            worst = max(worst, sum(self.milliseconds[v] for v in mine) / 1000 / r)
            devices = range(starts[s], starts[s] + r)
            hosts = [sum(d // self.host == h for d in devices) for h in range(2)]
            size, n, reduce = sum(self.parameter[v] for v in mine), max(hosts), 0.0
            if size:
                reduce += 2 * (n - 1) * (size / n / self.inside + 1e-4)
                reduce += 2 * (1 / 2 * size / self.between + 5e-4) if all(hosts) else 0.0
            worst = max(worst, reduce / r)
            sending = 0.0
            for v in range(self.layers):
                holders = sorted({stage_of[w] for w in range(self.layers) if w == v or (v, w) in self.edges})
                for a, b in itertools.pairwise(holders):
                    if s == a:
                        sending += self.activation[v] / self.link(starts[s], starts[min(s + 2, len(replicas))])
                    if s == b:
                        sending += self.activation[v] / self.link(starts[s - 1], starts[s + 1])
            worst = max(worst, sending / r)
        return worst

    def link(self, first: int, stop: int) -> float:
        """Of all these devices together."""
        return self.inside if first // self.host == (stop - 1) // self.host else self.between

    def plans(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """All of them: (stage of each layer, replicas)."""
        for stage_of in itertools.product(range(self.layers), repeat=self.layers):
            count = max(stage_of) + 1
            if set(stage_of) != set(range(count)) or any(stage_of[u] > stage_of[v] for u, v in self.edges):
                continue
            for replicas in itertools.product(range(1, 2 * self.host + 1), repeat=count):
                if sum(replicas) <= 2 * self.host:
                    yield stage_of, replicas


def decided(instance: Instance, costs: Any, profile: Any, plan: Any) -> tuple[list[int], list[int]]:
    """The stage of each layer, and the replicas."""
    stage_of = [0] * instance.layers
    for s, stage in enumerate(plan):
        inside = costs.member[stage.stop] & ~costs.member[stage.start]
        for column, layer in enumerate(profile.graph.layers):
            if inside[column]:
                stage_of[int(layer.name[1:])] = s
    return stage_of, [stage.num_replicas for stage in plan]


@pytest.mark.parametrize("seed", range(60))
def test_the_best_plan_is_the_best_of_all(seed: int, asynchronous: Any, profile_of: Any) -> None:
    instance = Instance(seed)
    profile = profile_of(instance.text)
    costs = asynchronous.costs_of(profile)
    best = asynchronous.best_plan(costs, instance.topology)
    value = asynchronous.evaluate(costs, instance.topology, best)
    assert value == pytest.approx(instance.period(*decided(instance, costs, profile, best)))
    everything = [(instance.period(*plan), plan[1]) for plan in instance.plans()]
    assert value == pytest.approx(min(period for period, _ in everything))
    for replicas in sorted({replicas for _, replicas in everything})[::7]:
        found = asynchronous.best_plan(costs, instance.topology, asynchronous.in_a_row(replicas))
        assert tuple(stage.num_replicas for stage in found) == replicas
        least = min(period for period, theirs in everything if theirs == replicas)
        assert asynchronous.evaluate(costs, instance.topology, found) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(60))
def test_the_even_split_is_a_plan_and_never_better(seed: int, asynchronous: Any, profile_of: Any) -> None:
    instance = Instance(seed)
    costs = asynchronous.costs_of(profile_of(instance.text))
    even = asynchronous.even_split(costs, instance.topology)
    best = asynchronous.best_plan(costs, instance.topology)
    assert even[0].start == 0 and even[-1].stop == len(costs.member) - 1
    assert len({stage.num_replicas for stage in even}) == 1
    least, value = (asynchronous.evaluate(costs, instance.topology, plan) for plan in (best, even))
    assert least <= value * (1 + 1e-12)


def test_no_cuts_for_more_stages_than_layers(asynchronous: Any, profile_of: Any) -> None:
    instance = Instance(0)
    costs = asynchronous.costs_of(profile_of("n0 -- L() -- forward_compute_time=1, backward_compute_time=1, "
                                             "activation_size=8, parameter_size=8"))  # fmt: skip
    assert asynchronous.best_plan(costs, instance.topology, asynchronous.in_a_row((1, 1))) is None


@needs_peers
def test_no_published_plan_is_better_than_ours(published: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert published.main(["--json"]) == 0
    rows = {row["model"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(rows) == set(published.PUBLISHED)
    for row in rows.values():
        assert row["all_cuts"]
        assert row["ours_seconds"] <= row["published_seconds"] * (1 + 1e-12)
        assert row["ours_seconds"] <= row["even_seconds"] * (1 + 1e-12)
        assert row["reason"]
    # The paper's choice is ours where all-reducing decides, and where nothing beats data parallelism.
    assert rows["vgg16"]["ours"] == rows["vgg16"]["published"] == "15-1"
    assert rows["resnet50"]["ours"] == rows["resnet50"]["published"] == "16"


@needs_peers
def test_a_published_profile_keeps_its_totals(published: Any) -> None:
    from published_profiles import read_profile

    path = Path(os.environ["DPART_PEERS"]) / "pipedream" / "vgg16.graph.txt"
    profile = read_profile(path)
    lines = [line for line in path.read_text().splitlines() if "compute_time" in line and "-- Input" not in line]
    values = [dict(part.split("=") for part in line.split(" -- ")[2].split(", ")) for line in lines]
    total = sum(float(v["forward_compute_time"]) + float(v["backward_compute_time"]) for v in values)
    assert profile.step_seconds == pytest.approx(total / 1000)
    assert sum(p.size_bytes for p in profile.graph.parameters) == sum(float(v["parameter_size"]) for v in values)
    assert sum(cost.output_bytes for cost in profile.costs) == sum(float(v["activation_size"]) for v in values)
    assert len(profile.graph.layers) == len(lines)


def test_missing_inputs_are_said(
    published: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DPART_PEERS", raising=False)
    assert published.main([]) == 1
    assert "DPART_PEERS" in capsys.readouterr().err
    monkeypatch.setenv("DPART_PEERS", str(tmp_path))
    assert published.main(["vgg16"]) == 1
    assert "vgg16.graph.txt" in capsys.readouterr().err
