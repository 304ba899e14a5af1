"""Runs many builds of one world size in one torchrun, and compares each with the unsplit model."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dpart.codegen.emit import emit
from dpart.compiler.capture import capture
from dpart.compiler.workload import Workload
from dpart.partitioner.partition import partition
from dpart.partitioner.plan import Plan
from dpart.profiler.profile import LayerCost, Machine, Profile
from dpart.runtime.whole import WholeModel

_DRIVER = """
import json, os, pathlib, sys
import torch.distributed
from dpart.runtime.recording import record
torch.distributed.init_process_group("gloo")
for case in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    folder = pathlib.Path(case)
    record(folder / "build", folder / "batches.safetensors", folder, steps=2, seed=7, optimizer="adam", lr=1e-2)
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)

"""


@dataclass(frozen=True)
class Case:
    """A workload and where it is cut.

    Attributes:
        cuts: Names of the first layer of stage 1, 2, ...; or None to cut evenly by the number of layers.
    """

    name: str
    workload: Workload
    replicas: tuple[int, ...]
    cuts: tuple[str, ...] | None = None
    schedule: str = "1f1b"
    microbatch_size: int = 2


@dataclass(frozen=True)
class Difference:
    """Between the split and the unsplit run: largest absolute ones, gradients also as a share of the largest."""

    loss: float
    gradient: float
    relative_gradient: float
    parameter: float
    gradients_compared: int


def compare(cases: list[Case], folder: Path) -> dict[str, Difference]:
    """Runs all cases, which have the same number of workers, and gives the difference of each."""
    captured = {}
    for case in cases:
        captured[case.name] = _build(case, folder / case.name)
    (folder / "driver.py").write_text(_DRIVER)
    (folder / "cases.json").write_text(json.dumps([str(folder / case.name) for case in cases]))
    workers = sum(cases[0].replicas)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    done = subprocess.run(
        [sys.executable, *command, str(folder / "driver.py"), str(folder / "cases.json")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {case.name: _difference(case, captured[case.name], folder / case.name) for case in cases}


def even_profile(captured) -> Profile:
    """A profile in which every layer costs the same: what is tested here is not the planner."""
    costs = tuple(LayerCost(layer.name, 1e-3, 2e-3, 0.0, 0.0, 0, 0, 0, 0, 0, 1) for layer in captured.graph.layers)
    machine = Machine("cpu", 8, 2**34, 1)
    return Profile("dpart.profile", 1, captured.graph, captured.model.batch_size, machine, 1.0, costs)


def plan_for(captured, case: Case) -> Plan:
    """A plan with the case's cuts."""
    plan = partition(even_profile(captured), replicas=case.replicas, schedule=case.schedule)
    if case.cuts is None:
        return plan
    names = [layer.name for layer in captured.graph.layers]
    places = [0, *(names.index(cut) for cut in case.cuts), len(names)]
    parts = [tuple(names[a:b]) for a, b in pairwise(places)]
    stages = tuple(replace(stage, layers=part) for stage, part in zip(plan.stages, parts, strict=True))
    return replace(plan, stages=stages)


def _build(case: Case, folder: Path):
    folder.mkdir()
    captured = capture(case.workload, microbatch_size=case.microbatch_size)
    emit(captured, plan_for(captured, case), folder / "build")
    batches = {}
    for step in range(2):
        order = torch.randperm(captured.model.batch_size, generator=torch.Generator().manual_seed(step))
        for name, leaf, dim in zip(
            captured.graph.inputs, captured.model.example, captured.model.batch_dims, strict=True
        ):
            batches[f"{step}/{name}"] = leaf.clone() if dim is None else leaf[order].contiguous()
    save_file(batches, folder / "batches.safetensors")
    return captured


def _difference(case: Case, captured, folder: Path) -> Difference:
    model, stages = captured.model, range(len(case.replicas))
    batches = {k: v.clone() for k, v in load_file(folder / "batches.safetensors").items()}
    named = dict(model.model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    whole = WholeModel(model, model.batch_dims, case.microbatch_size, seed=7)
    loss_gap = gradient_gap = relative = 0.0
    compared = 0
    for step in range(2):
        loss = whole.step([batches[f"{step}/{name}"] for name in captured.graph.inputs], step)
        expected = {name: p.grad for name, p in named.items() if p.grad is not None}
        largest = max(g.abs().max().item() for g in expected.values())
        seen = set()
        for stage in stages:
            found = load_file(folder / f"step_{step}_stage_{stage}.safetensors")
            loss_gap = max(loss_gap, abs(found.pop("loss").item() - loss))
            for key, gradient in found.items():
                name = key.removeprefix("grad/")
                seen.add(name)
                gap = (gradient - expected[name]).abs().max().item()
                gradient_gap, relative, compared = max(gradient_gap, gap), max(relative, gap / largest), compared + 1
        assert seen == expected.keys(), "a gradient is missing in the split run"
        optimizer.step()
        optimizer.zero_grad()
    parameter_gap = max(
        (tensor - named[name.removeprefix("state/")]).abs().max().item()
        for stage in stages
        for name, tensor in load_file(folder / f"final_stage_{stage}.safetensors").items()
        if name.removeprefix("state/") in named
    )
    return Difference(loss_gap, gradient_gap, relative, parameter_gap, compared)
