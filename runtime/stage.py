"""Loads one stage's module from a build folder: its source, then its weights into it."""

import importlib.util
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dpart.runtime.errors import UserError
from dpart.runtime.program import StageProgram


def load_stage(folder: Path, stage: StageProgram) -> nn.Module:
    """The stage's module with its weights, in train mode.

    Raises:
        UserError: A file is missing or outside the folder, or the weights are not the module's.
    """
    source, weights = _inside(folder, stage.source), _inside(folder, stage.weights)
    loading = importlib.util.spec_from_file_location(f"_dpart_build_{source.stem}", source)
    assert loading is not None
    assert loading.loader is not None
    code = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(code)
    with torch.device("meta"):
        module: nn.Module = getattr(code, stage.class_name)()
    fill(module, read_weights(weights), str(weights))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in stage.frozen)
    return module.train()


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or a `UserError` that says why there are none."""
    try:
        # Copies, because kernels may round otherwise on memory that is not aligned, as a mapped file is not.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None


def fill(module: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Gives a module built on the meta device its parameters and buffers, persistent or not.

    Raises:
        UserError: Names, shapes or dtypes differ; all faults are listed.
    """
    slots = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    faults = [f"{name} is missing" for name in sorted(slots.keys() - tensors.keys())]
    faults += [f"{name} is unknown" for name in sorted(tensors.keys() - slots.keys())]
    for name in slots.keys() & tensors.keys():
        wanted, got = slots[name], tensors[name]
        if wanted.shape != got.shape or wanted.dtype != got.dtype:
            faults.append(f"{name} should be {wanted.dtype} {tuple(wanted.shape)}, is {got.dtype} {tuple(got.shape)}")
    if faults:
        raise UserError(f"{source} does not fit its stage: " + "; ".join(faults) + ".")
    made: dict[int, Tensor] = {}
    for name, slot in slots.items():
        # Tied names share one tensor before, and share one afterwards.
        if id(slot) not in made:
            tensor = tensors[name]
            made[id(slot)] = nn.Parameter(tensor, slot.requires_grad) if isinstance(slot, nn.Parameter) else tensor
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = made[id(slot)]  # type: ignore[assignment]


def _inside(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise UserError(f"program.json: {name!r} lies outside the build folder.")
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    return path
