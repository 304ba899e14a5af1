"""Whether the bandwidths of a topology can be true: a slip in a unit is a factor of 8 or 1,000 in every plan.

A level that names its link is held against that link's range; another one against what links between devices of
a host, or between hosts, have ever been. Nothing is refused: a warning says what was read and what may be meant.
"""

from itertools import pairwise

from dpart.partitioner.links import bandwidth_doubt, link_named
from dpart.partitioner.topology import Level, Pool, Topology
from dpart.partitioner.units import format_bandwidth, format_seconds
from dpart.profiler.devices import DeviceKind, device_kind
from dpart.runtime.errors import UserError

_INSIDE = (50e6, 1.9e12)
"""Between devices: from slow sockets between processes to twice what an NVLink 5 device sends."""

_BETWEEN = (12.5e6, 1e12)
"""Between groups: from 100 Mbit/s Ethernet to more than eight ports of 800 Gbit/s."""

_LONGEST_SECONDS = 0.5


def check_bandwidths(topology: Topology) -> list[str]:
    """A sentence for every bandwidth and latency that is hard to believe."""
    warnings = []
    for number, pool in enumerate(topology.pools):
        where = f"pool {number}, " if topology.others else ""
        for depth, level in enumerate(pool.levels):
            if level.count > 1:
                warnings += _doubts(f"{where}level {level.name!r}", level, inside=depth == 0)
        warnings += _steps(where, pool)
    if topology.between is not None:
        warnings += _doubts("between pools", topology.between, inside=False)
    return warnings


def _doubts(what: str, level: Level, *, inside: bool) -> list[str]:
    if level.link:
        least, most = link_named(level.link).range_bytes_per_second
        of = level.link
        if not level.link[0].isdigit() and link_named(level.link).type.scope == "network":
            of = f"one port of {level.link} (write 8x{level.link} for eight)"
    else:
        (least, most), of = (_INSIDE, "links inside a host") if inside else (_BETWEEN, "networks between hosts")
    found = [bandwidth_doubt(what, level.bandwidth_bytes_per_second, least, most, of)]
    if level.latency_seconds > _LONGEST_SECONDS:
        found.append(f"{what}: a latency of {format_seconds(level.latency_seconds)} is longer than any link's.")
    return [sentence for sentence in found if sentence]


def _steps(where: str, pool: Pool) -> list[str]:
    """A group sends no more than its members do together, and a device no more than its memory gives."""
    found = []
    for inner, outer in pairwise(pool.levels):
        if min(inner.count, outer.count) > 1 and outer.bandwidth_bytes_per_second > (
            inner.count * inner.bandwidth_bytes_per_second
        ):
            found.append(
                f"{where}level {outer.name!r}: {format_bandwidth(outer.bandwidth_bytes_per_second)} is more than the "
                f"{inner.count} members of a {inner.name!r} at {format_bandwidth(inner.bandwidth_bytes_per_second)} "
                "could send together."
            )
    kind = _known(pool.device.name)
    first = pool.levels[0]
    if kind and first.count > 1 and first.bandwidth_bytes_per_second > kind.memory_bandwidth_bytes_per_second:
        found.append(
            f"{where}level {first.name!r}: {format_bandwidth(first.bandwidth_bytes_per_second)} is more than the "
            f"memory of a {kind.name} gives, {format_bandwidth(kind.memory_bandwidth_bytes_per_second)}."
        )
    return found


def _known(name: str) -> DeviceKind | None:
    try:
        return device_kind(name)
    except UserError:
        return None
