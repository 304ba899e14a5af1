"""PipeDream's profiles (`graph.txt`) and the states its released optimizer searches, as matrices over states.

A line is a node, ``node4 -- Conv2d(...) -- forward_compute_time=1.5, backward_compute_time=3.0,
activation_size=800.0, parameter_size=64.0`` (milliseconds and bytes for one minibatch; activations may be a
list, ``[8.0; 4.0]``), or, behind a tab, an edge ``node1 -- node4``.

States are ideals, but not all of them: the released program starts from the first source of the file and adds
one reachable node at a time, with all its ancestors. Other sources ride along with the first node that needs
them.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


class GraphError(ValueError):
    """A profile that cannot be read."""


@dataclass(frozen=True)
class Node:
    """A layer of the profile; milliseconds are forward and backward together."""

    description: str
    milliseconds: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class Graph:
    """Nodes by name, in the order of the file; `out` and `into` list an edge as often as the file does."""

    nodes: dict[str, Node]
    out: dict[str, list[str]]
    into: dict[str, list[str]]

    def without(self, dropped: set[str]) -> "Graph":
        """The graph less some nodes and their edges."""

        def keep(edges: dict[str, list[str]]) -> dict[str, list[str]]:
            return {a: [b for b in ends if b not in dropped] for a, ends in edges.items() if a not in dropped}

        nodes = {name: node for name, node in self.nodes.items() if name not in dropped}
        return Graph(nodes, keep(self.out), keep(self.into))


@dataclass(frozen=True)
class StateTable:
    """Totals over the nodes of each state; row 0 is the empty state, the last row everything.

    Attributes:
        seconds: Compute of one minibatch, forward and backward.
        output_bytes: Activations of the augmented antichain: what crosses behind the state, counted the
            released program's way.
        inside: [S, S]: whether state i is a proper subset of state j.
    """

    seconds: Vector
    activation_bytes: Vector
    parameter_bytes: Vector
    output_bytes: Vector
    inside: npt.NDArray[np.bool_]


def read_graph(text: str) -> Graph:
    """Parse a profile and drop what the released program drops: input sources, then unused getitem sinks."""
    graph = Graph({}, {}, {})
    for number, line in enumerate(text.strip().split("\n"), 1):
        try:
            if line.startswith("\t"):
                tail, head = line.strip().split(" -- ")
                graph.out[tail].append(head)
                graph.into[head].append(tail)
            elif line.strip():
                name, description, figures = line.strip().split(" -- ")[:3]
                graph.nodes[name] = _read_node(description, figures)
                graph.out[name], graph.into[name] = [], []
        except (ValueError, KeyError) as error:
            raise GraphError(f"line {number}: expected a node or an edge between nodes above it: {error}") from error
    inputs = {n for n in graph.nodes if not graph.into[n] and graph.nodes[n].description.startswith("Input")}
    graph = graph.without(inputs)
    # One pass only, as there: a sink that this exposes stays.
    unused = {n for n in graph.nodes if not graph.out[n] and graph.nodes[n].description.startswith("__getitem__")}
    graph = graph.without(unused)
    if not graph.nodes:
        raise GraphError("no nodes but inputs")
    return graph


def _read_node(description: str, figures: str) -> Node:
    forward, backward, activation, parameter = (figure.split("=")[1] for figure in figures.split(", "))
    return Node(
        description,
        float(forward) + float(backward),
        sum(float(part) for part in activation.strip("[]").split("; ")),
        float(parameter),
    )


@dataclass(frozen=True)
class _Bits:
    """The graph as bit masks, bit v for the v-th node of the file."""

    out: list[list[int]]
    closure: list[int]
    """A node and its ancestors."""
    escaping: list[int]
    """Those ancestors of a node with an edge to something else than the node and its ancestors."""


def _bits(graph: Graph) -> _Bits:
    index = {name: v for v, name in enumerate(graph.nodes)}
    out = [[index[n] for n in graph.out[name]] for name in graph.nodes]
    into = [[index[n] for n in graph.into[name]] for name in graph.nodes]
    closure = [0] * len(index)
    waiting = [len(before) for before in into]
    ready = [v for v, count in enumerate(waiting) if not count]
    for v in ready:
        closure[v] = 1 << v
        for p in into[v]:
            closure[v] |= closure[p]
        for n in out[v]:
            waiting[n] -= 1
            if not waiting[n]:
                ready.append(n)
    if len(ready) < len(index):
        raise GraphError("the graph has a cycle")
    consumers = [sum(1 << n for n in set(ends)) for ends in out]
    escaping = [
        sum(1 << p for p in _ones(inside & ~(1 << v)) if consumers[p] & ~inside) for v, inside in enumerate(closure)
    ]
    return _Bits(out, closure, escaping)


def _ones(mask: int) -> Iterator[int]:
    """The set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def tabulate_states(graph: Graph, max_states: int, max_counted: int) -> StateTable | int | None:
    """The states in the released program's order; above a cap only their count, above another None."""
    bits = _bits(graph)
    source = next(v for v, name in enumerate(graph.nodes) if not graph.into[name])
    found = _explore(bits, source, max_counted)
    if len(found) > max_counted:
        return None
    if len(found) > max_states:
        return len(found)
    order = _topological(found, bits.closure[source])
    members = [0, *order]
    outputs = [0]
    for mask in order:
        antichain = found[mask].antichain
        escaping = 0
        for v in antichain:
            escaping |= bits.escaping[v]
        outputs.append(escaping | sum(1 << v for v in antichain))
    nodes = list(graph.nodes.values())
    member, output = _unpack(members, len(nodes)), _unpack(outputs, len(nodes))
    rows = member.astype(np.float32)
    inside: npt.NDArray[np.bool_] = rows @ rows.T == rows.sum(axis=1)[:, None]
    np.fill_diagonal(inside, False)
    activation = np.array([node.activation_bytes for node in nodes])
    return StateTable(
        seconds=member @ (np.array([node.milliseconds for node in nodes]) / 1000.0),
        activation_bytes=member @ activation,
        parameter_bytes=member @ np.array([node.parameter_bytes for node in nodes]),
        output_bytes=output @ activation,
        inside=inside,
    )


