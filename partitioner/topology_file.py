"""Topologies as YAML: what a person may write, and the text of a topology that reads back as the same.

Units stand with every number. A device or a link of the catalogue needs no numbers; numbers that are given win::

    device: h100                                          device: {name: my GPU, memory: 80 GiB}
    levels:                                               levels:
      - {name: host, count: 8, link: nvlink4}               - {name: host, count: 8, bandwidth: 300 GB/s}
      - {name: cluster, count: 4, link: 8xndr}

    pools:                                                # unlike hosts or devices
      - {device: h100, levels: [...]}
      - {device: a100-80, levels: [...]}
    between: {bandwidth: 25 GB/s, latency: 10 us}
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator

from dpart.partitioner.links import checked_link, link_named
from dpart.partitioner.pools import Device, Level, Pool
from dpart.partitioner.units import parse_bandwidth, parse_size, parse_time
from dpart.profiler.devices import DeviceKind, device_kind
from dpart.runtime.errors import UserError
from dpart.runtime.files import validated


@dataclass(frozen=True)
class TopologyParts:
    """What a topology file holds."""

    pools: tuple[Pool, ...]
    between: Level | None
    note: str


def read_parts(text: str, source: str) -> TopologyParts:
    """The parts of a topology that YAML `text` describes; `source` names it in errors.

    Raises:
        UserError: It is not YAML, or has faults; all are listed with their paths.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not a YAML file: {' '.join(str(error).split())}.") from None
    if not isinstance(data, dict) or "pools" not in data:
        one = validated(_TopologyFile, data, source)
        pool = _PoolEntry(one.device, one.levels, one.missing).pool(f"{source}: ")
        return TopologyParts((pool,), None, one.note)
    entries, faults = data["pools"], []
    try:
        several = validated(_PoolsFile, data, source)
    except UserError as error:
        faults.append(str(error))
    if isinstance(entries, list) and len(entries) > 1 and data.get("between") is None:
        faults.append(f"{source}: between: this field is missing: pools need the bandwidth between them.")
    if faults:
        raise UserError("\n".join(faults))
    pools = tuple(entry.pool(f"{source}: pools[{i}].") for i, entry in enumerate(several.pools))
    between = several.between.level(len(pools)) if several.between and len(pools) > 1 else None
    return TopologyParts(pools, between, several.note)


def parts_text(parts: TopologyParts, comments: tuple[str, ...] = ()) -> str:
    """The YAML of a topology, which reads back as the same parts; comments stand at its head."""
    lines = [f"# {line}" for comment in comments for line in comment.splitlines()]
    if len(parts.pools) == 1:
        lines += _pool_lines(parts.pools[0])
    else:
        lines.append("pools:")
        for pool in parts.pools:
            first, *rest = _pool_lines(pool)
            lines += [f"  - {first}", *(f"    {line}" for line in rest)]
    if parts.between is not None:
        lines.append(f"between: {_flow(_link_fields(parts.between))}")
    if parts.note:
        lines.append(f"note: {_flow(parts.note)}")
    return "\n".join(lines) + "\n"


def _pool_lines(pool: Pool) -> list[str]:
    device = pool.device
    fields: dict[str, Any] = {"name": device.name, "memory": _size_text(device.memory_bytes)}
    kind = _known(device.name)
    if device.price_dollars_per_hour != (kind.price_dollars_per_hour or 0.0 if kind else 0.0):
        fields["dollars_per_hour"] = device.price_dollars_per_hour
    if device.speed != 1:
        fields["speed"] = device.speed
    lines = [f"device: {_flow(fields)}", "levels:"]
    for level in pool.levels:
        lines.append(f"  - {_flow({'name': level.name, 'count': level.count} | _link_fields(level))}")
    return [*lines, f"missing: {pool.missing}"] if pool.missing else lines


def _link_fields(level: Level) -> dict[str, Any]:
    fields: dict[str, Any] = {"link": level.link} if level.link else {}
    fields["bandwidth"] = _exact(level.bandwidth_bytes_per_second, parse_bandwidth, ("GB/s", 1e9), ("B/s", 1.0))
    fields["latency"] = _exact(level.latency_seconds, parse_time, ("us", 1e-6), ("s", 1.0))
    return fields


def _size_text(size: int) -> str:
    return next(f"{size // unit} {name}" for name, unit in (("GiB", 2**30), ("B", 1)) if size % unit == 0)


def _exact(value: float, parse: Callable[[str], float], *units: tuple[str, float]) -> str:
    """The value in the first unit in which it reads back as the same number."""
    texts = (f"{round(value / unit, 9):.12g} {name}" for name, unit in units)
    return next((text for text in texts if parse(text) == value), f"{value!r} {units[-1][0]}")


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _positive(count: int) -> int:
    if count < 1:
        raise ValueError("expected at least 1")
    return count


def _not_negative(count: int) -> int:
    if count < 0:
        raise ValueError("expected at least 0")
    return count


