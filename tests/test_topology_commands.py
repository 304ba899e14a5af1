"""`dpart topology`: what a person types, what is written, and that two processes measure the link between them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpart.cli import main
from dpart.partitioner.hosts import DEVICE_LINKS, HOSTS, catalogue_topology
from dpart.partitioner.links import LINKS
from dpart.partitioner.topology import read_topology, topology_text

MATRIX = """\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNODE\tNV4\t0-31\t0
GPU1\tNODE\t X \tNODE\t0-31\t0
GPU2\tNV4\tNODE\t X \t0-31\t0
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["topology", *words])


def refused(done: Result, *parts: str) -> None:
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output
    assert all(part in done.output for part in parts), done.output


@pytest.mark.parametrize("command", ["show", "list", "import", "measure"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert "Example" in done.output and f"topology {command}" in done.output


def test_show_a_word_and_a_file(folder) -> None:
    done = run("show", "2xdgx-h100+3xdgx-a100-80")
    assert done.exit_code == 0, done.output
    for part in (
        "40 devices", "18xnvlink4", "450 GB/s", "pool 1, cluster", "between pools", "$6.88", "989 T",
        "Source of dgx-a100-80: NVIDIA DGX A100 data sheet", "Source of ndr", "its latency is assumed",
    ):  # fmt: skip
        assert part in done.output, part
    assert "Warning" not in done.output
    text = topology_text(catalogue_topology("13xa100-80")).replace("200 GB/s", "200 TB/s")
    (folder / "t.yaml").write_text(text)
    done = run("show", "t.yaml")
    assert done.exit_code == 0
    for part in ("13 devices", "3 fewer", "Warning: level 'cluster': 200 TB/s is above", "200 GB/s meant"):
        assert part in done.output, part


def test_the_list_has_everything() -> None:
    done = run("list")
    assert done.exit_code == 0
    words = done.output.split()
    assert {*HOSTS, *DEVICE_LINKS, *LINKS} <= set(words)


def test_import_writes_what_it_shows(folder) -> None:
    (folder / "m.txt").write_text(MATRIX)
    done = run("import", "m.txt", "--device", "a6000", "-o", "t.yaml")
    assert done.exit_code == 0, done.output
    assert "Wrote t.yaml" in done.output and "Next: dpart partition" in done.output
    topology = read_topology("t.yaml")
    assert (topology.num_devices, topology.missing, topology.device.name) == (3, 1, "a6000")
    notes = [line.removeprefix("Note: ") for line in done.output.splitlines() if line.startswith("Note: ")]
    assert notes and all(f"# {note}\n" in (folder / "t.yaml").read_text() for note in notes)
    assert any("CUDA_VISIBLE_DEVICES=0,2,1" in note for note in notes)
    refused(run("import", "m.txt", "-o", "t.yaml"), "exists already")
    assert run("import", "m.txt", "-o", "t.yaml", "--force").exit_code == 0
    assert read_topology("t.yaml").device.name == "rtx3090"


def test_faults_are_messages(folder) -> None:
    (folder / "cut.txt").write_text(MATRIX[:-30])
    refused(run("import", "cut.txt"), "cut.txt: topo -m", "GPU2")
    refused(run("import", "no.txt"), "no.txt: no such file")
    refused(run("show", "dgx-hundred"), "no such file, and no host or device 'dgx-hundred'", "dpart topology list")
    refused(run("show", "no.yaml"), "no.yaml: no such file")
    refused(run("measure"), "torchrun --standalone")
    assert run("show").exit_code == 2
    assert not (folder / "topology.yaml").exists()


def test_only_measuring_loads_torch() -> None:
    code = (
        "import sys; from dpart.cli import main\n"
        "try: main(['topology', 'show', 'dgx-h100'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_measuring_spares_what_is_there(folder, monkeypatch) -> None:
    (folder / "t.yaml").write_text("mine")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(run("measure", "-o", "t.yaml"), "t.yaml: exists already", "--force")
    assert (folder / "t.yaml").read_text() == "mine"
    monkeypatch.setenv("WORLD_SIZE", "1")
    refused(run("measure", "-o", "t.yaml", "--force"), "run two at least")


def test_two_processes_measure_the_link_between_them(folder) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dpart.cli"]
    words += ["topology", "measure", "-o", "t.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Wrote t.yaml") == 1
    topology = read_topology("t.yaml")
    (level,) = topology.levels
    assert (topology.num_devices, topology.device.name, level.name) == (2, "CPU core", "host")
    # A link of one machine, whatever else it does: between a slow disk's and a memory's.
    assert 1e6 < level.bandwidth_bytes_per_second < 1e12
    assert 1e-7 < level.latency_seconds < 1
    assert run("show", "t.yaml").exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["t.yaml"]
