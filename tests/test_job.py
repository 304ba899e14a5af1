"""The job file: every fault is found before anything runs, and compiling equals the three commands."""

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import dpart
from dpart.cli import main
from dpart.job import parse_job, read_job
from dpart.partitioner.hosts import catalogue_topology
from dpart.partitioner.objectives import partition_for
from dpart.partitioner.partition import partition
from dpart.partitioner.plan import Plan
from dpart.partitioner.topology import topology_text
from dpart.profiler.profile import LayerCost, Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file

ROOT = Path(__file__).parent.parent

MODEL = """
import torch
from torch import nn
import dpart


def workload():
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)]
    return dpart.Workload(nn.Sequential(*layers), args=(x,), targets=(x,), loss=nn.functional.mse_loss)
"""

TOPOLOGY = """
device: {name: CPU core, memory: 1 GiB}
levels:
  - {name: machine, count: 2, bandwidth: 4 GB/s, latency: 100 us}
"""

RUNNABLE = "{stages: 2, tensor_parallel: 1, sharding: 0, recompute: false}"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder apart from the current one, which is empty."""
    (tmp_path / "here").mkdir()
    made = tmp_path / "job"
    made.mkdir()
    (made / "model.py").write_text(MODEL)
    (made / "cluster.yaml").write_text(TOPOLOGY)
    monkeypatch.chdir(tmp_path / "here")
    return made


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def refused(done: Result, *parts: str) -> None:
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.output.count("dpart: ") == 1, done.output
    for part in parts:
        assert part in done.output.replace("\n", " "), done.output


def job(folder: Path, text: str) -> Path:
    path = folder / "dpart.yaml"
    path.write_text(text)
    return path


def test_compiling_equals_the_three_commands(folder) -> None:
    path = job(
        folder,
        f"model: model.py:workload\ntopology: cluster.yaml\nmicrobatch_size: 2\nbatch_size: 8\nrepeats: 1\n"
        f"optimizer: sgd\nconstraints: {RUNNABLE}",
    )
    done = run("compile", path, "-o", "build")
    assert done.exit_code == 0, done.output
    assert "Wrote build" in done.output and "nproc-per-node 2 build/train.py" in done.output
    model = f"{folder}/model.py:workload"

    # Times are measured anew each time; all else of a profile is the same.
    assert run("profile", model, "-o", "again.json", "--microbatch-size", 2, "--repeats", 1).exit_code == 0
    again, profile = read_file(Profile, "again.json"), read_file(Profile, "build/profile.json")
    assert _without_times(again) == _without_times(profile)

    Path("profile.json").write_bytes(Path("build/profile.json").read_bytes())
    done = run(
        "partition", "profile.json", "-t", folder / "cluster.yaml", "--optimizer", "sgd", "--stages", 2,
        "--batch-size", 8, "--tensor-parallel", 1, "--sharding", 0, "--no-recompute", "-o", "plan.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert run("emit", model, "plan.json", "-o", "other").exit_code == 0
    made = {file.name: file.read_bytes() for file in Path("build").iterdir()}
    other = {file.name: file.read_bytes() for file in Path("other").iterdir()}
    assert made.pop("profile.json") and made == other
    assert Path("plan.json").read_bytes() == made["plan.json"]
    assert run("partition", "--check-certificate", "build/plan.json").exit_code == 0


def _without_times(profile: Profile) -> Profile:
    times = {name: 0 for name in inspect.signature(LayerCost).parameters if name.endswith("_seconds")}
    costs = tuple(replace(cost, **times) for cost in profile.costs)  # type: ignore[arg-type]
    return replace(profile, step_seconds=0.0, costs=costs)


def test_of_several_microbatch_sizes_the_fastest_is_taken(folder) -> None:
    path = job(
        folder,
        f"model: model.py:workload\ntopology: cluster.yaml\nmicrobatch_size: [1, 4]\nrepeats: 1\n"
        f"constraints: {RUNNABLE}\nkeep: [profile, trace]",
    )
    done = run("compile", path)
    assert done.exit_code == 0, done.output
    assert "Microbatch sizes" in done.output
    plan, topology = read_file(Plan, "build/plan.json"), dpart.read_topology(folder / "cluster.yaml")
    options = read_job(path).options
    steps = {
        rows: partition(read_file(Profile, f"build/profile-{rows}.json"), topology, **options).step_seconds
        for rows in (1, 4)
    }
    assert (plan.microbatch_size, plan.step_seconds) == min(steps.items(), key=lambda item: item[1])
    assert plan.question is not None and plan.question.profile == f"profile-{plan.microbatch_size}.json"
    assert json.loads(Path("build/trace.json").read_text())["traceEvents"]
    refused(run("compile", path), "build: exists already", "--force")
    assert run("compile", path, "--force").exit_code == 0


def test_a_dry_run_shows_the_plan_and_writes_nothing(folder) -> None:
    path = job(folder, "model: model.py:workload\nestimate: h100\ntopology: dgx-h100\ndegrees: [1, 2]\nkeep: []")
    done = run("compile", path, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "Nothing was written." in done.output and "h100" in done.output
    assert list(Path().iterdir()) == []
    captured = dpart.capture(dpart.load_workload(f"{folder}/model.py:workload"), meta=True)
    read = read_job(path)
    assert read.estimate is not None
    plan = partition(dpart.estimate(captured, read.estimate, degrees=(1, 2)), catalogue_topology("dgx-h100"))
    assert f"{plan.num_microbatches} microbatches of {plan.microbatch_size}" in done.output


def test_an_estimate_can_be_compiled(folder) -> None:
    path = job(
        folder,
        f"model: model.py:workload\nestimate: cpu-core\ntopology: 2xcpu-core\nmicrobatch_size: 2\nkeep: []\n"
        f"constraints: {RUNNABLE}",
    )
    done = run("compile", path)
    assert done.exit_code == 0, done.output
    assert {"plan.json", "train.py", "stage_1.py"} <= {file.name for file in Path("build").iterdir()}
    assert not Path("build/profile.json").exists()


def test_what_was_measured_is_kept_if_there_is_no_plan(folder) -> None:
    text = f"model: model.py:workload\nconstraints: {RUNNABLE}\ntopology: cluster.yaml\n"
    path = job(folder, f"{text}repeats: 1\nmicrobatch_size: 4\nmemory: {{limit: 4 KiB}}")
    done = run("compile", path, "-o", folder / "out")
    refused(done, "bytes too much", "What was measured is kept", "profile: [out.profile-4.json]")
    assert not (folder / "out").exists()
    job(folder, f"{text}profile: out.profile-4.json")
    done = run("compile", path, "-o", folder / "out")
    assert done.exit_code == 0, done.output
    assert (folder / "out" / "profile.json").read_bytes() == (folder / "out.profile-4.json").read_bytes()


FAULTS = """
modl: m.py:w
topology: {device: h100, levels: [{name: host, count: 8, link: nvlnk4}]}
microbatch_size: [2, 0]
schedule: 1f1
optimizer: adan
estimate: h10
memory: {limit: 70, headrom: 0.1}
constraints:
  {stages: two, sharding: 7, recompute: 3, together: [[a]], pins: {a: -1}, replica: 3, tensor_parallel: [1, x]}