def _above_zero(speed: float) -> float:
    if not 0 < speed < float("inf"):
        raise ValueError("expected a finite number above zero")
    return speed


def _named(name: str) -> str:
    if not name.strip():
        raise ValueError("expected a name")
    return name


def _some(levels: tuple[Any, ...]) -> tuple[Any, ...]:
    if not levels:
        raise ValueError("expected at least one level")
    return levels


def _price(price: float) -> float:
    if not 0 <= price < float("inf"):
        raise ValueError("expected a finite price, at least 0")
    return price


def _link(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a link type, such as nvlink4 or 8xndr")
    link_named(value)
    return checked_link(value)


def _known(name: str) -> DeviceKind | None:
    try:
        return device_kind(name)
    except UserError:
        return None


@dataclass(frozen=True)
class _DeviceEntry:
    name: Annotated[str, AfterValidator(_named)]
    memory: Annotated[int | None, BeforeValidator(parse_size)] = None
    dollars_per_hour: Annotated[float, AfterValidator(_price)] | None = None
    speed: Annotated[float, AfterValidator(_above_zero)] = 1.0

    def device(self) -> Device:
        kind = _known(self.name)
        price = self.dollars_per_hour
        if price is None:
            price = kind.price_dollars_per_hour or 0.0 if kind else 0.0
        memory = self.memory if self.memory is not None or kind is None else kind.memory_bytes
        assert memory is not None, "checked by _complete"
        return Device(self.name, memory, price, self.speed)


def _by_name(value: Any) -> Any:
    """A device written as its catalogue name alone."""
    if not isinstance(value, str):
        return value
    return _DeviceEntry(_kind_name(value))


def _kind_name(name: str) -> str:
    try:
        return device_kind(name).name
    except UserError as error:
        raise ValueError(str(error).rstrip(".")) from None


def _complete(entry: _DeviceEntry) -> _DeviceEntry:
    if entry.memory is None and _known(entry.name) is None:
        try:
            device_kind(entry.name)
        except UserError as error:
            raise ValueError(f"memory is missing, and {str(error).rstrip('.')}") from None
    return entry


_DEVICE = Annotated[_DeviceEntry, BeforeValidator(_by_name), AfterValidator(_complete)]


@dataclass(frozen=True)
class _BetweenEntry:
    bandwidth: Annotated[float | None, BeforeValidator(parse_bandwidth)] = None
    latency: Annotated[float | None, BeforeValidator(parse_time)] = None
    link: Annotated[str, BeforeValidator(_link)] = ""

    def level(self, count: int, name: str = "pools") -> Level:
        link = link_named(self.link) if self.link else None
        bandwidth = self.bandwidth
        if bandwidth is None and link is not None:
            bandwidth = link.bandwidth_bytes_per_second
        latency = self.latency if self.latency is not None else link.type.latency_seconds if link else 0.0
        assert bandwidth is not None, "checked by _with_bandwidth"
        return Level(name, count, bandwidth, latency, self.link)


@dataclass(frozen=True)
class _LevelEntry:
    name: Annotated[str, AfterValidator(_named)]
    count: Annotated[int, AfterValidator(_positive)]
    bandwidth: Annotated[float | None, BeforeValidator(parse_bandwidth)] = None
    latency: Annotated[float | None, BeforeValidator(parse_time)] = None
    link: Annotated[str, BeforeValidator(_link)] = ""

    def level(self) -> Level:
        return _BetweenEntry(self.bandwidth, self.latency, self.link).level(self.count, self.name)


def _with_bandwidth(entry: Any) -> Any:
    if entry.bandwidth is None and not entry.link:
        raise ValueError("expected a bandwidth or a link")
    return entry


_LEVELS = Annotated[tuple[Annotated[_LevelEntry, AfterValidator(_with_bandwidth)], ...], AfterValidator(_some)]
_MISSING = Annotated[int, AfterValidator(_not_negative)]


@dataclass(frozen=True)
class _PoolEntry:
    device: _DEVICE
    levels: _LEVELS
    missing: _MISSING = 0

    def pool(self, where: str) -> Pool:
        full = Pool(self.device.device(), tuple(entry.level() for entry in self.levels))
        if self.missing >= full.num_devices:
            raise UserError(f"{where}missing: {self.missing} of {full.num_devices} devices leave none.")
        return full.first(full.num_devices - self.missing)


def _some_pools(pools: tuple[Any, ...]) -> tuple[Any, ...]:
    if not pools:
        raise ValueError("expected at least one pool")
    return pools


@dataclass(frozen=True)
class _PoolsFile:
    pools: Annotated[tuple[_PoolEntry, ...], AfterValidator(_some_pools)]
    between: Annotated[_BetweenEntry, AfterValidator(_with_bandwidth)] | None = None
    note: str = ""


@dataclass(frozen=True)
class _TopologyFile:
    device: _DEVICE
    levels: _LEVELS
    missing: _MISSING = 0
    note: str = ""
