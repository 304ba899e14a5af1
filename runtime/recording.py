"""Runs a build for a few steps and writes down everything, for comparison with the unsplit model.

Started by torchrun: ``-m dpart.runtime.recording BUILD --batches FILE --out FOLDER``. After step k, replica 0 of
stage s writes ``step_<k>_stage_<s>.safetensors`` (the loss as ``loss``, each gradient as ``grad/<name>``), at the
end ``final_stage_<s>.safetensors`` (each parameter and buffer as ``state/<name>``).
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dpart.runtime.executor import Executor
from dpart.runtime.program import Program
from dpart.runtime.stage import read_weights
from dpart.runtime.training import make_optimizer, worker


def main() -> None:
    """Parses the command line and records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    record(
        options.build,
        options.batches,
        options.out,
        steps=options.steps,
        seed=options.seed,
        optimizer=options.optimizer,
        lr=options.lr,
    )


def record(build: Path, batches: Path, out: Path, *, steps: int, seed: int, optimizer: str, lr: float) -> None:
    """Runs `steps` optimizer steps of a build on the batches of a file, and writes them down in `out`."""
    with worker(build, 1, seed) as executor:
        given = read_batches(batches, executor.program)
        stepper = make_optimizer(executor.module, optimizer, lr)
        for step in range(steps):
            loss = executor.step(given[step % len(given)], step)
            _write_step(executor, loss, out / f"step_{step}_stage_{executor.stage}.safetensors")
            if stepper is not None:
                stepper.step()
                stepper.zero_grad(set_to_none=True)
        if executor.replica == 0:
            state = _named(executor)
            save_file(_plain(state), out / f"final_stage_{executor.stage}.safetensors")


def read_batches(path: Path, program: Program) -> list[tuple[Tensor, ...]]:
    """The batches of a file with keys ``<number>/<input>``."""
    tensors = read_weights(path)
    count = len({key.split("/")[0] for key in tensors})
    return [tuple(tensors[f"{i}/{tensor.name}"] for tensor in program.inputs) for i in range(count)]


def _write_step(executor: Executor, loss: float, path: Path) -> None:
    if executor.replica != 0:
        return
    found = {"loss": torch.tensor(loss, dtype=torch.float64)}
    for name, parameter in executor.module.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            found[f"grad/{name}"] = parameter.grad
    save_file(_plain(found), path)


def _named(executor: Executor) -> dict[str, Tensor]:
    module = executor.module
    return {
        f"state/{name}": tensor.detach()
        for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        for name, tensor in named
    }


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that own their storage: safetensors refuses shared ones."""
    return {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}


if __name__ == "__main__":
    main()
