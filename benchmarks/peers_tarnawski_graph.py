"""The workloads of Tarnawski et al. (2020), read as the released program reads them.

A file is one JSON object: `nodes` (times on an accelerator, `fpgaLatency`, and on a processor, `cpuLatency`; bytes;
whether it belongs to the backward pass; a colour that nodes on one device share), `edges` with the time to move
the output of their source, and the devices. A layer of the problem is a colour, forward and backward together,
and only the forward part orders layers. What the program does to the graph first, and so must be done here:

- A colour with backward nodes only gets an empty forward node. Backward edges from or to such a colour order the
  layers, in reverse.
- Colours on a cycle are merged.
- A *trivial* layer has no forward time, no backward time and no edge between forward and backward, and exactly one
  neighbour: it is merged into that one, again and again.

Times are the file's own units (milliseconds; transfers of the layer graphs are seconds, and are added all the
same).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpart.partitioner.loads import DeviceClass, LoadProblem, Transfer, contract

_NO_TIME = 1e-6
_SAME_COST = 1e-6


class GraphError(ValueError):
    """A workload that cannot be read."""


@dataclass(frozen=True)
class Node:
    """A node of the file; `colour` is an index, nodes without one have one each."""

    id: int
    colour: int
    accelerator: float
    processor: float
    size_bytes: float
    backward: bool
    supported: bool


@dataclass(frozen=True)
class Workload:
    """A file as it stands.

    Attributes:
        nodes: In the order of the file.
        edges: Pairs of indices of nodes.
        cost: For each node, the time to move its output; 0 where nobody reads it.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    cost: tuple[float, ...]
    num_accelerators: int
    num_processors: int
    memory_bytes: float


@dataclass(frozen=True)
class Layers:
    """The workload as a load-balancing problem, a layer per colour.

    Attributes:
        problem: Accelerators are class 0, processors class 1.
        together: Layers that the released program merges before it searches.
        nodes: Of each layer, the ids in the file.
    """

    problem: LoadProblem
    together: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[int, ...], ...]


def read_workload(path: Path) -> Workload:
    """Reads and checks a file.

    Raises:
        GraphError: It is no workload; the message has the first faults.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        records = content["nodes"]
        index = {record["id"]: number for number, record in enumerate(records)}
        colours: dict[object, int] = {}
        nodes = tuple(_node(record, colours) for record in records)
        edges = tuple((index[edge["sourceId"]], index[edge["destId"]]) for edge in content["edges"])
        cost = _costs(nodes, [source for source, _ in edges], [float(edge["cost"]) for edge in content["edges"]])
        devices = int(content["maxFPGAs"]), int(content["maxCPUs"]), float(content["maxSizePerFPGA"])
    except KeyError as error:
        raise GraphError(f"there is no {error}, neither a field nor a node") from error
    except (TypeError, ValueError) as error:
        raise GraphError(str(error)) from error
    if len(index) < len(nodes):
        raise GraphError("two nodes have the same id")
    return Workload(nodes, edges, cost, *devices)


def _node(record: Mapping[str, Any], colours: dict[object, int]) -> Node:
    colour = record.get("colorClass")
    key = ("node", record["id"]) if colour is None else ("colour", colour)
    return Node(
        id=record["id"],
        colour=colours.setdefault(key, len(colours)),
        accelerator=float(record["fpgaLatency"]),
        processor=float(record["cpuLatency"]),
        size_bytes=float(record["size"]),
        backward=bool(record["isBackwardNode"]),
        supported=bool(record["supportedOnFpga"]),
    )


def _costs(nodes: Sequence[Node], sources: Sequence[int], costs: Sequence[float]) -> tuple[float, ...]:
    """By node; all edges from a node must cost the same."""
    of: dict[int, float] = {}
    for source, cost in zip(sources, costs, strict=True):
        if abs(of.setdefault(source, cost) - cost) > _SAME_COST:
            raise ValueError(f"edges from node {nodes[source].id} cost {of[source]} and {cost}: give them one cost")
    return tuple(of.get(number, 0.0) for number in range(len(nodes)))


def layers_of(workload: Workload, num_accelerators: int, num_processors: int) -> Layers:
    """A layer per colour, with what the released program merges."""
    nodes = workload.nodes
    size = 1 + max((node.colour for node in nodes), default=-1)
    members: list[list[Node]] = [[] for _ in range(size)]
    for node in nodes:
        members[node.colour].append(node)
    into: list[dict[int, None]] = [{} for _ in range(size)]
    joined = [False] * size
    forward = [any(not node.backward for node in many) for many in members]
    readers: list[set[int]] = [set() for _ in nodes]
    for source, target in workload.edges:
        a, b = nodes[source], nodes[target]
        readers[source].add(b.colour)
        if a.backward != b.backward:
            joined[(b if a.backward else a).colour] = True
        elif a.colour != b.colour and not a.backward:
            into[b.colour][a.colour] = None
        elif a.colour != b.colour and not (forward[a.colour] and forward[b.colour]):
            into[a.colour][b.colour] = None
    problem = LoadProblem(
        predecessors=tuple(tuple(before) for before in into),
        memory_bytes=np.array([sum(node.size_bytes for node in many) for many in members]),
        classes=(
            DeviceClass(
                "accelerator",
                num_accelerators,
                np.array([sum(n.accelerator if n.supported else np.inf for n in many) for many in members]),
                workload.memory_bytes,
            ),
            DeviceClass(
                "processor", num_processors, np.array([sum(n.processor for n in many) for many in members]),
                transfer_scale=0.0,
            ),
        ),
        transfers=tuple(
            Transfer(tuple(sorted(ends | {node.colour})), cost)
            for node, ends, cost in zip(nodes, readers, workload.cost, strict=True)
        ),
    )  # fmt: skip
    idle = [_is_idle(many) and not tied for many, tied in zip(members, joined, strict=True)]
    return Layers(problem, _trivial(problem, idle), tuple(tuple(node.id for node in many) for many in members))


def _is_idle(nodes: Sequence[Node]) -> bool:
    """No forward time and no backward time."""
    forward = [node for node in nodes if not node.backward]
    backward = sum(node.accelerator + node.processor for node in nodes if node.backward)
    return (
        sum(node.accelerator for node in forward) < _NO_TIME
        and sum(node.processor for node in forward) < _NO_TIME
        and backward == 0
    )


def _trivial(problem: LoadProblem, idle: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """Groups of layers that grow around one as its trivial neighbours join it."""
    contraction = contract(problem)
    groups = [list(many) for many in contraction.members]
    neighbours: list[set[int]] = [set() for _ in groups]
    for layer, before in enumerate(contraction.problem.predecessors):
        for p in before:
            neighbours[layer].add(p)
            neighbours[p].add(layer)
    light = [all(idle[layer] for layer in group) for group in groups]
    pending = list(range(len(groups)))
    while pending:
        layer = pending.pop()
        if light[layer] and len(neighbours[layer]) == 1:
            (other,) = neighbours[layer]
            groups[other] += groups[layer]
            light[other] &= light[layer]
            neighbours[other].discard(layer)
            neighbours[layer], groups[layer] = set(), []
            pending.append(other)
    return tuple(tuple(group) for group in groups if len(group) > 1)
