"""Training a build: what ``train.py`` runs in each of torchrun's processes.

::

    torchrun ─ rank 0: stage 0, replica 0 ┐
             ─ rank 1: stage 1, replica 0 ├ the same batches, one Executor each, one optimizer each
             ─ rank 2: stage 1, replica 1 ┘
"""

import argparse
import json
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from dpart.runtime.callables import load_callable
from dpart.runtime.errors import PeerError, UserError
from dpart.runtime.executor import Executor
from dpart.runtime.files import new_folder, read_file, refuse_existing, write_text
from dpart.runtime.microbatch import check_batch
from dpart.runtime.program import Program
from dpart.runtime.stage import load_stage
from dpart.runtime.transport import together

Batch = tuple[Tensor, ...]

_SECONDS_TO_SPEAK = 5.0
"""How long the other ranks wait for rank 0's message: torchrun ends all as soon as one has ended."""


def main(folder: Path, arguments: Sequence[str] | None = None) -> None:
    """The command line of an emitted ``train.py``."""
    options = _parser(folder).parse_args(arguments)
    with worker(folder, options.threads, options.seed) as executor:
        if options.save is not None and executor.rank == 0:
            refuse_existing(options.save, force=False)  # Now, and not when the run is over.
        batches = _batches(executor.program, folder, options.data, options.seed, quiet=executor.rank > 0)
        train(
            executor,
            batches,
            steps=options.steps,
            optimizer=make_optimizer(executor.module, options.optimizer or executor.program.optimizer, options.lr),
            report=options.json,
        )
        if options.save is not None:
            save_weights(executor, options.save)


def train(
    executor: Executor,
    batches: Callable[[], Iterable[Any]],
    *,
    steps: int,
    optimizer: torch.optim.Optimizer | None,
    report: Path | None = None,
) -> list[float]:
    """Trains for `steps` optimizer steps; rank 0 shows progress and writes the `report`.

    Args:
        batches: Gives the batches from the start each time it is called: pytrees whose tensors are the inputs.

    Returns:
        The loss of every step.
    """
    losses: list[float] = []
    seconds: list[float] = []
    source = _endless(batches)
    bar = tqdm(range(steps), unit="step", disable=executor.rank > 0, file=sys.stderr, dynamic_ncols=True)
    for step in bar:
        executor.doing = "reading a batch"
        leaves = next(source)
        check_batch(leaves, executor.program.inputs)
        began = time.perf_counter()
        _compare_over_ranks(leaves)
        losses.append(executor.step(leaves, step))
        executor.doing = "the optimizer step"
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
    bar.close()
    if executor.rank == 0 and losses:
        _report(executor.program, losses, seconds, report)
    return losses


