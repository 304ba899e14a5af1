"""Plans that are not contiguous: simulated annealing from a plan at hand.

A move puts one layer on another device. Transfers of third devices stay what they were, so a move changes two
loads, and only the nets of that layer have to be looked at::

    device 0  a b c      move c to 1:  load 0  less c's work, plus the nets that c shares with a and b ...
    device 1  d e                      load 1  plus c's work, less the nets that are whole there now ...

What is minimised is the sum over devices of (load / best value) ** 16: nearly the largest load, but a move that
relieves any full device counts. Memory is a hard limit. It finds no bound: that comes from `load_bounds` or the
integer programme.
"""

import dataclasses
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dpart.partitioner.loads import Contraction, LoadProblem, Share, SharedPlan, contract, share

_POWER = 16

_HOTTEST, _COLDEST = (0.3, 3.0, 100.0), 1e-4
"""Temperatures, in the unit of the sum: a device of the best value counts 1. Rounds start from each in turn: the
coldest improves the best plan, the hottest forgets it."""

_MOVES = 50_000
"""Of a round, from hottest to coldest; the next one starts from the best plan."""

_MOVES_PER_CLOCK = 256


def improve(
    problem: LoadProblem,
    start: SharedPlan,
    *,
    together: Iterable[Sequence[int]] = (),
    time_limit_seconds: float = 10.0,
    max_rounds: int = 40,
    lower_bound: float = 0.0,
    seed: int = 0,
) -> SharedPlan:
    """The best plan met; the order of its shares means nothing.

    Args:
        problem: Its predecessors are not looked at.
        start: A plan of it.
        together: Groups of layers that must share a device.
        time_limit_seconds: May stop it between moves.
        max_rounds: Rounds of moves.
        lower_bound: A value at which to stop.
        seed: Of the moves; where the time does not end, the answer depends on nothing else.
    """
    deadline = time.perf_counter() + time_limit_seconds
    free = dataclasses.replace(problem, predecessors=((),) * problem.num_layers)
    contraction = contract(free, together)
    devices = _Devices(contraction.problem, _assign(contraction, start))
    generator = random.Random(seed)
    best, best_value = list(devices.device_of), devices.value
    for number in range(max_rounds):
        if best_value <= lower_bound * (1 + 1e-9) or time.perf_counter() >= deadline:
            break
        if number:
            devices = _Devices(contraction.problem, best)
        for place, value in _anneal(devices, best_value, _HOTTEST[number % 3], generator, deadline):
            best, best_value = place, value
    found = contraction.expand(problem, _Devices(contraction.problem, best).plan())
    return found if found.value < start.value else start


def _assign(contraction: Contraction, plan: SharedPlan) -> list[int]:
    """The device of each merged layer, devices numbered by class."""
    classes = contraction.problem.classes
    next_free = [sum(kind.count for kind in classes[:number]) for number in range(len(classes))]
    device_of_member: dict[int, int] = {}
    for part in plan.shares:
        for layer in part.layers:
            device_of_member[layer] = next_free[part.device_class]
        next_free[part.device_class] += 1
    return [device_of_member[members[0]] for members in contraction.members]


class _Devices:
    """What each device has, kept up to date move by move."""

    def __init__(self, problem: LoadProblem, device_of: Sequence[int]) -> None:
        self.problem = problem
        self.device_of = list(device_of)
        self.class_of = [number for number, kind in enumerate(problem.classes) for _ in range(kind.count)]
        self.work = [kind.work.tolist() for kind in problem.classes]
        self.memory = problem.memory_bytes.tolist()
        self.limit = [problem.classes[number].memory_bytes for number in self.class_of]
        self.scale = [problem.classes[number].transfer_scale for number in self.class_of]
        nets = problem.nets
        self.nets_of: list[list[tuple[int, float, int]]] = [[] for _ in self.device_of]
        self.ends = [[0] * len(self.class_of) for _ in nets.layers]
        for net, (layers, cost) in enumerate(zip(nets.layers, nets.cost.tolist(), strict=True)):
            for layer in layers:
                self.nets_of[layer].append((net, cost, len(layers)))
                self.ends[net][self.device_of[layer]] += 1
        shares = [self._share(device) for device in range(len(self.class_of))]
        self.loads = [part.load for part in shares]
        self.used = [float(problem.memory_bytes[list(part.layers)].sum()) for part in shares]

    @property
    def value(self) -> float:
        """The largest load."""
        return max(self.loads, default=0.0)

    def plan(self) -> SharedPlan:
        """Shares of the devices in use."""
        shares = (self._share(device) for device in range(len(self.class_of)))
        return SharedPlan(tuple(part for part in shares if part.layers))

    def _share(self, device: int) -> Share:
        layers = [layer for layer, where in enumerate(self.device_of) if where == device]
        return share(self.problem, layers, self.class_of[device])

    def after(self, layer: int, target: int) -> tuple[float, float]:
        """The loads of a layer's device and of the target if the layer moved there."""
        source = self.device_of[layer]
        less = more = 0.0
        for net, cost, size in self.nets_of[layer]:
            here, there = self.ends[net][source], self.ends[net][target]
            less += cost * ((here > 1) - (here < size))
            more += cost * ((there + 1 < size) - (there > 0))
        return (
            self.loads[source] - self.work[self.class_of[source]][layer] + self.scale[source] * less,
            self.loads[target] + self.work[self.class_of[target]][layer] + self.scale[target] * more,
        )

    def move(self, layer: int, target: int, loads: tuple[float, float]) -> None:
        """Moves a layer; `loads` are those of `after`."""
        source = self.device_of[layer]
        self.device_of[layer] = target
        self.loads[source], self.loads[target] = loads
        self.used[source] -= self.memory[layer]
        self.used[target] += self.memory[layer]
        for net, _, _ in self.nets_of[layer]:
            self.ends[net][source] -= 1
            self.ends[net][target] += 1


def _anneal(
    devices: _Devices, best_value: float, hottest: float, generator: random.Random, deadline: float
) -> Iterator[tuple[list[int], float]]:
    """One round; yields each plan that is better than all before."""
    unit = best_value or 1.0
    cooling = (_COLDEST / hottest) ** (1 / _MOVES)
    temperature = hottest
    num_layers, num_devices = len(devices.device_of), len(devices.class_of)
    if not num_layers or num_devices < 2:
        return
    for number in range(_MOVES):
        if not number % _MOVES_PER_CLOCK and time.perf_counter() > deadline:
            return
        temperature *= cooling
        layer, target = int(generator.random() * num_layers), int(generator.random() * num_devices)
        source = devices.device_of[layer]
        if target == source or devices.used[target] + devices.memory[layer] > devices.limit[target]:
            continue
        after = devices.after(layer, target)
        rise = sum((load / unit) ** _POWER for load in after)
        rise -= (devices.loads[source] / unit) ** _POWER + (devices.loads[target] / unit) ** _POWER
        if after[1] < np.inf and (rise <= 0 or generator.random() < math.exp(-rise / temperature)):
            devices.move(layer, target, after)
            if max(after) < best_value and devices.value < best_value * (1 - 1e-12):
                best_value = devices.value
                yield list(devices.device_of), best_value
