"""`verify`: the split model in worker processes beside the whole model in this one, number by number.

::

    workload ─ eager, with the build's weights ─> WholeModel ─────────────> loss, gradients, parameters ┐
    build ──── torchrun ─ dpart.runtime.recording ─ one file a stage ─────> loss, gradients, parameters ┴> Report

Both see the same batches, cut into the same microbatches, and draw the same dropout masks. Without replicas
every number must be the same to the last bit; replicas add gradients up in another order.
"""

import copy
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from dpart.compiler.capture import capture
from dpart.compiler.workload import LossModel, Workload, load_workload
from dpart.report import Comparison, Report
from dpart.runtime.errors import PeerError, UserError
from dpart.runtime.files import read_file
from dpart.runtime.microbatch import check_batch
from dpart.runtime.program import Program
from dpart.runtime.stage import read_weights
from dpart.runtime.training import make_optimizer
from dpart.runtime.whole import WholeModel

Tensors = dict[str, Tensor]


def verify(
    workload: Workload | str,
    folder: str | os.PathLike[str],
    *,
    steps: int = 3,
    optimizer: Literal["sgd", "adam"] | None = None,
    lr: float = 1e-3,
    seed: int = 0,
) -> Report:
    """Trains a workload for a few steps whole and split, and compares everything.

    Args:
        workload: The model, or its ``file.py:callable``.
        folder: The build folder that `emit` made of it.
        optimizer: None for the plan's; for sgd where there are replicas, as Adam turns the rounding of
            gradients that are zero in exact arithmetic into whole steps.
        seed: Of the dropout masks.

    Raises:
        UserError: The build is for another model or cannot be read, or a batch does not fit.
        PeerError: A worker failed.
    """
    build = Path(folder)
    program = read_file(Program, build / "program.json")
    loaded = load_workload(workload) if isinstance(workload, str) else workload
    captured = capture(loaded, microbatch_size=program.microbatch_size)
    if captured.graph.fingerprint != program.fingerprint:
        raise UserError(
            f"{build} was made for a model with fingerprint {program.fingerprint} ({program.model}), and this one "
            f"has {captured.graph.fingerprint} ({captured.graph.model}): emit it again."
        )
    return compare(captured.model, loaded, build, steps=steps, optimizer=optimizer, lr=lr, seed=seed)


def compare(
    model: LossModel,
    workload: Workload,
    build: Path,
    *,
    steps: int,
    optimizer: Literal["sgd", "adam"] | None = None,
    lr: float = 1e-3,
    seed: int = 0,
) -> Report:
    """`verify` for a model that is known to be the build's; the model is left as it was."""
    if steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}.")
    program = read_file(Program, build / "program.json")
    replicated = any(stage.num_replicas > 1 for stage in program.stages)
    chosen = optimizer or ("sgd" if replicated else program.optimizer)
    batches = _batches(model, workload, program, steps)
    whole = LossModel(copy.deepcopy(model.model).train(), workload)
    _fill(whole, build, program)
    with tempfile.TemporaryDirectory(prefix="dpart-") as name, _one_thread():
        out = Path(name)
        _write_batches(batches, program, out / "batches.safetensors")
        _record(build, program, out, steps=steps, optimizer=chosen, lr=lr, seed=seed)
        runner = WholeModel(whole, [t.batch_dim for t in program.inputs], program.microbatch_size, seed=seed)
        update = make_optimizer(whole, chosen, lr)
        rows: list[Comparison] = []
        for step in range(steps):
            loss = runner.step(batches[step % len(batches)], step)
            rows += _compare_step(whole, loss, step, [out / f"step_{step}_stage_{s}" for s in _stages(program)])
            if update is not None:
                update.step()
                update.zero_grad(set_to_none=True)
        rows += _compare_end(whole, program, [out / f"final_stage_{s}" for s in _stages(program)], steps)
    return Report(program.model, tuple(s.num_replicas for s in program.stages), steps, chosen, tuple(rows))


