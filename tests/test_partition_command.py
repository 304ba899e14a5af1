"""`dpart partition` beyond the plain case: certificates checked from files, pins, objectives, traces, sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpart.cli import main
from dpart.partitioner.plan import Plan
from dpart.profiler.profile import Profile
from dpart.runtime.files import read_file, write_file

TOPOLOGY = """
device: {name: toy, memory: 1 GiB, dollars_per_hour: 2}
levels:
  - {name: host, count: 4, bandwidth: 2 GB/s, latency: 100 us}
"""


@pytest.fixture
def folder(tmp_path: Path, chain_profile) -> Path:
    (tmp_path / "cluster.yaml").write_text(TOPOLOGY)
    profile = chain_profile([2e-3, 1e-3, 4e-3, 1e-3, 3e-3, 2e-3])
    # Two microbatch sizes of one model: the larger one has twice the rows, and runs them faster than twice.
    write_file(profile, tmp_path / "four.json")
    faster = [
        replace(c, forward_seconds=1.5 * c.forward_seconds, backward_seconds=1.5 * c.backward_seconds)
        for c in profile.costs
    ]
    graph = replace(profile.graph, microbatch_size=8, fingerprint="e" * 16)
    write_file(replace(profile, graph=graph, costs=tuple(faster)), tmp_path / "eight.json")
    return tmp_path


def partition(folder: Path, *words: object, profiles: tuple[str, ...] = ("four.json",)) -> Result:
    files = [folder / name for name in profiles]
    given = [str(word) for word in (*files, "-t", folder / "cluster.yaml", "-o", folder / "plan.json", *words)]
    return CliRunner().invoke(main, ["partition", *given])


def check(folder: Path, *words: object) -> Result:
    given = [str(word) for word in ("--check-certificate", folder / "plan.json", *words)]
    return CliRunner().invoke(main, ["partition", *given])


def test_a_certificate_is_checked_from_the_files_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert partition(folder).exit_code == 0
    assert read_file(Plan, folder / "plan.json").question.profile == "four.json"
    monkeypatch.chdir("/")
    done = check(folder)
    assert done.exit_code == 0, done.output
    assert "The certificate holds" in done.output


@pytest.mark.parametrize("field", ["lower_bound_seconds", "objective_seconds", "gap"])
def test_a_certificate_that_claims_more_is_found_out(folder: Path, field: str) -> None:
    assert partition(folder).exit_code == 0
    data = json.loads((folder / "plan.json").read_text())
    data["certificate"][field] = data["certificate"][field] * 1.01 + 1e-3
    (folder / "plan.json").write_text(json.dumps(data))
    done = check(folder)
    assert done.exit_code == 1
    assert "does not hold" in done.output


def test_a_profile_that_changed_is_refused(folder: Path) -> None:
    assert partition(folder).exit_code == 0
    profile = read_file(Profile, folder / "four.json")
    write_file(replace(profile, step_seconds=1.0), folder / "four.json", force=True)
    done = check(folder)
    assert done.exit_code == 1
    assert "made from another profile" in done.output


def test_pins_and_layers_kept_together(folder: Path) -> None:
    words = ("--pin", "l1=1", "--together", "l3,l4", "--stages", "3", "--force")
    assert partition(folder, *words).exit_code == 0
    plan = read_file(Plan, folder / "plan.json")
    assert "l1" in plan.stages[1].layers
    assert any({"l3", "l4"} <= set(stage.layers) for stage in plan.stages)
    assert check(folder).exit_code == 0
    done = partition(folder, "--pin", "l9=1", "--together", "l1,lx", "--force")
    assert done.exit_code == 1
    assert "'l9'" in done.output and "'lx'" in done.output
    assert partition(folder, "--pin", "l1", "--force").exit_code == 2


def test_pins_that_no_plan_can_keep(folder: Path) -> None:
    done = partition(folder, "--pin", "l0=1", "--force")
    assert done.exit_code == 1
    assert "pins" in done.output


def test_the_fewest_devices_for_a_target_and_the_cheapest_step(folder: Path) -> None:
    assert partition(folder).exit_code == 0
    fastest = read_file(Plan, folder / "plan.json")
    assert partition(folder, "--devices", "1", "--force").exit_code == 0
    alone = read_file(Plan, folder / "plan.json")
    target = f"{alone.step_seconds * 1001:.6f} ms"
    assert partition(folder, "--objective", "devices", "--target", target, "--force").exit_code == 0
    assert sum(len(s.devices) for s in read_file(Plan, folder / "plan.json").stages) == 1
    done = partition(folder, "--objective", "devices", "--target", f"{fastest.step_seconds * 999:.6f} ms", "--force")
    assert done.exit_code == 1 and "the fastest takes" in done.output
    assert partition(folder, "--objective", "devices", "--force").exit_code == 1
    assert partition(folder, "--objective", "cost", "--force").exit_code == 0
    cheapest = read_file(Plan, folder / "plan.json")
    # One device wastes nothing on waiting: no plan on several costs less.
    assert sum(len(s.devices) for s in cheapest.stages) * cheapest.step_seconds <= alone.step_seconds * (1 + 1e-9)


def test_of_several_microbatch_sizes_the_best_is_chosen(folder: Path) -> None:
    done = partition(folder, "--force", profiles=("four.json", "eight.json"))
    assert done.exit_code == 0, done.output
    both = read_file(Plan, folder / "plan.json")
    steps = {}
    for name in ("four.json", "eight.json"):
        assert partition(folder, "--force", profiles=(name,)).exit_code == 0
        plan = read_file(Plan, folder / "plan.json")
        steps[plan.microbatch_size] = plan.step_seconds
    assert both.step_seconds == min(steps.values()) == steps[both.microbatch_size]


def test_a_trace_has_every_action(folder: Path) -> None:
    assert partition(folder, "--stages", "3", "--trace", folder / "trace.json").exit_code == 0
    plan = read_file(Plan, folder / "plan.json")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["name"][0] in "FB"]
    own = -(-plan.num_microbatches // max(s.num_replicas for s in plan.stages))
    assert len(spans) >= 2 * own * len(plan.stages)


@pytest.mark.parametrize("schedule", ["auto", "zb-h1", "pipedream", "2bw", "gpipe"])
def test_plans_for_every_schedule_have_certificates_that_hold(folder: Path, schedule: str) -> None:
    assert partition(folder, "--schedule", schedule, "--stages", "3").exit_code == 0
    plan = read_file(Plan, folder / "plan.json")
    assert plan.schedule == schedule or schedule == "auto"
    assert check(folder).exit_code == 0