def make_optimizer(module: nn.Module, name: str, lr: float) -> torch.optim.Optimizer | None:
    """SGD or Adam over a stage's parameters; None for a stage that has none to train."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return None
    return torch.optim.SGD(parameters, lr=lr) if name == "sgd" else torch.optim.Adam(parameters, lr=lr)


@contextmanager
def worker(folder: Path, threads: int, seed: int) -> Iterator[Executor]:
    """This process as a worker of the build, under torchrun; a process group that is there is used and kept.

    The process ends with the block. A fault inside ends it at once with one line that names stage, replica and
    microbatch; torchrun then ends the others.
    """
    executor: Executor | None = None
    given = dist.is_initialized()
    alike = True  # Until they have joined, all ranks fail alike, and one message is enough.
    try:
        program = read_file(Program, folder / "program.json")
        rank = _join(program, folder)
        alike = False
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        module = load_stage(folder, program.stages[program.workers[rank][0]])
        executor = Executor(program, rank, module, seed)
        yield executor
        dist.barrier()
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if alike and os.environ.get("RANK", "0") != "0":
            time.sleep(_SECONDS_TO_SPEAK)
            _leave(1)
        _stop(executor, error)
    if not given:
        _leave(0)


def save_weights(executor: Executor, folder: Path) -> None:
    """Writes every stage's weights under their original names; all of them appear, or none.

    Raises:
        UserError: The folder exists already.
    """
    executor.doing = "saving the weights"
    mine = {n: t.contiguous().clone() for n, t in executor.module.state_dict().items()}
    parts: list[Any] = [None] * len(executor.program.workers)
    dist.gather_object(mine if executor.replica == 0 else {}, parts if executor.rank == 0 else None)
    if executor.rank == 0:
        with new_folder(folder) as made:
            for (stage, replica), part in zip(executor.program.workers, parts, strict=True):
                if replica == 0:
                    save_file(part, made / executor.program.stages[stage].weights)


def _parser(folder: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains this build. Start it with torchrun, one process a worker.",
        epilog=f"example: torchrun --nproc-per-node 2 {folder.name}/train.py --steps 100 --lr 3e-4",
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: 100)")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), help="default: the plan's")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of dropout and random batches (default: 0)")
    parser.add_argument("--data", metavar="FILE.PY:CALLABLE", help="returns the batches (default: the workload's)")
    parser.add_argument("--threads", type=int, default=1, help="of each worker on a CPU (default: 1)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the trained weights there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and measured seconds there")
    return parser


def _join(program: Program, folder: Path) -> int:
    workers = len(program.workers)
    start = f"torchrun --nproc-per-node {workers} {folder.name}/train.py"
    if "RANK" not in os.environ:
        raise UserError(f"Start this with torchrun, which starts one process a worker: {start}")
    world = int(os.environ["WORLD_SIZE"])
    if world != workers:
        raise UserError(f"This build has {workers} workers, and torchrun started {world}: {start}")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def _stop(executor: Executor | None, error: BaseException) -> NoReturn:
    place = f"{executor.where}, {executor.doing}: " if executor else ""
    text = str(error)
    if not isinstance(error, PeerError | UserError):
        text = f"{type(error).__name__}: {' '.join(text.split())}"  # One line, whoever raised it.
    print(f"dpart: {place}{text}", file=sys.stderr, flush=True)
    _leave(1)


def _leave(code: int) -> NoReturn:
    """Ends the process at once.

    No destructor may wait for a peer that waits for this process; and gloo's threads, still running at a regular
    exit, were seen to abort a process whose work was done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _batches(program: Program, folder: Path, data: str | None, seed: int, *, quiet: bool) -> Callable[[], Any]:
    """A function that gives the batches, from the start each time it is called."""
    spec = data
    if spec is None and program.workload is not None:
        place, _, name = program.workload.rpartition(":")
        spec = f"{folder / place if place.endswith('.py') else place}:{name}"
    if spec is not None:
        function = load_callable(spec)
        made = function()
        batches = getattr(made, "batches", made)
        if callable(batches):
            return lambda: batches()
        if isinstance(batches, Iterator):
            return function  # It runs dry; the function makes another.
        if batches is not None:
            return lambda: batches
        if data is not None:
            raise UserError(f"{data} returned no batches.")
    if not quiet:
        print("dpart: no data given, training on random batches of the example's shapes.", file=sys.stderr)
    return lambda: _random_batches(program, seed)


def _random_batches(program: Program, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        leaves = []
        for tensor in program.inputs:
            shape = list(tensor.shape)
            if tensor.batch_dim is not None:
                shape[tensor.batch_dim] *= program.num_microbatches
            dtype = getattr(torch, tensor.dtype)
            if dtype.is_floating_point:
                leaves.append(torch.randn(shape, generator=generator).to(dtype))
            else:
                leaves.append(torch.randint(0, tensor.high or 2, shape, generator=generator).to(dtype))
        yield tuple(leaves)


def _endless(batches: Callable[[], Iterable[Any]]) -> Iterator[Batch]:
    while True:
        count = 0
        for batch in batches():
            count += 1
            yield tuple(x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor))
        if count == 0:
            raise UserError("The data gave no batch.")


def _compare_over_ranks(leaves: Batch) -> None:
    """Raises a `UserError` on every rank unless all ranks read the same batch."""
    digest = 0
    for leaf in leaves:
        digest = zlib.crc32(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), digest)
    ends = torch.tensor([digest, -digest], dtype=torch.int64)
    with together("all ranks"):
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if ends[0] != -ends[1]:
        raise UserError("The ranks read different batches; shuffle the data with a fixed seed.")


def _report(program: Program, losses: list[float], seconds: list[float], path: Path | None) -> None:
    measured = statistics.median(seconds[1:] or seconds)
    predicted = program.predicted_step_seconds
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    print(
        f"step {measured:.4f} s measured (median), {predicted:.4f} s predicted "
        f"({(predicted / measured - 1) * 100:+.1f} %)",
        flush=True,
    )
    if path is not None:
        data = {"losses": losses, "step_seconds": seconds, "median_step_seconds": measured,
                "predicted_step_seconds": predicted}  # fmt: skip
        write_text(json.dumps(data, indent=2) + "\n", path, force=True)
