"""The programmes of `load_ilp`: stages in a row, or devices that take any set of layers.

Both are rows over x[l, s, c], 1 where layer l is on stage s and that is a device of class c. What may not be is no
variable, so x is a table of those that there are.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pulp

from dpart.partitioner.load_bounds import balance
from dpart.partitioner.loads import LoadProblem, SharedPlan, share

Key = tuple[int, int, int]
"""Layer, stage, class."""

_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Programme:
    """Minimise T, which is between a bound and the value of the plans that are of interest.

    Attributes:
        problem: Contracted.
        model: The rows.
        top: T, in units.
        unit: Of time, in the model.
        x: The variables that there are.
    """

    problem: LoadProblem
    model: pulp.LpProblem
    top: pulp.LpVariable
    unit: float
    x: Mapping[Key, pulp.LpVariable]

    def plan(self) -> SharedPlan:
        """What the solver left in the variables."""
        layers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for (layer, stage, kind), variable in self.x.items():
            if variable.value() is not None and variable.value() > 0.5:
                layers[stage, kind].append(layer)
        return SharedPlan(tuple(share(self.problem, layers[key], key[1]) for key in sorted(layers)))


def contiguous(problem: LoadProblem, bound: float, limit: float, unit: float) -> Programme:
    """Stages in a row, one for each device, whose classes are chosen, too.

    Args:
        problem: In topological order.
        bound: No plan has a smaller value.
        limit: Plans of larger value are not of interest.
        unit: Of time.
    """
    kinds = [kind for kind, device in enumerate(problem.classes) if device.count]
    counts = [min(problem.classes[kind].count, problem.num_layers) for kind in kinds]
    stages = range(sum(counts))
    windows = _windows(problem, len(stages), limit)
    x = {
        (layer, stage, kind): pulp.LpVariable(f"x_{layer}_{stage}_{kind}", 0, 1)
        for layer, (first, last) in enumerate(windows)
        for stage in range(first, last + 1)
        for kind in kinds
        if np.isfinite(problem.classes[kind].work[layer])
    }
    programme = _programme(problem, bound, limit, unit, x)
    model = programme.model
    z = {(s, kind): pulp.LpVariable(f"z_{s}_{kind}", cat=pulp.LpBinary) for s in stages for kind in kinds}
    for kind, count in zip(kinds, counts, strict=True):
        model += pulp.lpSum(z[stage, kind] for stage in stages) == count
    for stage in stages:
        model += pulp.lpSum(z[stage, kind] for kind in kinds) == 1
    for (_, stage, kind), variable in x.items():
        model += variable <= z[stage, kind]
    behind = [_cumulate(programme, layer, *window, kinds) for layer, window in enumerate(windows)]
    for layer, before in enumerate(problem.predecessors):
        for p in before:
            for stage in range(windows[layer][0], windows[p][1]):
                model += behind[layer].get(stage, 1) <= behind[p].get(stage, 0)
    for stage in stages:
        _add_loads(programme, stage, kinds, {kind: z[stage, kind] for kind in kinds})
    return programme


def scattered(problem: LoadProblem, bound: float, limit: float, unit: float) -> Programme:
    """Devices that take any set of layers; those of one class are numbered by their first layers."""
    kind_of = [k for k, device in enumerate(problem.classes) for _ in range(min(device.count, problem.num_layers))]
    x = {
        (layer, stage, kind): pulp.LpVariable(f"x_{layer}_{stage}", cat=pulp.LpBinary)
        for layer in range(problem.num_layers)
        for stage, kind in enumerate(kind_of)
        if stage - kind_of.index(kind) <= layer and np.isfinite(problem.classes[kind].work[layer])
    }
    programme = _programme(problem, bound, limit, unit, x)
    model = programme.model
    for layer in range(problem.num_layers):
        choices = [x[layer, stage, kind] for stage, kind in enumerate(kind_of) if (layer, stage, kind) in x]
        model += pulp.lpSum(choices) == 1
    for stage, kind in enumerate(kind_of):
        _add_loads(programme, stage, [kind], None)
    return programme


def _programme(
    problem: LoadProblem, bound: float, limit: float, unit: float, x: Mapping[Key, pulp.LpVariable]
) -> Programme:
    model = pulp.LpProblem("loads", pulp.LpMinimize)
    top = pulp.LpVariable("T", bound / unit, limit / unit)
    model += top
    return Programme(problem, model, top, unit, x)


def _windows(problem: LoadProblem, num_stages: int, limit: float) -> list[tuple[int, int]]:
    """The first and last stage that each layer may be on: all before it, and all behind it, needs stages, too."""
    worth = balance(problem)
    values = worth.layers.tolist()
    prices = [p for p, kind in zip(worth.per_load, problem.classes, strict=True) for _ in range(kind.count)]
    # What the n dearest devices cover, plus rounding.
    covers = np.cumsum(sorted(prices, reverse=True)[:num_stages]) * limit * _SLACK + 1
    closure = [1 << layer for layer in range(problem.num_layers)]
    for layer, before in enumerate(problem.predecessors):
        for p in before:
            closure[layer] |= closure[p]
    behind = [1 << layer for layer in range(problem.num_layers)]
    for layer in reversed(range(problem.num_layers)):
        for p in problem.predecessors[layer]:
            behind[p] |= behind[layer]
    windows = []
    for layer in range(problem.num_layers):
        needs = [int(np.searchsorted(covers, sum(values[i] for i in _ones(mask[layer])))) for mask in (closure, behind)]
        windows.append((min(needs[0], num_stages - 1), max(num_stages - 1 - needs[1], 0)))
    return windows


def _ones(mask: int) -> list[int]:
    return [i for i, bit in enumerate(reversed(bin(mask)[2:])) if bit == "1"]


def _cumulate(
    programme: Programme, layer: int, first: int, last: int, kinds: Sequence[int]
) -> dict[int, pulp.LpVariable | int]:
    """y of one layer by stage, from the one before its window to its last: 0, variables, 1."""
    y: dict[int, pulp.LpVariable | int] = {first - 1: 0, last: 1}
    for stage in range(first, last):
        y[stage] = pulp.LpVariable(f"y_{layer}_{stage}", cat=pulp.LpBinary)
    model = programme.model
    if first > last:
        model += programme.top <= -1
    for stage in range(first, last + 1):
        here = pulp.lpSum(programme.x[layer, stage, kind] for kind in kinds if (layer, stage, kind) in programme.x)
        model += here == y[stage] - y[stage - 1]
    return y


def _add_loads(
    programme: Programme, stage: int, kinds: Sequence[int], chosen: Mapping[int, pulp.LpVariable] | None
) -> None:
    """T is at least the load of a stage, and its layers fit.

    Args:
        programme: Gets the rows.
        stage: Of it.
        kinds: Classes that it may have.
        chosen: z by class; None where there is one class only.
    """
    problem, model, unit = programme.problem, programme.model, programme.unit
    work: list[tuple[pulp.LpVariable, float]] = []
    here: dict[int, list[pulp.LpVariable]] = defaultdict(list)
    for kind in kinds:
        device = problem.classes[kind]
        mine = {
            layer: programme.x[layer, stage, kind]
            for layer in range(problem.num_layers)
            if (layer, stage, kind) in programme.x
        }
        for layer, variable in mine.items():
            here[layer].append(variable)
            work.append((variable, float(device.work[layer]) / unit))
        if device.memory_bytes < np.inf and mine:
            # In the unit of the limit; where that is 0 any number will do.
            scale = device.memory_bytes or 1.0
            used = [(variable, float(problem.memory_bytes[layer]) / scale) for layer, variable in mine.items()]
            model += pulp.LpAffineExpression(used) <= device.memory_bytes / scale
    model += pulp.LpAffineExpression([*work, (programme.top, -1.0)]) <= 0
    scales = {kind: problem.classes[kind].transfer_scale for kind in kinds}
    if not any(scales.values()):
        return
    crossing = _crossing(programme, stage, here)
    most = sum(cost for _, cost in crossing if cost > 0)
    for kind, scale in scales.items():
        if scale:
            paid = [(variable, cost * scale / unit) for variable, cost in crossing]
            row = pulp.LpAffineExpression([*work, *paid, (programme.top, -1.0)])
            if chosen is not None:
                # Where the class is another one, the row says no more than the row of the work.
                row += (chosen[kind] - 1) * (most * scale / unit)
            model += row <= 0


def _crossing(
    programme: Programme, stage: int, here: Mapping[int, Sequence[pulp.LpVariable]]
) -> list[tuple[pulp.LpVariable, float]]:
    """Terms of what a stage pays for transfers: touched less inside, for every net that it may have a layer of."""
    terms = []
    model, nets = programme.model, programme.problem.nets
    for net, (layers, cost) in enumerate(zip(nets.layers, nets.cost.tolist(), strict=True)):
        present = [layer for layer in layers if layer in here]
        if not present:
            continue
        touched = pulp.LpVariable(f"t_{net}_{stage}", 0, 1)
        terms.append((touched, cost))
        for layer in present:
            model += touched >= pulp.lpSum(here[layer])
        if len(present) == len(layers):
            inside = pulp.LpVariable(f"i_{net}_{stage}", 0, 1)
            terms.append((inside, -cost))
            for layer in present:
                model += inside <= pulp.lpSum(here[layer])
    return terms