time_limit: 30
keep: profil
"""


def test_all_faults_are_listed_with_their_paths() -> None:
    with pytest.raises(UserError) as caught:
        parse_job(FAULTS, "dpart.yaml", Path())
    lines = str(caught.value).splitlines()
    for path, part in (
        ("modl", "did you mean 'model'?"),
        ("memory.headrom", "did you mean 'headroom'?"),
        ("constraints.replica", "did you mean 'replicas'?"),
        ("model", "missing"),
        ("topology: levels[0].link", "nvlink4 is the closest"),
        ("microbatch_size[1]", "at least 1, got 0"),
        ("schedule", "did you mean '1f1b'?"),
        ("optimizer", "did you mean 'adam'?"),
        ("estimate", "the closest is h100"),
        ("memory.limit", "80 GiB"),
        ("constraints.stages", "expected an integer"),
        ("constraints.sharding[0]", "0 to 3, got 7"),
        ("constraints.recompute", "true or false"),
        ("constraints.together[0]", "two layers or more"),
        ("constraints.pins.a", "number of a stage"),
        ("constraints.tensor_parallel[1]", "expected an integer"),
        ("time_limit", "a time with its unit"),
        ("keep[0]", "did you mean 'profile'?"),
    ):
        assert sum(line.startswith(f"dpart.yaml: {path}: ") and part in line for line in lines) == 1, (path, lines)
    assert len(lines) == 18


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "not a YAML file"),
        ("- a", "expected fields such as model"),
        ("model: m", "model: expected file.py:callable"),
        ("model: m.py:w\ntopology: 3", "topology: expected a word, a file, or device and levels, got 3"),
        ("model: m.py:w\ntopology: no.yaml", "topology: sub/no.yaml: no such file"),
        ("model: m.py:w\ntopology: dgx-hundred", "topology: dgx-hundred: no such file, and no host or device"),
        ("model: m.py:w\nestimate: h100", "estimate: say in topology which devices"),
        ("model: m.py:w\nestimate: h100\ntopology: dgx-h100\nrepeats: 2", "repeats: nothing is timed"),
        ("model: m.py:w\nprofile: p.json\nmicrobatch_size: 2", "microbatch_size: profile names what"),
        ("model: m.py:w\nmicrobatch_size: [2, 2]", "2, 2 has one twice"),
        ("model: m.py:w\nmemory: {limit: 1 GiB, headroom: 0.2}", "limit and headroom say the same"),
        ("model: m.py:w\nmemory: {headroom: 2}", "expected a share from 0 up to 1"),
        ("model: m.py:w\ndegrees: 2", "degrees: what is measured"),
        ("model: m.py:w\nobjective: devices", "target_step: the objective 'devices' needs one"),
        ("model: m.py:w\ntarget_step: 2 s", "target_step: the objective 'devices' needs one"),
        ("model: m.py:w\nconstraints: none", "constraints: expected an object"),
    ],
)
def test_faults(text: str, part: str) -> None:
    with pytest.raises(UserError, match=r"dpart\.yaml: ") as caught:
        parse_job(text, "dpart.yaml", Path("sub"))
    assert part in str(caught.value)


def test_paths_start_from_the_folder_of_the_file(folder) -> None:
    read = read_job(job(folder, "model: model.py:workload\ntopology: cluster.yaml\nprofile: [p/a.json, b.json]"))
    assert read.model == f"{folder}/model.py:workload"
    assert read.profiles == (folder / "p" / "a.json", folder / "b.json")
    assert read.topology == dpart.read_topology(folder / "cluster.yaml")
    assert parse_job("model: package.module:f", "dpart.yaml", folder).model == "package.module:f"
    assert parse_job(f"model: {folder}/model.py:w", "dpart.yaml", Path("x")).model == f"{folder}/model.py:w"
    assert parse_job("model: a.py:f\ntopology: 2xdgx-h100", "d", folder).topology == catalogue_topology("2xdgx-h100")
    inline = f"model: a.py:f\ntopology:\n{''.join(f'  {line}{chr(10)}' for line in TOPOLOGY.strip().splitlines())}"
    assert parse_job(inline, "d", folder).topology == read.topology
    text = topology_text(catalogue_topology("1xdgx-h100+2xdgx-a100-80"))
    pools = "topology:\n" + "".join(f"  {line}\n" for line in text.splitlines())
    assert parse_job(f"model: a.py:f\n{pools}", "d", folder).topology == catalogue_topology("1xdgx-h100+2xdgx-a100-80")


def test_a_job_can_say_all_that_partition_can_be_told() -> None:
    text = """
