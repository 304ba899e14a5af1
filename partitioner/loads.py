"""The load-balancing problem on a graph that branches: which device takes which layers, so that none has much.

A layer costs *work* on each class of devices, and bytes of memory. A *transfer* is a value that one layer makes
and others read; a device pays for it once if it has some of these layers and not all of them::

    a ──┬── b          devices {a, b} {c}:   both pay for the value of a, once
        └── c          devices {a, b, c}:    none does

The load of a device is its work plus the transfers it pays for, and the value of a plan is the largest load: the
time per sample of a full pipeline (Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
Operators", NeurIPS 2020). Works and transfers are in one unit of time, whichever the caller has.

A plan is *contiguous* if its devices can be put in a row such that data flows only to later ones, so that each
device takes the difference of two nested ideals. Layers that must share a device are merged first (`contract`),
with all that lies between them.

Loads are not monotone in the set of layers: a layer more may save a transfer. What is monotone is the work, the
bytes, and the transfers from layers that stand before the set.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class DeviceClass:
    """Devices of one kind.

    Attributes:
        name: For people.
        count: How many there are; a plan may leave some unused.
        work: [L]: time of each layer, infinite where the class cannot run it.
        memory_bytes: Of each device.
        transfer_scale: What the class pays of a transfer: 0 where it is free, as for a processor in whose own
            memory the values lie.
    """

    name: str
    count: int
    work: Vector
    memory_bytes: float = np.inf
    transfer_scale: float = 1.0


@dataclass(frozen=True)
class Transfer:
    """A value: the layer that makes it and those that read it, in any order, and the time to move it."""

    layers: tuple[int, ...]
    cost: float


@dataclass(frozen=True)
class LoadProblem:
    """Layers, devices and transfers.

    Attributes:
        predecessors: For each layer those it must not stand before. Searchers want them earlier in the list;
            `contract` makes it so.
        memory_bytes: [L].
        classes: Kinds of devices, at least one.
        transfers: Values that layers exchange.
    """

    predecessors: tuple[tuple[int, ...], ...]
    memory_bytes: Vector
    classes: tuple[DeviceClass, ...]
    transfers: tuple[Transfer, ...] = ()
    nets: "Nets" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = len(self.predecessors)
        faults = [] if self.classes else ["there are no devices"]
        if any(not 0 <= layer < size for before in self.predecessors for layer in before):
            faults.append(f"a predecessor is none of the {size} layers")
        if any(not 0 <= layer < size for transfer in self.transfers for layer in transfer.layers):
            faults.append(f"a transfer is between others than the {size} layers")
        if any(not 0 <= transfer.cost < np.inf for transfer in self.transfers):
            faults.append("a transfer costs less than nothing, or is not finite")
        if len(self.memory_bytes) != size or not (self.memory_bytes >= 0).all():
            faults.append(f"memory_bytes must be {size} numbers of at least 0")
        for kind in self.classes:
            if len(kind.work) != size or not (kind.work >= 0).all():
                faults.append(f"{kind.name}: work must be {size} numbers of at least 0")
            if kind.count < 0 or kind.transfer_scale < 0:
                faults.append(f"{kind.name}: count {kind.count} and transfer_scale must be at least 0")
        if faults:
            raise ValueError("; ".join(faults))
        object.__setattr__(self, "nets", Nets.of(self.transfers))

    @property
    def num_layers(self) -> int:
        """Layers of the graph."""
        return len(self.predecessors)

    def largest_load(self) -> float:
        """No load of layers that can run is larger."""
        crossing = float(self.nets.cost.sum())
        loads = [
            float(kind.work[np.isfinite(kind.work)].sum()) + kind.transfer_scale * crossing
            for kind in self.classes
            if kind.count
        ]
        return max(loads, default=0.0) * (1 + 1e-9)


@dataclass(frozen=True)
class Nets:
    """The transfers that can cost anything: at least two layers, equal sets added up.

    Attributes:
        layers: Of each net, ascending.
        cost: [U].
        size: [U]: layers of each net.
    """

    layers: tuple[tuple[int, ...], ...]
    cost: Vector
    size: npt.NDArray[np.int64]

    @classmethod
    def of(cls, transfers: Iterable[Transfer]) -> "Nets":
        """Adds equal ones up and drops what never crosses."""
        total: dict[tuple[int, ...], float] = {}
        for transfer in transfers:
            layers = tuple(sorted(set(transfer.layers)))
            if len(layers) > 1 and transfer.cost > 0:
                total[layers] = total.get(layers, 0.0) + transfer.cost
        return cls(tuple(total), np.array(list(total.values())), np.array([len(layers) for layers in total], np.int64))

    def flat(self) -> tuple[Indices, Indices]:
        """The net and the layer of each end."""
        net = np.repeat(np.arange(len(self.layers)), self.size)
        return net, np.array([layer for layers in self.layers for layer in layers], np.intp)


@dataclass(frozen=True)
class Share:
    """What one device takes: layers, ascending, on a device of class `device_class` of the problem."""

    layers: tuple[int, ...]
    device_class: int
    load: float


@dataclass(frozen=True)
class SharedPlan:
    """Shares that cover every layer once; of a contiguous plan, in the order in which data flows."""

    shares: tuple[Share, ...]

    @property
    def value(self) -> float:
        """The largest load."""
        return max((share.load for share in self.shares), default=0.0)


def share(problem: LoadProblem, layers: Iterable[int], device_class: int) -> Share:
    """The layers on a device of the class, with their load; infinite where they do not fit or cannot run."""
    chosen = tuple(sorted(layers))
    kind = problem.classes[device_class]
    index = np.array(chosen, np.intp)
    if problem.memory_bytes[index].sum() > kind.memory_bytes:
        return Share(chosen, device_class, np.inf)
    inside = np.zeros(problem.num_layers, np.bool_)
    inside[index] = True
    net, layer = problem.nets.flat()
    ends = np.bincount(net[inside[layer]], minlength=len(problem.nets.size))
    crossing = problem.nets.cost[(ends > 0) & (ends < problem.nets.size)].sum()
    return Share(chosen, device_class, float(kind.work[index].sum() + kind.transfer_scale * crossing))


@dataclass(frozen=True)
class Contraction:
    """A problem with layers merged, and the layers of the original one that each merged layer stands for."""

    problem: LoadProblem
    members: tuple[tuple[int, ...], ...]

    def expand(self, original: LoadProblem, plan: SharedPlan) -> SharedPlan:
        """The plan in layers of the original problem, its loads computed there."""
        return SharedPlan(
            tuple(
                share(original, (layer for merged in part.layers for layer in self.members[merged]), part.device_class)
                for part in plan.shares
            )
        )


def contract(problem: LoadProblem, together: Iterable[Sequence[int]] = ()) -> Contraction:
    """Merges the layers of each group, and those on a cycle then; the result is in depth-first topological order.

    For contiguous plans this loses nothing: a device that has two layers of a group has all between them.
    """
    group_of = _join(problem.num_layers, together)
    edges = [(group_of[before], group_of[layer]) for layer, many in enumerate(problem.predecessors) for before in many]
    component_of = _components(problem.num_layers, edges)
    name = [component_of[group] for group in group_of]
    members: dict[int, list[int]] = {}
    for layer, component in enumerate(name):
        members.setdefault(component, []).append(layer)
    order = sorted(members)
    index = {component: position for position, component in enumerate(order)}
    into: list[dict[int, None]] = [{} for _ in order]
    for before, layer in edges:
        a, b = index[component_of[before]], index[component_of[layer]]
        if a != b:
            into[b][a] = None
    position = np.array([index[component] for component in name], np.intp)
    classes = tuple(
        DeviceClass(
            kind.name, kind.count, _sum(kind.work, position, len(order)), kind.memory_bytes, kind.transfer_scale
        )
        for kind in problem.classes
    )
    transfers = tuple(
        Transfer(tuple(sorted({int(position[layer]) for layer in transfer.layers})), transfer.cost)
        for transfer in problem.transfers
    )
    merged = LoadProblem(
        tuple(tuple(before) for before in into), _sum(problem.memory_bytes, position, len(order)), classes, transfers
    )
    return Contraction(merged, tuple(tuple(members[component]) for component in order))


def _sum(values: Vector, position: Indices, size: int) -> Vector:
    total = np.zeros(size)
    np.add.at(total, position, values)
    return total


def _join(size: int, together: Iterable[Sequence[int]]) -> list[int]:
    """For each layer the first layer of its group; groups that overlap are one."""
    parent = list(range(size))

    def find(layer: int) -> int:
        while parent[layer] != layer:
            parent[layer] = parent[parent[layer]]
            layer = parent[layer]
        return layer

    for group in together:
        for layer in group:
            a, b = find(group[0]), find(layer)
            parent[max(a, b)] = min(a, b)
    return [find(layer) for layer in range(size)]


def _components(size: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Strongly connected components (Kosaraju), numbered in a topological order: last finished first."""
    out: list[list[int]] = [[] for _ in range(size)]
    into: list[list[int]] = [[] for _ in range(size)]
    for a, b in edges:
        out[a].append(b)
        into[b].append(a)
    finished: list[int] = []
    seen = [False] * size
    for root in reversed(range(size)):
        if seen[root]:
            continue
        seen[root] = True
        stack = [(root, iter(reversed(out[root])))]
        while stack:
            layer, rest = stack[-1]
            for follower in rest:
                if not seen[follower]:
                    seen[follower] = True
                    stack.append((follower, iter(reversed(out[follower]))))
                    break
            else:
                finished.append(layer)
                stack.pop()
    component = [-1] * size
    count = 0
    for root in reversed(finished):
        if component[root] >= 0:
            continue
        component[root] = count
        pending = [root]
        while pending:
            for before in into[pending.pop()]:
                if component[before] < 0:
                    component[before] = count
                    pending.append(before)
        count += 1
    return component
