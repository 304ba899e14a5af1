"""`LINKS`: a catalogue of link types, and whether a bandwidth can be that of a link.

Rates are one way, as published: of one lane bundle or port. A level names its link with how many of them work
together, such as ``12xnvlink3`` between two A100 or ``8xndr`` out of a host; without a number it is as many as a
device has (NVLink, Infinity Fabric, PCIe lanes) or one port (networks).
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from dpart.partitioner.units import format_bandwidth
from dpart.runtime.errors import UserError

_LEAST_SHARE, _MOST_SHARE = 0.3, 1.07
"""What is measured on a link, as shares of its published rate. Some data sheets round up, some count raw bits."""

_GBIT = 1e9 / 8
_SLIPS = (
    (1 / 2, "both directions counted as one"),
    (1 / 8, "bits read as bytes"),
    (8, "bytes read as bits"),
    (1e-3, "a slip of 1,000"),
    (1e3, "a slip of 1,000"),
)


@dataclass(frozen=True)
class LinkType:
    """A kind of link.

    Attributes:
        unit_bytes_per_second: Of one link, lane or port, one way.
        units: As many as a device has, or 1 for a port of a network.
        latency_seconds: Of a message over it, sender to receiver, as collective libraries reach it; assumed.
        source: The document that the rate is from.
    """

    name: str
    scope: Literal["host", "network"]
    unit_bytes_per_second: float
    units: int
    latency_seconds: float
    source: str


@dataclass(frozen=True)
class Link:
    """Some units of a link type together."""

    type: LinkType
    units: int
    counted: bool

    @property
    def bandwidth_bytes_per_second(self) -> float:
        """As published, one way."""
        return self.units * self.type.unit_bytes_per_second

    @property
    def range_bytes_per_second(self) -> tuple[float, float]:
        """Where a bandwidth of this link can lie: with no number of units, from one of them to all."""
        least = self.units if self.counted or self.type.scope == "network" else 1
        return (
            _LEAST_SHARE * least * self.type.unit_bytes_per_second,
            _MOST_SHARE * self.bandwidth_bytes_per_second,
        )


def link_named(name: str) -> Link:
    """The link that a word such as ``nvlink4``, ``8xndr`` or ``100gbe`` names.

    Raises:
        ValueError: There is no such link type; the message lists the known and the closest.
    """
    word = re.sub(r"[\s_-]+", "", name.lower())
    match = re.fullmatch(r"(?:(\d+)[x*])?(.+)", word)
    kind = match and _BY_WORD.get(match[2])
    if match is None or kind is None:
        closest = difflib.get_close_matches(match[2] if match else word, _BY_WORD, n=1)
        hint = f", of which {_BY_WORD[closest[0]].name} is the closest" if closest else ""
        raise ValueError(f"expected a link type ({', '.join(LINKS)}){hint}, with a number before it such as 8xndr")
    if match[1] is not None and int(match[1]) < 1:
        raise ValueError("expected at least one link")
    return Link(kind, int(match[1]) if match[1] else kind.units, match[1] is not None)


def bandwidth_doubt(what: str, bandwidth: float, least: float, most: float, of: str) -> str:
    """A sentence if a bandwidth lies outside a range, with the slip that would explain it; else nothing.

    Args:
        what: Whose bandwidth, to begin the sentence with.
        of: What the range is that of.
    """
    if least <= bandwidth <= most:
        return ""
    slip = next(((bandwidth * by, why) for by, why in _SLIPS if least <= bandwidth * by <= most), None)
    hint = f"; was {format_bandwidth(slip[0])} meant ({slip[1]})?" if slip else "."
    side = "above" if bandwidth > most else "below"
    known = f"{format_bandwidth(least)} to {format_bandwidth(most)}"
    return f"{what}: {format_bandwidth(bandwidth)} is {side} the known range of {of}, {known}{hint}"


def checked_link(name: str) -> str:
    """The word in its one spelling, ``12xnvlink3``; "" stays "".

    Raises:
        UserError: There is no such link type.
    """
    if not name:
        return ""
    try:
        link = link_named(name)
    except ValueError as error:
        raise UserError(f"link {name!r}: {error}.") from None
    return f"{link.units}x{link.type.name}" if link.counted else link.type.name


def _nvlink(generation: str, unit: float, units: int, source: str) -> LinkType:
    return LinkType(f"nvlink{generation}", "host", unit * 1e9, units, 5e-6, source)


def _pcie(generation: int, lane: float) -> LinkType:
    source = f"PCI Express Base Specification {generation}.0, PCI-SIG, after line coding"
    return LinkType(f"pcie{generation}", "host", lane * 1e9, 16, 10e-6, source)


def _network(name: str, gigabits: float, latency: float, source: str) -> LinkType:
    return LinkType(name, "network", gigabits * _GBIT, 1, latency, source)


_IB = "InfiniBand Roadmap, InfiniBand Trade Association, data rate of a 4x port"
_IEEE = "IEEE Standard 802.3-2022"

_TYPES = (
    _nvlink("1", 20, 4, "NVIDIA Tesla P100 white paper, 2016"),
    _nvlink("2", 25, 6, "NVIDIA Tesla V100 GPU Architecture white paper, 2017"),
    _nvlink("3", 25, 12, "NVIDIA A100 Tensor Core GPU Architecture white paper, 2020"),
    _nvlink("3-bridge", 14.0625, 4, "NVIDIA Ampere GA102 GPU Architecture white paper, 2021"),
    _nvlink("4", 25, 18, "NVIDIA H100 Tensor Core GPU Architecture white paper, 2022"),
    _nvlink("5", 50, 18, "NVIDIA Blackwell Architecture technical brief, 2024"),
    # Eight MI300X are joined pairwise, one link a pair, so a pair has one.
    LinkType("xgmi3", "host", 64e9, 1, 5e-6, "AMD Instinct MI300X data sheet, December 2023"),
    _pcie(3, 0.985), _pcie(4, 1.969), _pcie(5, 3.938), _pcie(6, 7.563),
    LinkType("gloo", "host", 4e9, 1, 100e-6, "Assumed: messages of gloo between processes of one machine"),
    _network("qdr", 32, 10e-6, _IB), _network("fdr", 54.54, 10e-6, _IB), _network("edr", 100, 10e-6, _IB),
    _network("hdr", 200, 10e-6, _IB), _network("ndr", 400, 10e-6, _IB), _network("xdr", 800, 10e-6, _IB),
    *(_network(f"{g}gbe", g, 30e-6, _IEEE) for g in (1, 10, 25, 40, 50, 100, 200, 400)),
    _network("800gbe", 800, 30e-6, "IEEE Standard 802.3df-2024"),
)  # fmt: skip

LINKS: Mapping[str, LinkType] = MappingProxyType({kind.name: kind for kind in _TYPES})

_BY_WORD: Mapping[str, LinkType] = MappingProxyType(
    {kind.name.replace("-", ""): kind for kind in _TYPES}
    | {f"ib{name}": LINKS[name] for name in ("qdr", "fdr", "edr", "hdr", "ndr", "xdr")}
    | {f"infiniband{name}": LINKS[name] for name in ("qdr", "fdr", "edr", "hdr", "ndr", "xdr")}
    | {f"ethernet{k.name[:-3]}": k for k in _TYPES if k.name.endswith("gbe")}
    | {f"eth{k.name[:-3]}": k for k in _TYPES if k.name.endswith("gbe")}
)
