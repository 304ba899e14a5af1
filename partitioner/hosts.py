"""`HOSTS`: a catalogue of hosts, and the topologies that words such as ``4xdgx-h100`` name.

A word is a number of hosts, or of devices in as few hosts of their usual kind as hold them; words joined by ``+``
are unlike hosts on one network::

    dgx-h100    4xdgx-h100    8xp4d.24xlarge    2xrtx4090    16384xh100    2xdgx-h100+4xdgx-a100-80

Link rates are the published ones, one way. A host's network is what all its ports for GPU traffic send together.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from dpart.partitioner.links import Link, link_named
from dpart.partitioner.topology import Device, Level, Topology, joined, read_topology
from dpart.profiler.devices import DEVICES, DeviceKind, device_kind
from dpart.runtime.errors import UserError


@dataclass(frozen=True)
class HostKind:
    """What is published about a kind of host.

    Attributes:
        device: Its devices, as `DEVICES` has them.
        inside: Name, members and link of each level inside, innermost first.
        network: The link out of the host.
        price_dollars_per_hour: On demand in its cloud; None where it is not rented or its price is not public.
        source: The documents that the figures are from.
    """

    name: str
    device: str
    inside: tuple[tuple[str, int, str], ...]
    network: str
    price_dollars_per_hour: float | None
    source: str

    @property
    def num_devices(self) -> int:
        """Devices of one host."""
        count = 1
        for _, members, _ in self.inside:
            count *= members
        return count

    def topology(self, num_hosts: int) -> Topology:
        """So many of these hosts on one network; one host alone has no network level."""
        kind = DEVICES[self.device]
        price = kind.price_dollars_per_hour or 0.0
        if self.price_dollars_per_hour is not None:
            price = self.price_dollars_per_hour / self.num_devices
        levels = [_level(name, count, link_named(word), word) for name, count, word in self.inside]
        if num_hosts > 1:
            levels.append(_level("cluster", num_hosts, link_named(self.network), self.network))
        return Topology(Device(kind.name, kind.memory_bytes, price), tuple(levels))


def find_topology(word: str | os.PathLike[str]) -> Topology:
    """The topology that a file holds or a catalogue word names; a file of that name goes first.

    Raises:
        UserError: There is neither; or the file has faults.
    """
    path = Path(word)
    if path.exists() or path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_absolute():
        return read_topology(word)
    try:
        return catalogue_topology(os.fspath(word))
    except UserError as error:
        raise UserError(f"{os.fspath(word)}: no such file, and {str(error)[0].lower()}{str(error)[1:]}") from None


def catalogue_topology(word: str) -> Topology:
    """The topology that a catalogue word such as ``4xdgx-h100`` names.

    Raises:
        UserError: The catalogue has no such host or device; the message has the closest words.
    """
    found = [_one(part, word) for part in word.split("+")]
    topologies = [topology for topology, _ in found]
    if len(found) == 1:
        return topologies[0]
    networks = [link_named(network) for _, network in found]
    slowest = min(networks, key=lambda link: link.bandwidth_bytes_per_second)
    latency = max(link.type.latency_seconds for link in networks)
    return joined(topologies, Level("pools", len(found), slowest.bandwidth_bytes_per_second, latency))


def _one(part: str, word: str) -> tuple[Topology, str]:
    """The topology of one part of a word, and the network out of its hosts."""
    name = part.strip().lower().replace("_", "-")
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(\S.*)", name)
    if match is None:
        raise UserError(f"{word!r} has an empty part: write hosts or devices, such as 4xdgx-h100.")
    number = int(match[1]) if match[1] is not None else 1
    if number < 1:
        raise UserError(f"{word!r}: at least one host or device, got {number}.")
    host = HOSTS.get(match[2])
    if host is not None:
        return host.topology(number), host.network
    sizes = [host for host in HOSTS if host.startswith(f"{match[2]}-")]
    if sizes:
        raise UserError(f"{match[2]!r} comes in several sizes: write {' or '.join(sizes)}.")
    return _of_devices(number, _device(match[2]))


def _device(name: str) -> DeviceKind:
    try:
        return device_kind(name)
    except UserError as error:
        if "several sizes" in str(error):
            raise
    closest = difflib.get_close_matches(name, [*HOSTS, *DEVICES], n=3, cutoff=0.5)
    hint = f"; the closest: {', '.join(closest)}" if closest else ""
    raise UserError(f"no host or device {name!r} in the catalogue{hint}. `dpart topology list` shows it.")


def _of_devices(number: int, kind: DeviceKind) -> tuple[Topology, str]:
    """So many devices: in hosts of their usual kind, or on the PCIe of one host."""
    links = DEVICE_LINKS[kind.name]
    if links.host is not None:
        host = replace(HOSTS[links.host], device=kind.name, price_dollars_per_hour=None)
        return host.topology(-(-number // host.num_devices)).first(number), host.network
    if number > links.most:
        raise UserError(
            f"no host with {number} x {kind.name} is known, {links.most} at most: write a topology file with the "
            "network between the hosts."
        )
    level = _level("host", number, link_named(links.pcie), links.pcie)
    if not links.peer_access:
        level = replace(level, bandwidth_bytes_per_second=level.bandwidth_bytes_per_second / 2)
    device = Device(kind.name, kind.memory_bytes, kind.price_dollars_per_hour or 0.0)
    return Topology(device, (level,)), "10gbe"


def _level(name: str, count: int, link: Link, word: str) -> Level:
    return Level(name, count, link.bandwidth_bytes_per_second, link.type.latency_seconds, word)


@dataclass(frozen=True)
class DeviceLinks:
    """Which links devices of a kind have to each other.

    Attributes:
        nvlink: The type of their NVLinks (or Infinity Fabric), without a number; None where they have none.
        pcie: Their slot.
        host: The host that such devices usually stand in, several together; None for cards.
        peer_access: Whether one reads another's memory over PCIe. If not, messages pass through the memory of
            the host, at half the rate.
        most: Of cards, how many one host takes.
    """

    nvlink: str | None
    pcie: str
    host: str | None = None
    peer_access: bool = True
    most: int = 16


DEVICE_LINKS: Mapping[str, DeviceLinks] = MappingProxyType(
    {
        "v100-16": DeviceLinks("nvlink2", "pcie3", "dgx-1"),
        "v100-32": DeviceLinks("nvlink2", "pcie3", "dgx-1"),
        "v100-16-pcie": DeviceLinks(None, "pcie3"),
        "v100-32-pcie": DeviceLinks(None, "pcie3"),
        "a100-40": DeviceLinks("nvlink3", "pcie4", "dgx-a100-40"),
        "a100-80": DeviceLinks("nvlink3", "pcie4", "dgx-a100-80"),
        "a100-80-pcie": DeviceLinks("nvlink3", "pcie4"),
        "h100": DeviceLinks("nvlink4", "pcie5", "dgx-h100"),
        "h100-pcie": DeviceLinks("nvlink4", "pcie5"),
        "h200": DeviceLinks("nvlink4", "pcie5", "dgx-h200"),
        "b200": DeviceLinks("nvlink5", "pcie5", "dgx-b200"),
        "rtx3090": DeviceLinks("nvlink3-bridge", "pcie4"),
        "rtx4090": DeviceLinks(None, "pcie4", peer_access=False),
        "rtx5090": DeviceLinks(None, "pcie5", peer_access=False),
        "rtx5060ti": DeviceLinks(None, "8xpcie5"),
        "a6000": DeviceLinks("nvlink3-bridge", "pcie4"),
        "a10g": DeviceLinks(None, "pcie4"),
        "l4": DeviceLinks(None, "pcie4"),
        "t4": DeviceLinks(None, "pcie3"),
        "k80": DeviceLinks(None, "pcie3"),
        "titan-v": DeviceLinks(None, "pcie3"),
        "gb10": DeviceLinks(None, "pcie5", most=1),
        "mi300x": DeviceLinks("xgmi3", "pcie5", "nd96isr-mi300x-v5"),
        "cpu-core": DeviceLinks(None, "gloo", most=1024),
    }
)


def _host(
    name: str, device: str, count: int, link: str, network: str, price: float | None, source: str
) -> HostKind:  # fmt: skip
    return HostKind(name, device, (("host", count, link),), network, price, source)


def _mesh(name: str, device: str, network: str, price: float | None, source: str) -> HostKind:
    """Two quads of V100, every pair of a quad joined by one NVLink at least; between quads by way of a third."""
    inside = (("quad", 4, "1xnvlink2"), ("host", 2, "1xnvlink2"))
    mesh = "NVIDIA DGX-1 With Tesla V100 System Architecture white paper, 2017, the slowest pairs of its mesh"
    return HostKind(name, device, inside, network, price, f"{mesh}; {source}" if source else mesh)


_AWS = "Amazon EC2 instance types page; on demand, us-east-1"
_GCP = "Google Cloud GPU machine types and network bandwidth pages; on demand, us-central1"
_AZURE = "Azure VM sizes pages, ND series; on demand, East US"

_HOSTS = (
    _mesh("dgx-1", "v100-32", "4xedr", None, ""),
    _host("dgx-2", "v100-32", 16, "6xnvlink2", "8xedr", None, "NVIDIA DGX-2 data sheet, 2019"),
    _host("dgx-a100-40", "a100-40", 8, "12xnvlink3", "8xhdr", None, "NVIDIA DGX A100 data sheet, 320GB, 2020"),
    _host("dgx-a100-80", "a100-80", 8, "12xnvlink3", "8xhdr", None, "NVIDIA DGX A100 data sheet, 640GB, 2021"),
    _host("dgx-h100", "h100", 8, "18xnvlink4", "8xndr", None, "NVIDIA DGX H100 data sheet, 2023"),
    _host("dgx-h200", "h200", 8, "18xnvlink4", "8xndr", None, "NVIDIA DGX H200 data sheet, 2024"),
    _host("dgx-b200", "b200", 8, "18xnvlink5", "8xndr", None, "NVIDIA DGX B200 data sheet, 2025"),
    _host("hgx-a100-40-4", "a100-40", 4, "4xnvlink3", "4xhdr", None,
          "NVIDIA HGX A100 data sheet, 2021, four GPUs, four NVLinks a pair; a port a GPU assumed"),
    _host("hgx-a100-80-4", "a100-80", 4, "4xnvlink3", "4xhdr", None,
          "NVIDIA HGX A100 data sheet, 2021, four GPUs, four NVLinks a pair; a port a GPU assumed"),
    _host("hgx-h100-4", "h100", 4, "6xnvlink4", "4xndr", None,
          "NVIDIA HGX H100 data sheet, 2023, four GPUs, six NVLinks a pair; a port a GPU assumed"),
    _mesh("p3.16xlarge", "v100-16", "25gbe", 24.48, f"{_AWS}, 2024"),
    _mesh("p3dn.24xlarge", "v100-32", "100gbe", 31.212, f"{_AWS}, 2024"),
    _host("p4d.24xlarge", "a100-40", 8, "12xnvlink3", "4x100gbe", 21.96, f"{_AWS}, since June 2025"),
    _host("p4de.24xlarge", "a100-80", 8, "12xnvlink3", "4x100gbe", 27.45, f"{_AWS}, since June 2025"),
    _host("p5.48xlarge", "h100", 8, "18xnvlink4", "32x100gbe", 55.04, f"{_AWS}, since June 2025"),
    _host("p5en.48xlarge", "h200", 8, "18xnvlink4", "16x200gbe", 63.30, f"{_AWS}, since June 2025"),
    _host("p6-b200.48xlarge", "b200", 8, "18xnvlink5", "8x400gbe", 113.93, f"{_AWS}, 2025"),
    _host("g4dn.12xlarge", "t4", 4, "pcie3", "50gbe", 3.912, f"{_AWS}, 2024"),
    _host("g5.12xlarge", "a10g", 4, "pcie4", "40gbe", 5.672, f"{_AWS}, 2024"),
    _host("g5.48xlarge", "a10g", 8, "pcie4", "100gbe", 16.288, f"{_AWS}, 2024"),
    _host("g6.12xlarge", "l4", 4, "pcie4", "40gbe", 4.602, f"{_AWS}, 2024"),
    _host("g6.48xlarge", "l4", 8, "pcie4", "100gbe", 13.35, f"{_AWS}, 2024"),
    _host("a2-highgpu-8g", "a100-40", 8, "12xnvlink3", "100gbe", 29.39, f"{_GCP}, 2024"),
    _host("a2-ultragpu-8g", "a100-80", 8, "12xnvlink3", "100gbe", 40.55, f"{_GCP}, 2024"),
    _host("a3-highgpu-8g", "h100", 8, "18xnvlink4", "4x200gbe", 88.49, f"{_GCP}, 2024"),
    _host("a3-megagpu-8g", "h100", 8, "18xnvlink4", "8x200gbe", None, f"{_GCP}, 2024"),
    _host("nd96asr-v4", "a100-40", 8, "12xnvlink3", "8xhdr", 27.20, f"{_AZURE}, 2024"),
    _host("nd96amsr-a100-v4", "a100-80", 8, "12xnvlink3", "8xhdr", 32.77, f"{_AZURE}, 2024"),
    _host("nd96isr-h100-v5", "h100", 8, "18xnvlink4", "8xndr", 98.32, f"{_AZURE}, 2024"),
    _host("nd96isr-mi300x-v5", "mi300x", 8, "xgmi3", "8xndr", 48.00, f"{_AZURE}, 2024"),
    _host("workstation-2xrtx3090", "rtx3090", 2, "4xnvlink3-bridge", "10gbe", None,
          "NVIDIA Ampere GA102 GPU Architecture white paper, 2021, with an NVLink bridge; network assumed"),
    _host("workstation-2xa6000", "a6000", 2, "4xnvlink3-bridge", "10gbe", None,
          "NVIDIA RTX A6000 data sheet, 2021, with an NVLink bridge; network assumed"),
    _host("workstation-4xrtx4090", "rtx4090", 4, "8xpcie4", "10gbe", None,
          "NVIDIA GeForce RTX 4090 specification, 2022: PCIe 4.0 x16, at half rate through the host's memory as "
          "these cards have no peer access; network assumed"),
)  # fmt: skip

HOSTS: Mapping[str, HostKind] = MappingProxyType({host.name: host for host in _HOSTS})
