"""`ModelGraph`: the model as a graph of layers and the values between them. Plain data, no torch.

A *layer* is the unit of cost and of cutting. A *value* is a tensor that crosses layers. Layers stand in
execution order, which is one topological order of the graph::

    input_ids ─> wte ─> h.0.ln_1 ─> h.0.attn ─> h.0.add ─> ...
                    └──────────────────────────^
"""

from dataclasses import dataclass
from functools import cached_property

import networkx as nx


@dataclass(frozen=True)
class Value:
    """A tensor that crosses layers, or enters the model.

    Attributes:
        name: Unique in the graph; a Python identifier.
        producer: The layer that makes it, or None for an input of the model.
        consumers: The layers that read it, in execution order.
        shape: Sizes for one microbatch of the captured size.
        dtype: torch's name for it without the prefix, as in ``float32``.
        batch_dim: The dimension that grows with the microbatch, or None if none does.
        differentiable: Whether a gradient flows back through it.
        size_bytes: Bytes for one microbatch of the captured size.
    """

    name: str
    producer: str | None
    consumers: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None
    differentiable: bool
    size_bytes: int


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer of the model, once, under the first of its names.

    Attributes:
        name: Its original fully-qualified name.
        aliases: The other names of the same tensor (tied weights).
        trainable: Whether it is a parameter that receives a gradient.
        persistent: Whether it stands in the model's ``state_dict``.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    trainable: bool
    persistent: bool


@dataclass(frozen=True)
class Layer:
    """One unit of cost and of cutting.

    Attributes:
        name: Unique; the module path it came from, numbered where a path has several layers.
        kind: What it is, for people: ``Linear``, ``GPT2Attention``, ``add``.
        inputs: Names of the values it reads, model inputs included.
        outputs: Names of the values it makes that another layer reads, or that leave the model.
        parameters: Names of the parameters and buffers it reads.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class ModelGraph:
    """The DAG of layers of one model with its loss.

    Attributes:
        model: A name for people.
        fingerprint: A digest of everything below but the weights' numbers; plans carry it.
        microbatch_size: Rows per microbatch at which it was captured; the unit of all sizes here.
        inputs: The values that enter the model, in the order of a batch's flattened leaves.
        loss: The value that is the scalar loss.
        values: All values, inputs first, then in the order of their making.
        layers: All layers, in execution order.
    """

    model: str
    fingerprint: str
    microbatch_size: int
    inputs: tuple[str, ...]
    loss: str
    values: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    layers: tuple[Layer, ...]

    @cached_property
    def layer(self) -> dict[str, Layer]:
        """Layers by name."""
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def value(self) -> dict[str, Value]:
        """Values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def parameter(self) -> dict[str, Parameter]:
        """Parameters and buffers by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def digraph(self) -> "nx.DiGraph[str]":
        """Layers as nodes, in execution order; an edge where a layer reads what another made."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(layer.name for layer in self.layers)
        for value in self.values:
            if value.producer is not None:
                graph.add_edges_from((value.producer, consumer) for consumer in value.consumers)
        return graph
