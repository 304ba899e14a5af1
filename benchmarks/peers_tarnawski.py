"""Our searchers on the workloads of Tarnawski et al., "Efficient Algorithms for Device Placement" (NeurIPS 2020).

The value is the largest load of a device, in the file's unit of
time. Their released program (`throughput-dp`) lists every pair of nested ideals; ours must return its value.
"""

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peers_tarnawski_graph import GraphError, Layers, layers_of, read_workload

from dpart.partitioner import branching, load_ilp, load_moves
from dpart.partitioner.branching import Balanced
from dpart.partitioner.load_bounds import lower_bound
from dpart.partitioner.loads import SharedPlan

Method = Literal["dp", "ilp"]


@dataclass(frozen=True)
class Options:
    """What to search for, and how long; None leaves a count as the file has it."""

    method: Method = "dp"
    contiguous: bool = True
    time_limit_seconds: float = 60.0
    num_accelerators: int | None = None
    num_processors: int | None = None


@dataclass(frozen=True)
class Device:
    """A device that is used: the ids of its nodes in the file."""

    kind: str
    load: float
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What the search found.

    Attributes:
        value: Largest load; None where no plan is known.
        lower_bound: Proved; infinite where nothing fits.
        seconds: From reading the file to the answer.
        num_ideals: With the empty one, as the released program counts; None where they were not listed.
        devices: In the order in which data flows, of a contiguous plan.
    """

    value: float | None
    lower_bound: float
    seconds: float
    num_ideals: int | None
    devices: tuple[Device, ...]


def balance(path: Path, options: Options) -> Answer:
    """Reads a workload and shares its nodes out."""
    began = time.perf_counter()
    workload = read_workload(path)
    counts = [
        count if override is None else override
        for count, override in (
            (workload.num_accelerators, options.num_accelerators),
            (workload.num_processors, options.num_processors),
        )
    ]
    layers = layers_of(workload, *counts)
    found = _search(layers, options, options.time_limit_seconds - (time.perf_counter() - began))
    shares = (found.plan or SharedPlan(())).shares
    devices = tuple(
        Device(
            layers.problem.classes[share.device_class].name,
            share.load,
            tuple(node for layer in share.layers for node in layers.nodes[layer]),
        )
        for share in shares
    )
    return Answer(found.value, found.lower_bound, time.perf_counter() - began, found.num_ideals, devices)


def _search(layers: Layers, options: Options, seconds: float) -> Balanced:
    if options.contiguous and options.method == "dp":
        return branching.search(layers.problem, together=layers.together, time_limit_seconds=seconds)
    began = time.perf_counter()
    together = layers.together if options.contiguous else ()
    # Pieces of a few orders: a plan at hand, from which the others start.
    max_ideals = 0 if options.contiguous else branching.DEFAULT_MAX_IDEALS
    start = branching.search(
        layers.problem, together=layers.together, time_limit_seconds=seconds / 3, max_ideals=max_ideals
    ).plan
    if not options.contiguous and start is not None:
        left = seconds - (time.perf_counter() - began)
        start = load_moves.improve(layers.problem, start, time_limit_seconds=min(left, seconds / 3))
    if options.method == "ilp" or start is None:
        left = max(0.0, seconds - (time.perf_counter() - began))
        try:
            return load_ilp.search(
                layers.problem, together=together, contiguous=options.contiguous, start=start, time_limit_seconds=left
            )
        except load_ilp.SolverError as error:
            print(error, file=sys.stderr)
    free = dataclasses.replace(layers.problem, predecessors=((),) * layers.problem.num_layers)
    return Balanced(start, lower_bound(free), None, time.perf_counter() - began)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the sub-command."""
    parser.add_argument("file", type=Path, help="the workload, JSON")
    parser.add_argument(
        "--method", choices=("dp", "ilp"), default="dp", help="ideals (default), or a mixed-integer programme"
    )
    parser.add_argument("--non-contiguous", action="store_true", help="a device may take any set of layers")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS",
                        help="after which the best plan so far is printed (default: 60)")  # fmt: skip
    parser.add_argument("--accelerators", type=int, metavar="N", help="instead of the file's count")
    parser.add_argument("--processors", type=int, metavar="N", help="instead of the file's count")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Prints the answer; returns the exit status, 1 where the input cannot be read."""
    for name in ("accelerators", "processors", "time_limit"):
        if (getattr(args, name) or 0) < 0:
            parser.error(f"--{name.replace('_', '-')}: {getattr(args, name):g} is below 0")
    options = Options(args.method, not args.non_contiguous, args.time_limit, args.accelerators, args.processors)
    try:
        answer = balance(args.file, options)
    except (OSError, GraphError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_record(answer)) if args.json else _table(answer))
    return 0


def _record(answer: Answer) -> dict[str, object]:
    """Value null: no plan is known; lower bound null, too: there is none."""
    config = [{"device": d.kind, "load": d.load, "nodes": list(d.nodes)} for d in answer.devices]
    return {
        "value": answer.value,
        "lower_bound": answer.lower_bound if answer.lower_bound < float("inf") else None,
        "seconds": answer.seconds,
        "ideals": answer.num_ideals,
        "config": config,
    }


def _table(answer: Answer) -> str:
    value = "no plan" if answer.value is None else f"largest load {answer.value:.9g}"
    lines = [f"{value}, proven to be at least {answer.lower_bound:.9g} ({answer.seconds:.3f} s)"]
    lines += [f"{d.kind:<12}{len(d.nodes):>6} nodes{d.load:>17.9g}" for d in answer.devices]
    return "\n".join(lines)
