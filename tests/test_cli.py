"""The command line: what a stranger types, and every mistake answered by one clear message and exit 1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpart.cli import main
from dpart.partitioner.plan import Plan
from dpart.profiler.profile import Profile
from dpart.runtime.files import read_file

MODEL = """
import torch
from torch import nn
import dpart


def workload():
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return dpart.Workload(model, args=(x,), targets=(x,), loss=nn.functional.mse_loss)


def other():
    x = torch.randn(8, 16)
    return dpart.Workload(nn.Linear(16, 16), args=(x,), targets=(x,), loss=nn.functional.mse_loss)


class Branch(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def data_dependent():
    x = torch.randn(8, 16)
    return dpart.Workload(Branch(16, 16), args=(x,), targets=(x,), loss=nn.functional.mse_loss)


def nothing():
    return None


def raises():
    raise ZeroDivisionError("in the user's file")
"""

TOPOLOGY = """
device: {name: A100, memory: 80 GiB}
levels:
  - {name: host, count: 2, bandwidth: 300 GB/s, latency: 5 us}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model file, a topology, a profile and a plan, made by the commands."""
    made = tmp_path_factory.mktemp("cli")
    (made / "model.py").write_text(MODEL)
    (made / "cluster.yaml").write_text(TOPOLOGY)
    assert run("profile", f"{made}/model.py:workload", "-o", made / "profile.json", "--repeats", "1").exit_code == 0
    done = run("partition", made / "profile.json", "--topology", made / "cluster.yaml", "-o", made / "plan.json")
    assert done.exit_code == 0, done.output
    return made


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def refused(done: Result, *parts: str) -> None:
    """Exit 1, one message that holds all parts, no traceback."""
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output
    assert done.output.count("dpart: ") == 1, done.output
    for part in parts:
        assert part in done.output.replace("\n", " "), done.output


def test_the_files_are_what_the_commands_say(folder) -> None:
    profile, plan = read_file(Profile, folder / "profile.json"), read_file(Plan, folder / "plan.json")
    assert plan.fingerprint == profile.graph.fingerprint
    assert [name for stage in plan.stages for name in stage.layers] == [layer.name for layer in profile.graph.layers]
    done = run("emit", f"{folder}/model.py:workload", folder / "plan.json", "-o", folder / "build")
    assert done.exit_code == 0, done.output
    assert (folder / "build" / "train.py").is_file()
    again = run("emit", f"{folder}/model.py:workload", folder / "plan.json", "-o", folder / "build")
    refused(again, "build", "exists already", "--force")
    forced = run("emit", f"{folder}/model.py:workload", folder / "plan.json", "-o", folder / "build", "--force")
    assert forced.exit_code == 0, forced.output


def test_missing_files_and_names(folder) -> None:
    refused(run("profile", f"{folder}/no.py:workload", "-o", folder / "x.json"), "no.py")
    refused(run("profile", f"{folder}/model.py:nobody", "-o", folder / "x.json"), "nobody")
    refused(run("profile", f"{folder}/model.py", "-o", folder / "x.json"), "file.py:callable")
    refused(run("partition", folder / "no.json", "-o", folder / "x.json"), "no.json", "no such file")
    refused(run("emit", f"{folder}/model.py:workload", folder / "no.json", "-o", folder / "x"), "no.json")
    refused(run("verify", f"{folder}/model.py:workload", folder / "nobuild"), "program.json")
    assert not (folder / "x.json").exists()


def test_a_model_that_cannot_be_captured(folder) -> None:
    done = run("profile", f"{folder}/model.py:data_dependent", "-o", folder / "x.json")
    refused(done, "Branch cannot be captured", "depends on the data", "model.py:22", "Remedy")
    refused(run("profile", f"{folder}/model.py:nothing", "-o", folder / "x.json"), "dpart.Workload")
    assert not (folder / "x.json").exists()


def test_an_error_in_the_users_own_function_is_the_users(folder) -> None:
    done = run("profile", f"{folder}/model.py:raises", "-o", folder / "x.json")
    refused(done, "ZeroDivisionError", "in the user's file", "model.py")


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("300 GB/s", "300", ("bandwidth", "GB/s")),
        ("latency: 5 us", "latncy: 5 us", ("latncy",)),
        ("count: 2", "count: two", ("levels[0].count", "two")),
        ("80 GiB", "80", ("memory", "GiB")),
        ("levels:", "levels: [", ("cluster.yaml",)),
    ],
)
def test_faults_of_a_topology(folder, tmp_path, old: str, new: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "cluster.yaml").write_text(TOPOLOGY.replace(old, new))
    done = run("partition", folder / "profile.json", "--topology", tmp_path / "cluster.yaml", "-o", tmp_path / "p.json")
    refused(done, *parts)
    assert not (tmp_path / "p.json").exists()


def test_a_plan_for_another_model(folder, tmp_path) -> None:
    done = run("emit", f"{folder}/model.py:other", folder / "plan.json", "-o", tmp_path / "build")
    refused(done, read_file(Plan, folder / "plan.json").fingerprint)
    assert not (tmp_path / "build").exists()


def test_an_infeasible_memory_limit_names_the_layer_and_the_bytes(folder, tmp_path) -> None:
    done = run("partition", folder / "profile.json", "--memory-limit", "4 KiB", "-o", tmp_path / "plan.json")
    refused(done, "layer", "bytes too much")
    assert any(layer.name in done.output for layer in read_file(Profile, folder / "profile.json").graph.layers)


def test_existing_output_is_refused_before_any_work(folder) -> None:
    before = (folder / "profile.json").read_bytes()
    refused(run("profile", f"{folder}/model.py:raises", "-o", folder / "profile.json"), "exists already")
    refused(run("partition", folder / "no.json", "-o", folder / "plan.json"), "exists already")
    assert (folder / "profile.json").read_bytes() == before


def test_a_corrupt_plan_lists_its_faults(folder, tmp_path) -> None:
    data = json.loads((folder / "plan.json").read_text())
    data["stages"][0]["devices"] = ["gpu0"]
    data["colour"] = "red"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    done = run("emit", f"{folder}/model.py:workload", tmp_path / "plan.json", "-o", tmp_path / "build")
    assert done.exit_code == 1
    assert 'stages[0].devices[0]: expected an integer, got "gpu0"' in done.output
    assert "colour: no such field" in done.output


def test_usage_errors_exit_2(folder) -> None:
    assert run("partition").exit_code == 2
    assert run("partition", folder / "profile.json", "--method", "magic").exit_code == 2
    assert run("fly").exit_code == 2


@pytest.mark.parametrize("command", ["profile", "partition", "emit", "verify", "compile", "explain", "diff"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"dpart {command}" in done.output


def test_the_commands_load_torch_only_when_they_need_it() -> None:
    code = "import sys, dpart; dpart.commands; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from dpart.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
