"""One layer of a captured model as a module of its own, for the profiler to run alone."""

from torch import fx

from dpart.compiler.captured import CapturedModel


def extract(captured: CapturedModel, layer: str) -> tuple[fx.GraphModule, tuple[str, ...], tuple[str, ...]]:
    """The layer's nodes as a module.

    Returns:
        The module, the names of the nodes whose results it takes in the order of its arguments (values, and
        what every stage recomputes for itself), and the names of the values it returns as a tuple.
    """
    nodes = [n for n in captured.module.graph.nodes if n.meta["layer"] == layer]
    inside = set(nodes)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    sources = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr")
    for source in sources:
        env[source] = graph.placeholder(source.name)
    for attribute in dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a.op == "get_attr"):
        env[attribute] = graph.get_attr(str(attribute.target))
    for node in nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    outputs = captured.graph.layer[layer].outputs
    made = {node.name: node for node in nodes}
    graph.output(tuple(env[made[name]] for name in outputs))
    return fx.GraphModule(captured.module, graph), tuple(s.name for s in sources), outputs
