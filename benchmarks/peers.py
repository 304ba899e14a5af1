"""Our searchers on the inputs and under the conventions of published partitioners.

``python benchmarks/peers.py pipedream graph.txt -n 4 4 -b 10e9 1.25e9 --json`` takes the flags of the
released PipeDream optimizer and must print its value.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import peers_piper
import peers_tarnawski
from peers_pipedream import Answer, Options, optimize
from peers_pipedream_graph import GraphError
from peers_piper_graph import InputError
from peers_piper_problem import Setting


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one peer; returns the exit status, 1 where the input cannot be read."""
    parser = argparse.ArgumentParser(description="Our searchers under the conventions of published partitioners.")
    peers = parser.add_subparsers(dest="peer", required=True)
    _add_pipedream(peers.add_parser("pipedream", help="PipeDream's optimizer on one of its profiles"))
    _add_piper(peers.add_parser("piper", help="Piper's planner on one of its inputs"))
    peers_tarnawski.add_arguments(peers.add_parser("tarnawski", help="device placement, on one of its workloads"))
    args = parser.parse_args(arguments)
    if args.peer == "piper":
        return _piper(parser, args)
    if args.peer == "tarnawski":
        return peers_tarnawski.run(parser, args)
    if len(args.machines) != len(args.bandwidths):
        parser.error(f"-b: {len(args.bandwidths)} bandwidths for {len(args.machines)} levels of -n; give one each")
    if min(args.machines) < 1 or min(args.bandwidths) <= 0:
        parser.error("-n and -b: machines must be at least 1, bandwidths above 0")
    ratio = args.activation_compression_ratio
    if ratio is not None and ratio <= 0:
        parser.error(f"--activation_compression_ratio: {ratio} is not above 0")
    options = Options(
        machines=tuple(args.machines),
        bandwidths=tuple(args.bandwidths),
        memory_bytes=args.memory_size,
        straight_pipeline=args.straight_pipeline,
        use_memory_constraint=args.use_memory_constraint,
        use_fewer_machines=args.use_fewer_machines,
        activation_compression_ratio=ratio,
    )
    try:
        answer = optimize(args.graph, options)
    except (OSError, GraphError) as error:
        print(f"{args.graph}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_record(answer)) if args.json else _table(answer))
    return 0


def _add_pipedream(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="the profile, graph.txt")
    parser.add_argument("-n", "--all_num_machines", dest="machines", type=int, nargs="+", required=True,
                        metavar="N", help="machines per level, innermost first")  # fmt: skip
    parser.add_argument("-b", "--network_bandwidths", dest="bandwidths", type=float, nargs="+", default=[1e9],
                        metavar="B", help="bytes per second, per level (default: 1e9)")  # fmt: skip
    parser.add_argument("-s", "--memory_size", type=float, default=16e9,
                        help="bytes of each machine (default: 16e9), read with --use_memory_constraint")  # fmt: skip
    parser.add_argument("--straight_pipeline", action="store_true", help="no replicas")
    parser.add_argument("--use_memory_constraint", action="store_true", help="stages must fit their memory")
    parser.add_argument("--use_fewer_machines", action="store_true", help="machines may stay unused")
    parser.add_argument("--activation_compression_ratio", type=float, metavar="C",
                        help="count transfers, divided by this (default: transfers are free)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_piper(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="the input, JSON")
    parser.add_argument("--devices", type=int, required=True, metavar="K", help="a plan may use")
    parser.add_argument("--microbatches", type=int, required=True, metavar="N", help="in a batch")
    parser.add_argument("--memory", type=float, required=True, metavar="BYTES", help="of each device")
    parser.add_argument("--bandwidth", type=float, required=True, metavar="B", help="bytes per second between devices")
    parser.add_argument("--layers", type=int, metavar="L",
                        help="copy the layer that repeats until there are so many (default: as it is)")  # fmt: skip
    parser.add_argument("--exact-recompute", action="store_true",
                        help="choose what recomputes exactly where that is feasible, not by Piper's rule")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _piper(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Value null: nothing fits, proven if `lower_bound` is null too."""
    for name in ("devices", "microbatches", "memory", "bandwidth"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name}: {getattr(args, name):g} is not above 0")
    setting = Setting(args.devices, args.microbatches, args.memory, args.bandwidth, args.exact_recompute)
    try:
        answer = peers_piper.optimize(args.file, setting, args.layers)
    except (OSError, InputError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_piper_record(answer)) if args.json else _piper_table(answer))
    return 0


def _piper_record(answer: peers_piper.Answer) -> dict[str, object]:
    """As recorded for Piper's program: d replicas, t the tensor-parallel degree."""
    stages = [
        {
            "layers": len(stage.layers),
            "d": stage.replicas,
            "t": stage.degree,
            "recompute_layers": len(stage.recomputing),
            "node_ids": list(stage.layers),
            "recompute_ids": list(stage.recomputing),
            "seconds": stage.seconds,
        }
        for stage in answer.stages
    ]
    config = {
        "devices_used": sum(stage.replicas * stage.degree for stage in answer.stages),
        "sum_d": sum(stage.replicas for stage in answer.stages),
        "stages": stages,
    }
    return {
        "value": answer.value,
        "lower_bound": answer.lower_bound,
        "seconds": answer.seconds,
        "config": config if stages else None,
    }


def _piper_table(answer: peers_piper.Answer) -> str:
    bound = "" if answer.lower_bound is None else f", proven to be at least {answer.lower_bound:.9g}"
    value = "no plan found" if answer.value is None else f"{answer.value:.9g} per microbatch"
    lines = [f"{value}{bound} (searched in {answer.seconds:.3f} s)"]
    lines += ["layers  replicas  degree  recompute   per microbatch"] if answer.stages else []
    lines += [
        f"{len(stage.layers):>6}{stage.replicas:>10}{stage.degree:>8}{len(stage.recomputing):>11}{stage.seconds:>17.9g}"
        for stage in answer.stages
    ]
    return "\n".join(lines)


def _record(answer: Answer) -> dict[str, object]:
    """As recorded for the released program: level 1 is the innermost, states count from 0."""
    config = [
        {
            "level": len(answer.levels) - depth,
            "stages": [
                {"states": [stage.start, stage.stop], "raw_compute_s": raw, "replicas": stage.num_machines}
                for stage, raw in zip(stages, raw_seconds, strict=True)
            ],
        }
        for depth, (stages, raw_seconds) in enumerate(zip(answer.levels, answer.raw_seconds, strict=True))
    ]
    return {"value": answer.value, "seconds": answer.seconds, "states": answer.states, "config": config}


def _table(answer: Answer) -> str:
    value = "no plan fits, or too many states" if answer.value is None else f"{answer.value:.9g} s per minibatch"
    lines = [f"{value} ({answer.states or 'too many'} states, searched in {answer.seconds:.3f} s)"]
    for depth, (stages, raw_seconds) in enumerate(zip(answer.levels, answer.raw_seconds, strict=True)):
        lines.append(f"level {len(answer.levels) - depth}:      states  replicas  compute seconds")
        for stage, raw in zip(stages, raw_seconds, strict=True):
            lines.append(f"{f'{stage.start}..{stage.stop}':>20}{stage.num_machines:>10}{raw:>17.6f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
