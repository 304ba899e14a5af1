"""The plans everyone asks about, as points of the same space: whether they fit or not, a plan is shown beside them.

One device, data parallelism alone, tensor parallelism alone, a straight pipeline, and the even split: as many units
in every stage, the same tensor-parallel degree and replicas everywhere, the best of all such combinations
(Narayanan et al., 2021, choose so for Megatron-LM).
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dpart.partitioner.candidates import Candidate
from dpart.partitioner.counted import Counted
from dpart.partitioner.evaluate import Shape, StageShape
from dpart.partitioner.prices import Priced, Prices, stage_shape

_Stage = tuple[int, Priced, int]


def baselines(prices: Prices, num_devices: int) -> list[Candidate]:
    """All of them that the model, the devices and the microbatches allow; of unlike devices in the strongest pool."""
    if len(prices.pools) > 1:
        own = max(prices.pools, key=lambda p: p.topology.num_devices * p.topology.device.speed)
        where = f"{own.topology.num_devices} x {own.topology.device.name}"
        found = baselines(own, own.topology.num_devices)
        return [replace(candidate, name=f"{candidate.name}, {where}") for candidate in found]
    pool = prices.pool
    everything = tuple(layer.name for layer in prices.profile.graph.layers)
    m = prices.terms.num_microbatches
    named: list[tuple[str, Shape]] = [("one device", (StageShape(everything, 1, pool=pool),))]
    copies = min(num_devices, m)
    if copies > 1:
        named.append(("data parallel", (StageShape(everything, copies, pool=pool),)))
    degree = max(prices.freedom.degrees)
    if 1 < degree <= num_devices:
        named.append(("tensor parallel", (StageShape(everything, 1, degree, pool=pool),)))
    depth = min(num_devices, prices.num_states - 1)
    if depth > 1:
        named.append(("straight pipeline", _straight(prices, depth) or _units_apart(prices, depth)))
    even = even_split(prices, num_devices)
    if even is not None:
        named.append(("even split", even))
    return [Candidate(name, shape, baseline=True, reported=True) for name, shape in named]


def even_split(prices: Prices, num_devices: int) -> Shape | None:
    """The best plan on all devices with equal stages, one degree and one number of replicas; None if none fits."""
    best, chosen = np.inf, None
    powers = [1 << i for i in range(min(num_devices, prices.terms.num_microbatches).bit_length())]
    counts = {n for n in (*powers, num_devices) if n <= min(num_devices, prices.terms.num_microbatches)}
    for degree in prices.freedom.degrees:
        for replicas in sorted(counts):
            depth = min(num_devices // (degree * replicas), prices.num_states - 1)
            if depth:
                value, stages = _even(prices, degree, replicas, depth)
                if value < best:
                    best, chosen = value, stages
    if chosen is None:
        return None
    return tuple(stage_shape(prices, *stage) for stage in chosen)


def _even(prices: Prices, degree: int, replicas: int, num_stages: int) -> tuple[float, list[_Stage]]:
    """(objective, stages as `stage_shape` takes them); infinite where a stage does not fit."""
    segments = [segment for segment in _segments(prices, num_stages) if segment is not None]
    if len(segments) < num_stages:
        return np.inf, []
    priced = prices.price(degree, prices.shardings(replicas)[0], replicas, num_stages)
    behind = np.arange(num_stages, 0, -1)
    signature = prices.signature[segments]
    value = priced.busy_seconds[behind - 1, signature].max() + priced.latency_seconds[behind - 1, signature].sum()
    return float(value), [(segment, priced, n) for segment, n in zip(segments, behind.tolist(), strict=True)]


def _segments(prices: Prices, num_stages: int) -> Iterator[int | None]:
    """Of units in their order, what is left over going to the last stages; None where a cut is no state."""
    units, member = prices.contraction.units, prices.contraction.member
    sizes = [len(units) // num_stages + (s >= num_stages - len(units) % num_stages) for s in range(num_stages)]
    state = {row.tobytes(): i for i, row in enumerate(member)}
    place, start = 0, 0
    for size in sizes:
        place += size
        stop = state.get(units[:place].any(axis=0).tobytes())
        if stop is None:
            yield None
            continue
        (segment,) = np.nonzero((prices.start == start) & (prices.stop == stop))
        yield int(segment[0]) if len(segment) else None
        start = stop


def _straight(prices: Prices, depth: int) -> Shape | None:
    """The smallest objective with one replica of each of so many stages; None if none fits."""
    from_one = Counted(prices, 1, depth, stages=range(depth, depth + 1), degrees=(1,))
    values = from_one.busy_values
    if not len(values):
        return None
    low, high = 0, len(values) - 1
    best = from_one.solve(values[high], 0.0, 1.0)
    if best is None:
        return None
    while low < high:
        middle = (low + high) // 2
        found = from_one.solve(values[middle], 0.0, 1.0)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return tuple(stage_shape(prices, s.segment, from_one.priced[s.priced], s.in_flight) for s in best.stages)


def _units_apart(prices: Prices, depth: int) -> Shape:
    """A straight pipeline that does not fit, to say by how much: units shared out evenly."""
    names = [layer.name for layer in prices.profile.graph.layers]
    parts = np.array_split(np.arange(len(prices.contraction.units)), depth)
    layers = [np.flatnonzero(prices.contraction.units[part].any(axis=0)) for part in parts]
    return tuple(StageShape(tuple(names[i] for i in stage), 1, pool=prices.pool) for stage in layers if len(stage))
