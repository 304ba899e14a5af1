"""`CapturedModel`: what capture returns: the graph as data, and the same graph as a module that runs."""

from dataclasses import dataclass

from torch import fx

from dpart.compiler.graph import ModelGraph
from dpart.compiler.workload import LossModel


@dataclass(frozen=True)
class CapturedModel:
    """A captured and raised model, checked against eager.

    The nodes of `module.graph` are plain FX: placeholders (the graph's inputs, under their names), `get_attr`
    of parameters and buffers by a name they have in the original model, `call_module` of a stock torch.nn
    module by its original path, `call_function` of public functions and operators (an ATen overload where
    there is no public one), `call_method` of tensors. Each node's ``meta`` has

    ``layer``: the name of its layer; None for a placeholder, `get_attr`, and for what every stage recomputes
        for itself (masks, positions, batch sizes: nodes that depend on no input but its number of rows),
    ``stack``: the module calls it stands in, outermost first, each ``(path, class name, call)``; a shared
        module called twice has calls 0 and 1; ``()`` at the root and for the loss,
    ``shape``, ``dtype``, ``stride``: of its tensor for a microbatch of the captured size (absent for others).

    The node named ``batch_size`` is the number of rows: ``size(0)`` of the first input, or of any value with
    the batch dimension. The name of a `Value` is the name of its node. The output node returns the loss.

    Attributes:
        graph: Layers, values, parameters.
        module: The raised graph over the original's own modules and parameters.
        model: The eager original with its loss.
    """

    graph: ModelGraph
    module: fx.GraphModule
    model: LossModel