@dataclass(frozen=True)
class _Found:
    """A state on the way: its last nodes, and the states one step on, in the order they are met."""

    antichain: tuple[int, ...]
    following: list[int]


def _explore(bits: _Bits, source: int, max_counted: int) -> dict[int, _Found]:
    """All states by their set of nodes, breadth first; some of them where they are more than the cap.

    A step replaces a member of the augmented antichain by a successor outside the state; then members that
    became ancestors of others go.
    """
    found = {bits.closure[source]: _Found((source,), [])}
    queue = deque(found)
    while queue and len(found) <= max_counted:
        mask = queue.popleft()
        antichain, following = found[mask].antichain, found[mask].following
        escaping = 0
        for v in antichain:
            escaping |= bits.escaping[v]
        augmented = (*_ones(escaping), *antichain)
        for old in augmented:
            for new in bits.out[old]:
                if mask >> new & 1:
                    continue
                larger = mask | bits.closure[new]
                following.append(larger)
                if larger not in found:
                    replaced = dict.fromkeys(new if v == old else v for v in augmented)
                    covered = 0
                    for v in replaced:
                        covered |= bits.closure[v] & ~(1 << v)
                    found[larger] = _Found(tuple(v for v in replaced if not covered >> v & 1), [])
                    queue.append(larger)
    return found


def _topological(found: dict[int, _Found], first: int) -> list[int]:
    """Depth-first order of the states, last finished first.

    The order matters to the released program: between inner levels it takes differences of states that are
    not nested, as long as they stand in this order. (Its own varies with Python's string hashing.)
    """
    finished: list[int] = []
    seen = {first}
    stack = [(first, iter(found[first].following))]
    while stack:
        mask, rest = stack[-1]
        for larger in rest:
            if larger not in seen:
                seen.add(larger)
                stack.append((larger, iter(found[larger].following)))
                break
        else:
            finished.append(mask)
            stack.pop()
    return finished[::-1]


def _unpack(masks: list[int], num_nodes: int) -> npt.NDArray[np.bool_]:
    width = (num_nodes + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(masks), width), axis=1, count=num_nodes, bitorder="little")
    return bits.astype(np.bool_)