def _batches(model: LossModel, workload: Workload, program: Program, steps: int) -> list[tuple[Tensor, ...]]:
    """The workload's first batches, or its example."""
    if workload.batches is None:
        planned = program.num_microbatches * program.microbatch_size
        same = -(-model.batch_size // program.microbatch_size) == program.num_microbatches
        found = [model.rows(model.batch_size if same else planned)]
    else:
        taken = itertools.islice(workload.batches(), steps)
        found = [tuple(x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)) for batch in taken]
        if not found:
            raise UserError("The workload's batches() gave no batch.")
    for batch in found:
        check_batch(batch, program.inputs)
    return found


def _write_batches(batches: list[tuple[Tensor, ...]], program: Program, path: Path) -> None:
    save_file(
        {
            f"{i}/{tensor.name}": leaf.detach().contiguous().clone()
            for i, batch in enumerate(batches)
            for tensor, leaf in zip(program.inputs, batch, strict=True)
        },
        path,
    )


def _fill(model: LossModel, build: Path, program: Program) -> None:
    """Gives the whole model the build's weights."""
    slots = _state(model)
    for stage in program.stages:
        for name, tensor in read_weights(build / stage.weights).items():
            if name in slots:  # A tensor made inside forward is the stage's alone.
                slots[name].copy_(tensor)


def _record(build: Path, program: Program, out: Path, *, steps: int, optimizer: str, lr: float, seed: int) -> None:
    """Runs the build's workers on this machine until they have written their files to `out`."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(program.workers)}",
        "-m", "dpart.runtime.recording", str(build), "--batches", str(out / "batches.safetensors"), "--out", str(out),
        "--steps", str(steps), "--optimizer", optimizer, "--lr", repr(lr), "--seed", str(seed),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = [line.removeprefix("dpart: ") for line in lines if line.startswith("dpart: ")]
        raise PeerError("\n".join(["The workers failed:", *(dict.fromkeys(said) if said else lines[-8:])]))


def _compare_step(whole: LossModel, loss: float, step: int, files: list[Path]) -> list[Comparison]:
    split = _merged(files, "grad/")
    losses = [read_weights(file.with_suffix(".safetensors"))["loss"].item() for file in files]
    worst = max(losses, key=lambda found: abs(found - loss))
    gradients = {n: p.grad for n, p in whole.model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return [
        Comparison.of(f"step {step}: loss", {"loss": _scalar(loss)}, [("loss", _scalar(worst))]),
        Comparison.of(f"step {step}: gradients", gradients, split),
    ]


def _compare_end(whole: LossModel, program: Program, files: list[Path], steps: int) -> list[Comparison]:
    """Parameters, then buffers; those of replicated stages are averages, which are not the whole model's."""
    buffers = dict(whole.model.named_buffers(remove_duplicate=False))
    parameters = {n: p.detach() for n, p in whole.model.named_parameters(remove_duplicate=False)}
    plain = [file for file, stage in zip(files, program.stages, strict=True) if stage.num_replicas == 1]
    kept = [(n, t) for n, t in _merged(files, "state/") if n in parameters]
    rows = [Comparison.of(f"after {steps} step(s): parameters", _present(parameters, kept), kept)]
    held = [(n, t) for n, t in _merged(plain, "state/") if n in buffers]
    if held:
        rows.append(Comparison.of(f"after {steps} step(s): buffers", _present(buffers, held), held))
    return rows


def _merged(files: list[Path], prefix: str) -> list[tuple[str, Tensor]]:
    """What all stages wrote under a prefix; a name that two stages hold stands there twice."""
    return [
        (name.removeprefix(prefix), tensor)
        for file in files
        for name, tensor in read_weights(file.with_suffix(".safetensors")).items()
        if name.startswith(prefix)
    ]


def _present(tensors: Mapping[str, Tensor], split: list[tuple[str, Tensor]]) -> Tensors:
    """What no stage reads stands in no build, and no step changes it."""
    names = {name for name, _ in split}
    return {name: tensor for name, tensor in tensors.items() if name in names}


def _state(model: LossModel) -> Tensors:
    inner = model.model
    parameters = {n: p.detach() for n, p in inner.named_parameters(remove_duplicate=False)}
    return parameters | dict(inner.named_buffers(remove_duplicate=False))


def _stages(program: Program) -> range:
    return range(len(program.stages))


def _scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the workers have: another number of threads adds up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
