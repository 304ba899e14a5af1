"""Our searchers on the inputs and under the conventions of published partitioners.

``python benchmarks/peers.py pipedream graph.txt -n 4 4 -b 10e9 1.25e9 --json`` takes the flags of the
released PipeDream optimizer and must print its value.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from peers_pipedream import Answer, Options, optimize
from peers_pipedream_graph import GraphError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one peer; returns the exit status, 1 where the input cannot be read."""
    parser = argparse.ArgumentParser(description="Our searchers under the conventions of published partitioners.")
    peers = parser.add_subparsers(dest="peer", required=True)
    _add_pipedream(peers.add_parser("pipedream", help="PipeDream's optimizer on one of its profiles"))
    args = parser.parse_args(arguments)
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
