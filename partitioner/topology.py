"""`Topology`: the devices and the links between them, as nested levels of equal groups.

A person writes it as YAML, innermost level first; bandwidth and latency are those between two members of the
same group, one way::

    device: {name: A100, memory: 80 GiB}
    levels:
      - {name: host, count: 8, bandwidth: 300 GB/s, latency: 5 us}          # 8 devices in a host
      - {name: cluster, count: 2, bandwidth: 200 Gbit/s, latency: 10 us}    # 2 hosts

Devices are numbered through: 0 to 7 in the first host, 8 to 15 in the second.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator

from dpart.partitioner.units import (
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_size,
    parse_time,
)
from dpart.profiler.profile import Machine
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_text, validated


@dataclass(frozen=True)
class Device:
    """The kind of device, the same everywhere in a topology."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Level:
    """One level of grouping: `count` members, each a device or a group of the level below.

    Attributes:
        bandwidth_bytes_per_second: From one member to another, one way.
        latency_seconds: Of a message between two members.
    """

    name: str
    count: int
    bandwidth_bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Topology:
    """Equal devices under nested levels, innermost first.

    Attributes:
        note: For people, where the numbers are not the user's own.
    """

    device: Device
    levels: tuple[Level, ...]
    note: str = ""

    @cached_property
    def num_devices(self) -> int:
        """The product of the counts."""
        return math.prod(level.count for level in self.levels)

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Devices in one group of each level."""
        return tuple(math.prod(level.count for level in self.levels[: i + 1]) for i in range(len(self.levels)))

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

    def first(self, num_devices: int) -> "Topology":
        """The topology of the first `num_devices` devices.

        Raises:
            UserError: There are not that many, or they are no whole groups of every level they fill.
        """
        if not 1 <= num_devices <= self.num_devices:
            raise UserError(
                f"{num_devices} devices asked for, but the topology has {self.num_devices}: "
                f"ask for 1 to {self.num_devices}."
            )
        levels, left = [], num_devices
        for level in self.levels:
            if left % level.count and left > level.count:
                raise UserError(
                    f"{num_devices} devices fill no whole groups of level {level.name!r}, which has "
                    f"{level.count} members a group: ask for a multiple, or write a topology of that size."
                )
            levels.append(replace(level, count=min(level.count, left)))
            left = max(1, left // level.count)
        return replace(self, levels=tuple(levels))

    def __str__(self) -> str:
        links = "; ".join(
            f"{level.count} in a {level.name} at {format_bandwidth(level.bandwidth_bytes_per_second)}, "
            f"{format_seconds(level.latency_seconds)}"
            for level in self.levels
        )
        memory = format_bytes(self.device.memory_bytes)
        note = f" ({self.note})" if self.note else ""
        return f"{self.num_devices} x {self.device.name}, {memory} each; {links}{note}"


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
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not a YAML file: {' '.join(str(error).split())}.") from None
    file = validated(_TopologyFile, data, source)
    return Topology(
        Device(file.device.name, file.device.memory),
        tuple(Level(level.name, level.count, level.bandwidth, level.latency) for level in file.levels),
    )


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


def _positive(count: int) -> int:
    if count < 1:
        raise ValueError("expected at least 1")
    return count


def _named(name: str) -> str:
    if not name.strip():
        raise ValueError("expected a name")
    return name


def _some(levels: tuple[Any, ...]) -> tuple[Any, ...]:
    if not levels:
        raise ValueError("expected at least one level")
    return levels


@dataclass(frozen=True)
class _DeviceEntry:
    name: Annotated[str, AfterValidator(_named)]
    memory: Annotated[int, BeforeValidator(parse_size)]


@dataclass(frozen=True)
class _LevelEntry:
    name: Annotated[str, AfterValidator(_named)]
    count: Annotated[int, AfterValidator(_positive)]
    bandwidth: Annotated[float, BeforeValidator(parse_bandwidth)]
    latency: Annotated[float, BeforeValidator(parse_time)] = 0.0


@dataclass(frozen=True)
class _TopologyFile:
    device: _DeviceEntry
    levels: Annotated[tuple[_LevelEntry, ...], AfterValidator(_some)]