model: a.py:f
batch_size: 8
objective: devices
target_step: 2 s
method: dp
schedule: gpipe
optimizer: sgd
memory: {limit: 1 GiB}
constraints: {devices: 2, stages: 1, max_stages: 2, replicas: 2, tensor_parallel: 1, sharding: [0, 1],
              recompute: true, together: [[a, b]], pins: {a: 0}}
time_limit: 1 s
""".replace("replicas: 2", "replicas: [2]")
    options = dict(parse_job(text, "dpart.yaml", Path()).options)
    assert options["target_step_seconds"] == 2.0 and options["pins"] == {"a": 0}
    told = set(inspect.signature(partition).parameters) | set(inspect.signature(partition_for).parameters)
    # Either limit or headroom; the rest is for tests, or given by the command.
    left_out = {"profile", "topology", "options", "progress", "memory_headroom", "reduce_buckets", "tolerance"}
    assert set(options) == told - left_out


def test_the_example_is_a_job() -> None:
    read = read_job(ROOT / "examples" / "dpart.yaml")
    assert (read.topology is not None) and read.topology.num_devices == 2
    assert dpart.load_workload(read.model).build().batch_size == read.options["batch_size"]
    assert read.keep == ("profile", "trace")


def test_mistakes_at_the_command(folder) -> None:
    refused(run("compile"), "dpart.yaml: no such file")
    path = job(folder, "model: no.py:workload")
    refused(run("compile", path), "no.py: no such file")
    refused(run("compile", job(folder, "modell: model.py:workload")), "did you mean 'model'?", "is missing")
    Path("build").mkdir()
    refused(run("compile", job(folder, "model: no.py:workload")), "build: exists already")


def test_reading_a_job_loads_no_torch() -> None:
    code = f"import sys, dpart.job; dpart.job.read_job({str(ROOT / 'examples' / 'dpart.yaml')!r})"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=True)
