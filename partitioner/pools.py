"""`Pool`: equal devices under nested levels of equal groups, of which the last may lack some devices.

Devices are numbered through, so a group of a level is a run of numbers. Eleven devices in hosts of eight::

    level 0, host:      0 1 2 3 4 5 6 7 | 8 9 10 - - - - -      count 8, missing 5
    level 1, cluster:  |---------------------------------|     count 2
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from dpart.partitioner.units import format_bandwidth, format_bytes, format_seconds


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        price_dollars_per_hour: Of one; 0 where it is not known.
        speed: How many times as fast as the device that the profile is for.
    """

    name: str
    memory_bytes: int
    price_dollars_per_hour: float = 0.0
    speed: float = 1.0


@dataclass(frozen=True)
class Level:
    """One level of grouping: `count` members, each a device or a group of the level below.

    Attributes:
        bandwidth_bytes_per_second: From one member to another, one way; what all devices of a member can send
            together where it is a group.
        latency_seconds: Of a message between two members.
        link: Which type of link it is, such as ``12xnvlink3``; "" where that is not told.
    """

    name: str
    count: int
    bandwidth_bytes_per_second: float
    latency_seconds: float
    link: str = ""


@dataclass(frozen=True)
class Pool:
    """Equal devices under nested levels, innermost first.

    Attributes:
        missing: How many devices the last groups lack: the highest numbers of a full pool.
    """

    device: Device
    levels: tuple[Level, ...]
    missing: int = 0

    def __post_init__(self) -> None:
        """Groups that nothing is left of should not be counted."""
        full = math.prod(level.count for level in self.levels)
        assert 0 <= self.missing < full, f"{self.missing} of {full} devices are missing"

    @cached_property
    def num_devices(self) -> int:
        """The product of the counts, less the missing ones."""
        return math.prod(level.count for level in self.levels) - self.missing

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Devices in one full group of each level."""
        return tuple(math.prod(level.count for level in self.levels[: i + 1]) for i in range(len(self.levels)))

    def degrees(self, wanted: Iterable[int]) -> tuple[int, ...]:
        """Those sizes of groups that fill a part of a host: of the innermost level."""
        host = min(self.group_sizes[0], self.num_devices)
        return tuple(t for t in wanted if self.group_sizes[0] % t == 0 and t <= host)

    def level_of(self, devices: Iterable[int]) -> Level:
        """The innermost level that has a group which holds all these devices."""
        chosen = tuple(devices)
        first, last = min(chosen), max(chosen)
        assert last < self.num_devices, f"device {last} of {self.num_devices}"
        return next(
            level for level, size in zip(self.levels, self.group_sizes, strict=True) if first // size == last // size
        )

    def ring_sizes(self, devices: Iterable[int]) -> tuple[int, ...]:
        """For each level, the most of its members that these devices occupy within one of its groups."""
        members, sizes = set(devices), []
        for level in self.levels:
            groups: dict[int, int] = {}
            for member in members:
                groups[member // level.count] = groups.get(member // level.count, 0) + 1
            sizes.append(max(groups.values()))
            members = set(groups)
        return tuple(sizes)

    def first(self, num_devices: int) -> "Pool":
        """The pool of the first `num_devices` devices: no more groups than they need, the last perhaps smaller."""
        assert 1 <= num_devices <= self.num_devices, f"{num_devices} of {self.num_devices} devices"
        levels, members = [], num_devices
        for level in self.levels:
            levels.append(replace(level, count=min(level.count, members)))
            members = -(-members // level.count)
        return Pool(self.device, tuple(levels), math.prod(level.count for level in levels) - num_devices)

    def __str__(self) -> str:
        links = "; ".join(
            f"{level.count} in a {level.name} at {format_bandwidth(level.bandwidth_bytes_per_second)}, "
            f"{format_seconds(level.latency_seconds)}"
            for level in self.levels
        )
        speed = f", {self.device.speed:g} times as fast" if self.device.speed != 1 else ""
        missing = f"; the last group lacks {self.missing}" if self.missing else ""
        memory = format_bytes(self.device.memory_bytes)
        return f"{self.num_devices} x {self.device.name}, {memory} each{speed}; {links}{missing}"
