"""`Walk`: one layer run on stand-ins (fake tensors) as one rank of a tensor-parallel group would run it.

Every tensor is whole on all ranks, has a part of one dimension on each (a shard), or is partial: the ranks' tensors
add up to it. A layer starts from what enters it; a product by a parameter takes its columns or its rows, whichever
its input asks for, and rules for the other operations say what becomes of a shard::

    x whole ─ w1 by columns ─> shard ─ gelu ─> shard ─ w2 by rows ─> partial ─ all-reduce ─> whole

A partial tensor is added up as late as sums allow. Where no rule lets a shard through, the walk ends with
`Unsplittable` and the origins of the shard: parameters of the layer, or its inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from dpart.compiler.layers import target_name
from dpart.profiler.gpu_kernels import on_gpu

PARTIAL = -1
"""In place of the dimension of a shard: the ranks' tensors add up to the whole one."""


@dataclass(frozen=True)
class Shard:
    """How a tensor lies over the ranks.

    Attributes:
        dim: The dimension they share out, or `PARTIAL`.
        origins: The parameters and the inputs of the layer (``"<0"``, ``"<1"``, ...) that it comes from.
    """

    dim: int
    origins: frozenset[str]


class Unsplittable(Exception):
    """No rule lets a shard through; `origins` must stay whole."""

    def __init__(self, origins: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(origins)))
        self.origins = origins


Rule = Callable[["Walk", fx.Node], tuple[Any, Shard | None]]

_TURNS = {"transpose", "permute", "t", "adjoint"}
_SUMS = {
    "view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten", "transpose", "permute", "t", "getitem", "to",
    "contiguous", "clone", "neg", "sum", "mul", "truediv", "add", "float", "type_as", "expand",
}  # fmt: skip
"""Operations that commute with a sum over the ranks; of products and quotients only one side may be partial."""


