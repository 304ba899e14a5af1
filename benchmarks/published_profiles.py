"""PipeDream's profiles (`graph.txt`) as profiles of dpart, so that our own cost model prices their plans.

A node is a layer, its activations are one value, its weights one parameter::

    node4 -- Embedding(...) -- ..., activation_size=800.0, parameter_size=64.0
        layer node4 ── value of 800 bytes ──> layers that read it;  parameter of 64 bytes

The files are read as the released program reads them: inputs and outputs that nobody reads are dropped, forward and
backward are known as their sum. The sum stands as the forward here, so only what adds the two up may use it. Nothing
is known of what the backward keeps.
"""

from pathlib import Path

import networkx as nx
from peers_pipedream_graph import Graph, GraphError, read_graph

from dpart.compiler.graph import Layer, ModelGraph, Parameter, Value
from dpart.profiler.profile import LayerCost, Machine, Profile


def read_profile(path: Path) -> Profile:
    """The profile of one minibatch.

    Raises:
        OSError: The file cannot be read.
        GraphError: It is no profile.
    """
    return profile_of(read_graph(path.read_text(encoding="utf-8")), path.name.split(".")[0])


def profile_of(graph: Graph, name: str) -> Profile:
    """The profile that a graph stands for.

    Raises:
        GraphError: The graph has a cycle.
    """
    order = _order(graph)
    values = tuple(
        Value(f"{node}_out", node, tuple(dict.fromkeys(sorted(graph.out[node], key=order.index))),
              (int(graph.nodes[node].activation_bytes) // 4,), "float32", 0, True,
              int(graph.nodes[node].activation_bytes))
        for node in order
    )  # fmt: skip
    sizes = {node: int(graph.nodes[node].parameter_bytes) for node in order}
    parameters = tuple(
        Parameter(f"{node}.weight", (), (size // 4,), "float32", size, True, True)
        for node, size in sizes.items()
        if size
    )
    layers = tuple(
        Layer(
            name=node,
            kind=graph.nodes[node].description.split("(")[0],
            inputs=tuple(f"{before}_out" for before in dict.fromkeys(graph.into[node])),
            outputs=(f"{node}_out",),
            parameters=(f"{node}.weight",) if sizes[node] else (),
        )
        for node in order
    )
    costs = tuple(
        LayerCost(
            layer=node,
            forward_seconds=graph.nodes[node].milliseconds / 1000,
            backward_seconds=0.0,
            forward_spread_seconds=0.0,
            backward_spread_seconds=0.0,
            parameter_bytes=sizes[node],
            trainable_bytes=sizes[node],
            output_bytes=int(graph.nodes[node].activation_bytes),
            stash_bytes=0,
            workspace_bytes=0,
            repeats=0,
        )
        for node in order
    )
    return Profile(
        format="dpart.profile",
        version=1,
        graph=ModelGraph(name, "", 1, (), f"{order[-1]}_out", values, parameters, layers),
        batch_size=1,
        machine=Machine("v100-16-pcie", 1, 16 * 2**30, 1),
        step_seconds=sum(cost.forward_seconds for cost in costs),
        costs=costs,
    )


def _order(graph: Graph) -> list[str]:
    """Nodes in an order in which they can run: of those that are ready, the first of the file first."""
    made: nx.DiGraph[str] = nx.DiGraph()
    made.add_nodes_from(graph.nodes)
    made.add_edges_from((source, target) for source, targets in graph.out.items() for target in targets)
    rank = {node: n for n, node in enumerate(graph.nodes)}
    try:
        return list(nx.lexicographical_topological_sort(made, key=rank.__getitem__))
    except nx.NetworkXUnfeasible as error:
        raise GraphError("the graph has a cycle") from error
