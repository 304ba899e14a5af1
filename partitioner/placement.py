"""Which devices each stage gets: tensor-parallel groups inside one host, neighbours side by side.

Stage by stage, replica by replica, a group of t devices takes the first free place of its size that begins at a
multiple of t in its host. Places left between are filled by later, smaller groups. Where that runs out of room,
large groups are placed first: powers of two then always pack (Knowlton's buddies, 1965). Unlike hosts are given out
pool by pool, each to the stages that stand in it::

    host of 8    | 0 . | 2 2 | 4 4 4 4 |        stage 0: one device; stage 1: a group of 2, then one of 4
"""

from collections.abc import Sequence

from dpart.partitioner.topology import Topology

Devices = tuple[int, ...]


def give_out(
    stages: Sequence[tuple[int, int]], topology: Topology, pools: Sequence[int] | None = None
) -> tuple[Devices, ...] | None:
    """Devices of each stage, replica by replica; None where the groups do not pack.

    Args:
        stages: (replicas, tensor-parallel degree) of each.
        pools: In which each stands; None for all in the first.
    """
    if topology.between is None:
        return _give_out(stages, topology)
    number = [0] * len(stages) if pools is None else pools
    found: dict[int, Devices] = {}
    for p, own in enumerate(topology.ranges):
        here = [s for s in range(len(stages)) if number[s] == p]
        placed = _give_out([stages[s] for s in here], topology.alone(p))
        if placed is None:
            return None
        for s, devices in zip(here, placed, strict=True):
            found[s] = tuple(own.start + device for device in devices)
    return tuple(found[s] for s in range(len(stages)))


def _give_out(stages: Sequence[tuple[int, int]], topology: Topology) -> tuple[Devices, ...] | None:
    """The same, of one pool."""
    for order in (range(len(stages)), sorted(range(len(stages)), key=lambda s: -stages[s][1])):
        free = _Free(topology.group_sizes[0], topology.num_devices)
        placed: dict[int, Devices] = {}
        for s in order:
            replicas, degree = stages[s]
            groups = [free.take(degree) for _ in range(replicas)]
            if None in groups:
                break
            placed[s] = tuple(device for group in groups if group is not None for device in group)
        else:
            return tuple(placed[s] for s in range(len(stages)))
    return None


class _Free:
    """Devices not given out yet: holes in hosts that are open, and the hosts behind them."""

    def __init__(self, host: int, num_devices: int) -> None:
        self._host, self._num_devices = host, num_devices
        self._holes: list[tuple[int, int]] = []
        self._next = 0

    def take(self, size: int) -> range | None:
        """The first free place of this size."""
        for h, (start, stop) in enumerate(self._holes):
            found = self._in(start, stop, size)
            if found is not None:
                pieces = [(start, found), (found + size, stop)]
                self._holes[h : h + 1] = [piece for piece in pieces if piece[0] < piece[1]]
                return range(found, found + size)
        while self._next < self._num_devices:
            start = self._next
            stop = min(start + self._host, self._num_devices)
            self._next = stop
            if self._in(start, stop, size) is not None:
                self._holes += [(start + size, stop)] if start + size < stop else []
                return range(start, start + size)
            self._holes.append((start, stop))
        return None

    def _in(self, start: int, stop: int, size: int) -> int | None:
        begin = start // self._host * self._host
        found = begin + -(-(start - begin) // size) * size
        return found if found + size <= stop else None