class Walk:
    """One layer on one rank.

    Attributes:
        degree: Ranks of the group; 1 to run the layer whole.
        marks: What was split on the way: ``column``, ``row``, ``heads``, ...
        shards: The dimension of each parameter that is split, by the parameter's name.
        reduced_bytes: Sizes of the all-reduces of the forward.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        module: fx.GraphModule,
        sources: Mapping[fx.Node, tuple[Any, Shard | None]],
        rules: Mapping[str, Rule],
        *,
        degree: int,
        whole: frozenset[str],
        gpu: bool,
    ) -> None:
        self.nodes = dict.fromkeys(nodes)
        self.module = module
        self.rules = rules
        self.degree = degree
        self.whole = whole
        self.gpu = gpu
        self.values: dict[fx.Node, Any] = {node: value for node, (value, _) in sources.items()}
        self.states: dict[fx.Node, Shard | None] = {node: state for node, (_, state) in sources.items()}
        self.parameters: dict[str, Tensor] = {}
        self.shards: dict[str, int] = {}
        self.marks: set[str] = set()
        self.reduced_bytes: list[int] = []
        self._entering: dict[fx.Node, int] = {}
        self._partial_bytes: dict[fx.Node, int] = {}

    @property
    def entering_bytes(self) -> list[int]:
        """Sizes of the all-reduces of the backward: of the gradients of what enters split operations whole."""
        return list(self._entering.values())

    def run(self, outputs: Sequence[fx.Node]) -> list[Any]:
        """Runs the layer; what comes out is whole or a shard, and never partial."""
        for node in self.nodes:
            if self.parameter_of(node) is None:
                self._step(node)
        for node in outputs:
            self.add_up(node)
        return [self.value(node) for node in outputs]

    def _step(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        name = self.name(node)
        for source in inputs:
            state = self.states.get(source)
            if state is not None and state.dim == PARTIAL and not self._commutes(node, name, source):
                self.add_up(source)
        states = [s for s in map(self.states.get, inputs) if s is not None]
        rule = self.rules.get(name)
        if any(s.dim == PARTIAL for s in states):
            result: Any = self.call(node)
            state = Shard(PARTIAL, self.origins(node))
        elif rule is not None and self.degree > 1 and (states or getattr(rule, "starts", False)):
            result, state = rule(self, node)
        elif states:
            raise Unsplittable(self.origins(node))
        else:
            result, state = self.call(node), None
        self.values[node] = result
        self.states[node] = state
        if state is None:
            return
        for source in inputs:
            if self.states.get(source) is None and self.parameter_of(source) is None:
                self._enter(source)
        if state.dim == PARTIAL and isinstance(result, Tensor):
            before = [self._partial_bytes[s] for s in inputs if s in self._partial_bytes]
            self._partial_bytes[node] = min([*before, _bytes(result)])

    def _commutes(self, node: fx.Node, name: str, source: fx.Node) -> bool:
        if name not in _SUMS:
            return False
        partial = [s for s in node.all_input_nodes if (state := self.states.get(s)) and state.dim == PARTIAL]
        sharded = [s for s in node.all_input_nodes if (state := self.states.get(s)) and state.dim != PARTIAL]
        if name == "add":
            return len(partial) == 2 and not sharded
        return len(partial) == 1 and not sharded and (name != "truediv" or node.args[0] is source)

    def add_up(self, node: fx.Node) -> None:
        """Makes a partial tensor whole by an all-reduce."""
        state = self.states.get(node)
        if state is not None and state.dim == PARTIAL:
            self.reduced_bytes.append(self._partial_bytes[node])
            self.states[node] = None

    def _enter(self, node: fx.Node) -> None:
        """A whole tensor enters a split operation: its gradient is partial, and added up where it is smallest."""
        tensor = self.values[node]
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return
        smallest = node
        while node in self.nodes and self.name(node) in _SUMS:
            before = [s for s in node.all_input_nodes if isinstance(self.values.get(s), Tensor)]
            before = [s for s in before if self.values[s].requires_grad and self.states[s] is None]
            if len(before) != 1:
                break
            node = before[0]
            if _bytes(self.values[node]) <= _bytes(self.values[smallest]):
                smallest = node
        self._entering[smallest] = _bytes(self.values[smallest])

    def name(self, node: fx.Node) -> str:
        """What a node does: a module's class, or the bare name of a function or method."""
        return type(self.submodule(node)).__name__ if node.op == "call_module" else target_name(node)

    def submodule(self, node: fx.Node) -> nn.Module:
        """The module a node calls."""
        return self.module.get_submodule(str(node.target))

    def origins(self, node: fx.Node) -> frozenset[str]:
        """Where the shards that a node reads come from."""
        states = [s for s in map(self.states.get, node.all_input_nodes) if s is not None]
        return frozenset().union(*(s.origins for s in states))

    def value(self, node: Any) -> Any:
        """What a node gave, on this rank; parameters, and views of them, are made when first asked for."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self.values:
            self.values[node] = self.parameter(str(node.target)) if node.op == "get_attr" else self.call(node)
            self.states.setdefault(node, None)
        return self.values[node]

    def call(self, node: fx.Node, replaced: Mapping[fx.Node, Any] | None = None, **keywords: Any) -> Any:
        """Runs a node on this rank's tensors, some of them replaced."""
        given = replaced or {}

        def local(source: fx.Node) -> Any:
            return given[source] if source in given else self.value(source)

        args = fx.node.map_arg(node.args, local)
        kwargs = {**fx.node.map_arg(node.kwargs, local), **keywords}
        kwargs.pop("device", None)  # Devices are those of the stand-ins.
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_function":
            function: Any = on_gpu(node.target) if self.gpu else node.target
            return function(*args, **kwargs)
        module = self.submodule(node)
        run = on_gpu(module) if self.gpu else module
        if run is not module:
            return run(*args, **kwargs)
        named = [n for n, _ in module.named_parameters()] + [n for n, _ in module.named_buffers()]
        state = {name: self.parameter(f"{node.target}.{name}") for name in named}
        return torch.func.functional_call(module, state, args, kwargs)

    def parameter(self, name: str) -> Tensor:
        """This rank's part of a parameter or buffer."""
        if name not in self.parameters:
            original = self.original(name)
            shape = list(original.shape)
            if name in self.shards:
                shape[self.shards[name]] = self.local(shape[self.shards[name]])
            made = stand_in(tuple(shape), original.stride(), original.dtype)
            self.parameters[name] = made.requires_grad_(original.requires_grad)
        return self.parameters[name]

    def original(self, name: str) -> Tensor:
        """The model's own parameter or buffer, for its sizes."""
        value: Any = self.module
        for part in name.split("."):
            value = getattr(value, part)
        assert isinstance(value, Tensor)
        return value

    def parameter_of(self, node: fx.Node) -> tuple[str, tuple[int, ...]] | None:
        """The name behind a parameter or a turned view of one, and the parameter's dimension of each of its own."""
        if node.op == "get_attr":
            return str(node.target), tuple(range(self.original(str(node.target)).dim()))
        if node.op not in ("call_method", "call_function") or target_name(node) not in _TURNS:
            return None
        first, *rest = node.args
        found = self.parameter_of(first) if isinstance(first, fx.Node) else None
        if found is None:
            return None
        name, dims = found
        order = turned(target_name(node), rest, len(dims))
        return name, tuple(dims[d] for d in order)

    def can_shard(self, name: str, dim: int) -> bool:
        """Whether a parameter may be split along a dimension."""
        settled = name in self.parameters or self.shards.get(name, dim) != dim
        return name not in self.whole and not settled and self.original(name).shape[dim] >= self.degree

    def shard(self, name: str, dim: int) -> None:
        """Splits a parameter that was not yet used."""
        if self.shards.get(name) == dim:
            return
        if not self.can_shard(name, dim):
            raise Unsplittable(frozenset({name}))
        self.shards[name] = dim

    def local(self, size: int) -> int:
        """What of a dimension the rank with most has."""
        return -(-size // self.degree)


def turned(name: str, arguments: Any, ndim: int) -> list[int]:
    """For each dimension after a transposition, the one it was before."""
    order = list(range(ndim))
    if name == "permute":
        dims = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list | tuple) else arguments
        return [d % ndim for d in dims]
    first, second = (d % ndim for d in (arguments if name == "transpose" else (ndim - 2, ndim - 1)))
    order[first], order[second] = order[second], order[first]
    return order


def stand_in(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of these sizes whose dimensions lie in memory in the order of `stride`."""
    steps = dict.fromkeys(range(len(shape)), 0)
    step = 1
    for dim in sorted(steps, key=lambda d: (stride[d], -d)):
        steps[dim] = 0 if stride[dim] == 0 and shape[dim] > 1 else step
        step *= 1 if steps[dim] == 0 else shape[dim]
    return torch.empty_strided(shape, [steps[d] for d in range(len(shape))], dtype=dtype)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
