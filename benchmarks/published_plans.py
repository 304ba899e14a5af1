"""The plans that PipeDream published for its own models, beside the best ones under our cost model.

    python benchmarks/published_plans.py [--json] [MODEL ...]

Narayanan et al. (SOSP 2019, Table 1) ran these on four hosts of four V100 with 10 Gbit/s between hosts. A plan runs
asynchronously, so its value is its period, the seconds from one minibatch to the next once the pipeline is full: of
all stages the largest of computing, sending and all-reducing (`dpart.partitioner.formulas.asynchronous_period`).
The paper names replicas and not cuts; each plan gets the best cuts for its replicas.

DPART_PEERS names the folder with the published profiles.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from asynchronous import Costs, Plan, best_plan, bindings, costs_of, evaluate, even_split, in_a_row, keeps_to_hosts
from peers_pipedream_graph import GraphError
from published_profiles import read_profile

from dpart.partitioner.links import link_named
from dpart.partitioner.topology import Device, Level, Topology

PUBLISHED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"vgg16": (15, 1), "alexnet": (15, 1), "resnet50": (16,), "gnmt": (1,) * 16}
)
"""Replicas of each stage, by model."""

_SAME = 1 + 1e-9


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        published_seconds: Period of the published plan.
        ours_seconds: Period of the best plan.
        even_seconds: Period of the best plan with as many layers and replicas in every stage.
        cuts: How many places could be cut.
        all_cuts: Whether these were all the places there are; if not, those of one order of the layers.
    """

    model: str
    published: str
    published_seconds: float
    ours: str
    ours_seconds: float
    even: str
    even_seconds: float
    cuts: int
    all_cuts: bool
    reason: str


def cluster() -> Topology:
    """Four hosts of four V100 on PCIe, 10 Gbit/s between hosts: the paper's cluster A."""
    inside, between = link_named("pcie3"), link_named("10gbe")
    return Topology(
        Device("v100-16-pcie", 16 * 2**30),
        (
            Level("host", 4, inside.bandwidth_bytes_per_second, inside.type.latency_seconds),
            Level("cluster", 4, between.bandwidth_bytes_per_second, between.type.latency_seconds),
        ),
    )


def compare(path: Path, published: Sequence[int]) -> Row:
    """Everything about one profile.

    Raises:
        OSError: The file cannot be read.
        GraphError: It is no profile.
    """
    costs, topology = costs_of(read_profile(path)), cluster()
    theirs = best_plan(costs, topology, in_a_row(published))
    assert theirs is not None, f"no cuts for replicas {published}"
    ours, even = best_plan(costs, topology), even_split(costs, topology)
    assert ours is not None
    seconds = [evaluate(costs, topology, plan) for plan in (theirs, ours, even)]
    return Row(
        model=path.name.split(".")[0],
        published=_words(theirs),
        published_seconds=seconds[0],
        ours=_words(ours),
        ours_seconds=seconds[1],
        even=_words(even),
        even_seconds=seconds[2],
        cuts=len(costs.member) - 2,
        all_cuts=costs.complete,
        reason=_reason(costs, topology, theirs, ours),
    )


def _reason(costs: Costs, topology: Topology, theirs: Plan, ours: Plan) -> str:
    held, ours_held = (bindings(costs, topology, plan)[0] for plan in (theirs, ours))
    if evaluate(costs, topology, theirs) <= evaluate(costs, topology, ours) * _SAME:
        return f"no plan is faster than the published one. What holds it up is {held}."
    inside = "; no all-reduce of it leaves a host" if keeps_to_hosts(topology, ours) else ""
    return f"the published plan is held up by {held}; ours by {ours_held}{inside}."


def _words(plan: Plan) -> str:
    """As the paper writes it: ``15-1``, ``straight`` for one replica of each."""
    replicas = [stage.num_replicas for stage in plan]
    if len(replicas) > 1 and set(replicas) == {1}:
        return f"straight, {len(replicas)} stages"
    if len(replicas) > 4 and len(set(replicas)) == 1:
        return f"{replicas[0]} x {len(replicas)} stages"
    return "-".join(map(str, replicas))


def rows_of(folder: Path, models: Sequence[str]) -> list[Row]:
    """Of the models with a published plan, in a folder of profiles."""
    return [compare(folder / f"{model}.graph.txt", PUBLISHED[model]) for model in models]


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of markdown."""
    lines = [
        "| profile | published | period, ms | ours | period, ms | ratio | even split | period, ms |",
        "|---|---|---:|---|---:|---:|---|---:|",
    ]
    lines += [
        f"| {r.model} | {r.published} | {1e3 * r.published_seconds:.3f} | {r.ours} | {1e3 * r.ours_seconds:.3f} "
        f"| {r.published_seconds / r.ours_seconds:.2f} | {r.even} | {1e3 * r.even_seconds:.3f} |"
        for r in rows
    ]
    cut = {True: "every cut of the graph", False: "the cuts of one order of the layers"}
    return [*lines, "", *(f"- {r.model}, {cut[r.all_cuts]} ({r.cuts}): {r.reason}" for r in rows)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the comparison; returns 1 where the profiles are not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(PUBLISHED)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    if unknown := [model for model in args.models if model not in PUBLISHED]:
        parser.error(f"{', '.join(unknown)}: plans are published for {', '.join(PUBLISHED)}")
    if "DPART_PEERS" not in os.environ:
        print("DPART_PEERS is unset: the published inputs are not here.", file=sys.stderr)
        return 1
    try:
        rows = rows_of(Path(os.environ["DPART_PEERS"]) / "pipedream", args.models or list(PUBLISHED))
    except (OSError, GraphError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"rows": [asdict(row) for row in rows]}) if args.json else "\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
