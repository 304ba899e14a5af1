"""From a captured model and a plan to a build folder: stage sources, weights, program, plan and ``train.py``.

Everything is written into a new folder that takes its place only when every stage's source has been loaded, has
been found to have the original's parameters, and has been run on shapes alone.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpart.codegen.simplify import simplified
from dpart.codegen.stage_source import stage_source
from dpart.codegen.stages import StageContent, channels, random_calls, stage_contents
from dpart.codegen.train_script import train_script
from dpart.codegen.weights import StageState, shared_parameters, stage_states, write_weights
from dpart.compiler.captured import CapturedModel
from dpart.partitioner.plan import Plan
from dpart.partitioner.runnable import not_runnable
from dpart.runtime.errors import UserError
from dpart.runtime.files import new_folder, write_file, write_text
from dpart.runtime.program import Program, StageProgram, Tensor


def emit(
    captured: CapturedModel,
    plan: Plan,
    folder: str | os.PathLike[str],
    *,
    workload: str | None = None,
    force: bool = False,
) -> None:
    """Writes the build folder of a plan: ``stage_<i>.py`` and its weights, program.json, plan.json, train.py.

    Args:
        workload: Where the training batches come from, as ``file.py:callable`` or ``package.module:callable``.
        force: Replace a build folder that is there.

    Raises:
        UserError: The plan is for another model, decides something that the runtime does not execute, something
            stands at `folder`, or the model has a name or an operation that cannot be written as source.
    """
    missing = not_runnable(plan)
    if missing:
        raise UserError(
            f"The runtime does not execute {', nor '.join(missing)} yet, and this plan needs it: partition again with "
            "the options in brackets."
        )
    captured = simplified(captured)
    contents = stage_contents(captured, plan)
    states = stage_states(captured, contents)
    with new_folder(folder, force=force) as build:
        for content, state in zip(contents, states, strict=True):
            source = build / f"stage_{content.index}.py"
            write_text(stage_source(captured, plan, content, state), source)
            _check(captured, content, state, source)
            write_weights(state, build / f"stage_{content.index}.safetensors")
        program = _program(captured, plan, contents, states, _relative(workload, Path(folder)))
        write_file(program, build / "program.json")
        write_file(plan, build / "plan.json")
        write_text(train_script(program), build / "train.py")


def _program(
    captured: CapturedModel,
    plan: Plan,
    contents: tuple[StageContent, ...],
    states: tuple[StageState, ...],
    workload: str | None,
) -> Program:
    assert plan.optimizer != "adam-mixed" and (plan.schedule == "1f1b" or plan.schedule == "gpipe"), "refused before"
    graph = captured.graph
    random = random_calls(captured)
    stages = tuple(
        StageProgram(
            source=f"stage_{c.index}.py",
            class_name=f"Stage{c.index}",
            weights=f"stage_{c.index}.safetensors",
            num_replicas=stage.num_replicas,
            inputs=tuple(n.name for n in c.inputs),
            outputs=tuple(n.name for n in c.outputs),
            frozen=state.frozen,
            random_calls=tuple(random[n] for n in c.nodes if n in random),
            layers=c.layers,
        )
        for c, state, stage in zip(contents, states, plan.stages, strict=True)
    )
    return Program(
        format="dpart.program",
        version=1,
        model=graph.model,
        fingerprint=graph.fingerprint,
        workload=workload,
        schedule=plan.schedule,
        optimizer=plan.optimizer,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        predicted_step_seconds=plan.step_seconds,
        inputs=_inputs(captured),
        loss=graph.loss,
        stages=stages,
        channels=channels(captured, contents),
        shared_parameters=shared_parameters(states),
    )


def _inputs(captured: CapturedModel) -> tuple[Tensor, ...]:
    found = []
    for name, example in zip(captured.graph.inputs, captured.model.example, strict=True):
        value = captured.graph.value[name]
        integer = not example.is_floating_point() and not example.is_complex()
        high = max(2, int(example.max()) + 1) if integer and example.numel() else None
        found.append(Tensor(name, value.shape, value.dtype, value.batch_dim, high))
    return tuple(found)


def _relative(workload: str | None, folder: Path) -> str | None:
    """The workload's file as seen from the build folder; a package's name as it is."""
    if workload is None:
        return None
    file, colon, name = workload.rpartition(":")
    if not colon or not file.endswith(".py"):
        return workload
    return f"{Path(os.path.relpath(Path(file).resolve(), folder.resolve())).as_posix()}:{name}"


def _check(captured: CapturedModel, content: StageContent, state: StageState, source: Path) -> None:
    """Builds the stage from its source and runs it, on shapes alone, before anyone else does."""
    namespace: dict[str, Any] = {"__name__": source.stem}
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), namespace)
    with torch.device("meta"):
        module: nn.Module = namespace[f"Stage{content.index}"]()
        found = dict(module.named_parameters(remove_duplicate=False)) | dict(
            module.named_buffers(remove_duplicate=False)
        )
        kept = {n for n in state.tensors if n in state.persistent}
        assert set(module.state_dict()) == kept, f"{source.name}: {set(module.state_dict()) ^ kept} differ"
        for name, tensor in state.tensors.items():
            made = found[name]
            same = made.shape == tensor.shape and made.dtype == tensor.dtype
            assert same and isinstance(made, nn.Parameter) == isinstance(tensor, nn.Parameter), (
                f"{source.name}: {name} is {made.dtype} {tuple(made.shape)}, not {tensor.dtype} {tuple(tensor.shape)}"
            )
        values = captured.graph.value
        inputs = [values[n.name] for n in content.inputs]
        results = module(*(torch.empty(v.shape, dtype=getattr(torch, v.dtype)) for v in inputs))
    for node, result in zip(content.outputs, results if isinstance(results, tuple) else (results,), strict=True):
        value = values[node.name]
        assert tuple(result.shape) == value.shape and str(result.dtype) == f"torch.{value.dtype}", (
            f"{source.name}: {value.name} is {result.dtype} {tuple(result.shape)}, not {value.dtype} {value.shape}"
        )
