"""`Topology`: the devices and the links between them, as nested levels of equal groups.

A person writes it as YAML, innermost level first (`dpart.partitioner.topology_file` has all that may stand
there); bandwidth and latency are those between two members of the same group, one way::

    device: {name: A100, memory: 80 GiB}
    levels:
      - {name: host, count: 8, bandwidth: 300 GB/s, latency: 5 us}          # 8 devices in a host
      - {name: cluster, count: 2, bandwidth: 200 Gbit/s, latency: 10 us}    # 2 hosts

Devices are numbered through: 0 to 7 in the first host, 8 to 15 in the second. Unlike hosts are pools of their
own, numbered on, with one link between any two pools::

    pool 0: 8 x H100 in a host        pool 1: 2 hosts of 4 x A100
    0 1 2 3 4 5 6 7                   8 9 10 11 | 12 13 14 15
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, zip_longest

from dpart.partitioner.pools import Device as Device
from dpart.partitioner.pools import Level as Level
from dpart.partitioner.pools import Pool as Pool
from dpart.partitioner.topology_file import TopologyParts, parts_text, read_parts
from dpart.partitioner.units import format_bandwidth, format_seconds
from dpart.profiler.profile import Machine
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_text


@dataclass(frozen=True)
class Topology:
    """Equal devices under nested levels, innermost first; then the pools of unlike ones, if there are any.

    Attributes:
        note: For people, where the numbers are not the user's own.
        others: The pools after the first.
        between: The link between any two pools, named so, as a level of all pools. None where there is one pool.
        missing: How many devices the last groups of the first pool lack.
    """

    device: Device
    levels: tuple[Level, ...]
    note: str = ""
    others: tuple[Pool, ...] = ()
    between: Level | None = None
    missing: int = 0

    def __post_init__(self) -> None:
        """Several pools need a link between them."""
        assert (self.between is not None) == bool(self.others), "a link between pools where there are several"

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """All pools, in the order in which their devices are numbered."""
        return (Pool(self.device, self.levels, self.missing), *self.others)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The devices of each pool."""
        stops = list(accumulate(pool.num_devices for pool in self.pools))
        return tuple(map(range, [0, *stops], stops))

    @cached_property
    def num_devices(self) -> int:
        """Devices of all pools together."""
        return self.ranges[-1].stop

    @property
    def is_uniform(self) -> bool:
        """Whether every group of a level is full and equal to the others: one pool with nothing missing."""
        return not self.others and not self.missing

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Devices in one group of each level of the first pool."""
        return self.pools[0].group_sizes

    @cached_property
    def ring_levels(self) -> tuple[Level, ...]:
        """The levels that `ring_sizes` counts over: of several pools the slowest at each depth, then between."""
        if self.between is None:
            return self.levels
        depths = zip_longest(*(pool.levels for pool in self.pools))
        return (*(_slowest([level for level in depth if level is not None]) for depth in depths), self.between)

    @cached_property
    def all_levels(self) -> tuple[Level, ...]:
        """Every level there is: of pool after pool, then between."""
        levels = tuple(level for pool in self.pools for level in pool.levels)
        return levels if self.between is None else (*levels, self.between)

    @cached_property
    def nested_levels(self) -> tuple[Level, ...]:
        """Levels whose counts multiply to all devices, for searchers that need them; no link is faster than in truth.

        Where groups are not equal, that is one level of the slowest link.
        """
        if self.is_uniform:
            return self.levels
        slowest = _slowest(self.all_levels)
        return (replace(slowest, name="all", count=self.num_devices),)

    @cached_property
    def least_memory_bytes(self) -> int:
        """Of the device that has least."""
        return min(pool.device.memory_bytes for pool in self.pools)

    def alone(self, pool: int) -> "Topology":
        """The devices of one pool, numbered from 0."""
        if self.between is None:
            return self
        own = self.pools[pool]
        return Topology(own.device, own.levels, missing=own.missing)

    def pool_of(self, device: int) -> int:
        """The number of the pool that has this device."""
        assert 0 <= device < self.num_devices, f"device {device} of {self.num_devices}"
        return next(p for p, devices in enumerate(self.ranges) if device in devices)

    def device_of(self, device: int) -> Device:
        """What kind the device of this number is."""
        return self.pools[self.pool_of(device)].device

    def level_of(self, devices: Iterable[int]) -> Level:
        """The innermost level that has a group which holds all these devices."""
        if self.between is None:
            return self.pools[0].level_of(devices)
        chosen = tuple(devices)
        pool = self.pool_of(min(chosen))
        start, stop = self.ranges[pool].start, self.ranges[pool].stop
        if max(chosen) < stop:
            return self.pools[pool].level_of(device - start for device in chosen)
        assert max(chosen) < self.num_devices, f"device {max(chosen)} of {self.num_devices}"
        return self.between

    def ring_sizes(self, devices: Iterable[int]) -> tuple[int, ...]:
        """For each of `ring_levels`, the most of its members that these devices occupy within one of its groups."""
        chosen = set(devices)
        if self.between is None:
            return self.pools[0].ring_sizes(chosen)
        parts = [
            pool.ring_sizes({device - own.start for device in chosen if device in own})
            for pool, own in zip(self.pools, self.ranges, strict=True)
            if any(device in own for device in chosen)
        ]
        depth = len(self.ring_levels) - 1
        sizes = [max(part[i] if i < len(part) else 1 for part in parts) for i in range(depth)]
        return (*sizes, len(parts))

    def first(self, num_devices: int) -> "Topology":
        """The topology of the first `num_devices` devices: as many hosts as they need, the last perhaps smaller.

        Raises:
            UserError: There are not that many.
        """
        if not 1 <= num_devices <= self.num_devices:
            raise UserError(
                f"{num_devices} devices asked for, but the topology has {self.num_devices}: "
                f"ask for 1 to {self.num_devices}."
            )
        pools = tuple(
            pool.first(min(own.stop, num_devices) - own.start)
            for pool, own in zip(self.pools, self.ranges, strict=True)
            if own.start < num_devices
        )
        return _of_pools(pools, self.between, self.note)

    def __str__(self) -> str:
        text = " + ".join(str(pool) for pool in self.pools)
        if self.between is not None:
            link = self.between
            bandwidth = format_bandwidth(link.bandwidth_bytes_per_second)
            text += f"; pools at {bandwidth}, {format_seconds(link.latency_seconds)}"
        return f"{text} ({self.note})" if self.note else text


def joined(topologies: Iterable[Topology], between: Level) -> Topology:
    """The topology of all these devices, numbered on from one to the next.

    Args:
        between: The link between any two of them.
    """
    pools = tuple(pool for topology in topologies for pool in topology.pools)
    return _of_pools(pools, between)


def read_topology(path: str | os.PathLike[str]) -> Topology:
    """Reads a topology file.

    Raises:
        UserError: The file is missing or faulty; all faults are listed with their paths.
    """
    return parse_topology(read_text(path), os.fspath(path))


def parse_topology(text: str, source: str) -> Topology:
    """The topology that YAML `text` describes; `source` names it in errors.

    Raises:
        UserError: It is not YAML, or has faults; all are listed with their paths.
    """
    parts = read_parts(text, source)
    return _of_pools(parts.pools, parts.between, parts.note)


def topology_text(topology: Topology, comments: tuple[str, ...] = ()) -> str:
    """The YAML of a topology, which `parse_topology` reads as an equal one; comments stand at its head."""
    return parts_text(TopologyParts(topology.pools, topology.between, topology.note), comments)


def local_topology(machine: Machine) -> Topology:
    """The machine a profile was measured on, for when no topology is given; its links are assumed."""
    if machine.device == "cpu":
        bandwidth, latency, note = 4e9, 100e-6, "link speed assumed: gloo between processes of one machine"
    else:
        bandwidth, latency, note = 12e9, 20e-6, "link speed assumed: PCIe between GPUs of one machine"
    name = "CPU core" if machine.device == "cpu" else machine.device
    return Topology(
        Device(name, machine.memory_bytes),
        (Level("machine", machine.num_devices, bandwidth, latency),),
        note,
    )


def _of_pools(pools: tuple[Pool, ...], between: Level | None, note: str = "") -> Topology:
    first, *others = pools
    link = replace(between, name="pools", count=len(pools)) if between is not None and others else None
    return Topology(first.device, first.levels, note, tuple(others), link, first.missing)


def _slowest(levels: Sequence[Level]) -> Level:
    """Their widest count, least bandwidth and greatest latency in one."""
    return Level(
        levels[0].name,
        max(level.count for level in levels),
        min(level.bandwidth_bytes_per_second for level in levels),
        max(level.latency_seconds for level in levels),
    )
