"""`DEVICES`: a catalogue of device kinds, each with memory, speeds and price, and the document they are from.

Peak rates are dense (no structured sparsity), at the boost clock, and for matrix products that add up in
float32, as training needs. A data sheet's gigabytes of memory are GiB: memory chips come in powers of two. The
driver keeps some of it; the head-room of a plan stands for that.

Names are read as people and drivers spell them::

    h100-pcie        <-  "h100-pcie", "H100 PCIe", "NVIDIA H100 PCIe"
    a100-80          <-  "a100-80", "A100 80GB", "NVIDIA A100-SXM4-80GB"
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dpart.runtime.errors import UserError

GiB = 2**30


@dataclass(frozen=True)
class PeakFlops:
    """Peak operations per second by data type; None where the device has no units for it.

    Attributes:
        float32: Of its vector units.
        tf32: Of its matrix units on float32 inputs, rounded to 19 bits.
        bfloat16: Of its matrix units.
        float16: Of its matrix units.
        float8: Of its matrix units.
    """

    float32: float
    tf32: float | None = None
    bfloat16: float | None = None
    float16: float | None = None
    float8: float | None = None

    def of(self, dtype: str) -> float:
        """The rate at which products of this type run: one without units of its own runs as the next wider.

        Args:
            dtype: A field of this class.
        """
        wider = {"float8": "bfloat16", "bfloat16": "float32", "float16": "float32", "tf32": "float32"}
        rate: float | None = getattr(self, dtype)
        return rate if rate is not None else self.of(wider[dtype])


@dataclass(frozen=True)
class DeviceKind:
    """What is published about a kind of device.

    Attributes:
        name: As the catalogue has it.
        title: As its maker has it.
        memory_bandwidth_bytes_per_second: Of its own memory.
        price_dollars_per_hour: On demand in a public cloud, per device; None where no large cloud rents it.
        source: The documents that the figures are from.
        spellings: Other names of it, as drivers and people have them.
    """

    name: str
    title: str
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    flops: PeakFlops
    price_dollars_per_hour: float | None
    source: str
    spellings: tuple[str, ...] = ()


def device_kind(name: str) -> DeviceKind:
    """The kind that people or drivers call `name`.

    Raises:
        UserError: The catalogue has no such kind, or several; the message lists the known and the closest.
    """
    found = _BY_SPELLING.get(_key(name))
    if found is not None:
        return found
    sizes = [kind.name for kind in DEVICES.values() if kind.name.startswith(f"{name.strip().lower()}-")]
    if sizes:
        raise UserError(f"{name!r} comes in several sizes: write {' or '.join(sizes)}.")
    names = [*DEVICES, *(s for kind in DEVICES.values() for s in (kind.title, *kind.spellings))]
    closest = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    hint = f"; the closest is {_BY_SPELLING[_key(closest[0])].name}" if closest else ""
    raise UserError(f"no device {name!r} in the catalogue{hint}. It has: {', '.join(DEVICES)}.")


def _key(name: str) -> str:
    """What all spellings of a name have in common: the order of its parts and the maker's words are left out."""
    text = re.sub(r"\b(sxm\d?|hbm\d\w?|gddr\d\w?|oam|nvidia|amd|geforce|tesla|instinct|gpu)\b", " ", _words(name))
    text = re.sub(r"(\d) ?gi?b\b", r"\1", text)
    return " ".join(sorted(re.findall(r"\d+|[a-z]+", text.replace("rtx", " "))))


def _words(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", name.lower())


def _kind(
    name: str, title: str, gibibytes: int, gigabytes_per_second: float, flops: PeakFlops, price: float | None,
    source: str, *spellings: str,
) -> DeviceKind:  # fmt: skip
    return DeviceKind(name, title, gibibytes * GiB, gigabytes_per_second * 1e9, flops, price, source, tuple(spellings))


def _tera(
    float32: float, tf32: float | None = None, bfloat16: float | None = None, float16: float | None = None,
    float8: float | None = None,
) -> PeakFlops:  # fmt: skip
    rates = (float32, tf32, bfloat16, float16, float8)
    return PeakFlops(float32 * 1e12, *(None if rate is None else rate * 1e12 for rate in rates[1:]))


_AWS = "price: Amazon EC2 on demand, us-east-1"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet, January 2020"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, June 2021"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, 2023, half of its rates with sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, 2024, half of its rates with sparsity"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper, 2021"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture white paper, 2025"

_HOPPER = _tera(67, 494.7, 989.4, 989.4, 1978.9)
_AMPERE = _tera(19.5, 156, 312, 312)

_KINDS = (
    _kind("v100-16", "NVIDIA V100 SXM2 16GB", 16, 900, _tera(15.7, float16=125), 3.06,
          f"{_V100}; {_AWS}, p3.16xlarge / 8, 2024", "Tesla V100-SXM2-16GB"),
    _kind("v100-32", "NVIDIA V100 SXM2 32GB", 32, 900, _tera(15.7, float16=125), 3.90,
          f"{_V100}; {_AWS}, p3dn.24xlarge / 8, 2024", "Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB"),
    _kind("v100-16-pcie", "NVIDIA V100 PCIe 16GB", 16, 900, _tera(14, float16=112), None, _V100),
    _kind("v100-32-pcie", "NVIDIA V100 PCIe 32GB", 32, 900, _tera(14, float16=112), None, _V100),
    _kind("a100-40", "NVIDIA A100 SXM4 40GB", 40, 1555, _AMPERE, 2.745,
          f"{_A100}; NVIDIA A100 Tensor Core GPU Architecture white paper, 2020; {_AWS}, p4d.24xlarge / 8, since "
          "June 2025",
          "NVIDIA A100-PCIE-40GB"),
    _kind("a100-80", "NVIDIA A100 SXM4 80GB", 80, 2039, _AMPERE, 3.43,
          f"{_A100}; {_AWS}, p4de.24xlarge / 8, since June 2025"),
    _kind("a100-80-pcie", "NVIDIA A100 PCIe 80GB", 80, 1935, _AMPERE, None, _A100),
    _kind("h100", "NVIDIA H100 SXM5 80GB", 80, 3350, _HOPPER, 6.88,
          f"{_H100}; {_AWS}, p5.48xlarge / 8, since June 2025", "NVIDIA H100 80GB HBM3", "H100"),
    _kind("h100-pcie", "NVIDIA H100 PCIe 80GB", 80, 2000, _tera(51, 378, 756, 756, 1513), None, _H100,
          "NVIDIA H100 PCIe"),
    _kind("h200", "NVIDIA H200 SXM 141GB", 141, 4800, _HOPPER, 7.91,
          f"{_H200}; {_AWS}, p5en.48xlarge / 8, since June 2025", "NVIDIA H200"),
    _kind("b200", "NVIDIA B200 SXM 180GB", 180, 8000, _tera(75, 1125, 2250, 2250, 4500), 14.24,
          f"NVIDIA DGX B200 and HGX data sheets, 2025, an eighth, half of the rates with sparsity; {_AWS}, "
          "p6-b200.48xlarge / 8, 2025", "NVIDIA B200"),
    _kind("rtx3090", "NVIDIA GeForce RTX 3090", 24, 936, _tera(35.6, 35.6, 71, 71), None, _GA102),
    _kind("rtx4090", "NVIDIA GeForce RTX 4090", 24, 1008, _tera(82.6, 82.6, 165.2, 165.2, 330.3), None,
          "NVIDIA Ada GPU Architecture white paper, 2022"),
    _kind("rtx5090", "NVIDIA GeForce RTX 5090", 32, 1792, _tera(104.8, 104.8, 209.5, 209.5, 419), None, _RTX_BLACKWELL),
    _kind("rtx5060ti", "NVIDIA GeForce RTX 5060 Ti", 16, 448, _tera(23.7, 23.7, 47.4, 47.4, 94.9), None,
          f"NVIDIA GeForce RTX 5060 Ti specification, 2025; matrix rates by its cores and clock from {_RTX_BLACKWELL}"),
    _kind("a6000", "NVIDIA RTX A6000", 48, 768, _tera(38.7, 77.4, 154.8, 154.8), None,
          f"NVIDIA RTX A6000 data sheet, 2021; {_GA102}"),
    _kind("a10g", "NVIDIA A10G", 24, 600, _tera(35, 35, 70, 70), 1.006,
          f"NVIDIA A10G data sheet, 2021; {_AWS}, g5.xlarge, 2024"),
    _kind("l4", "NVIDIA L4", 24, 300, _tera(30.3, 60, 121, 121, 242.5), 0.805,
          f"NVIDIA L4 Tensor Core GPU data sheet, 2023, half of its rates with sparsity; {_AWS}, g6.xlarge, 2024"),
    _kind("t4", "NVIDIA T4", 16, 320, _tera(8.1, float16=65), 0.526,
          f"NVIDIA T4 Tensor Core GPU data sheet, 2019; {_AWS}, g4dn.xlarge, 2024"),
    _kind("k80", "NVIDIA Tesla K80, one of its two GPUs", 12, 240, _tera(4.37), None,
          "NVIDIA Tesla K80 data sheet, 2015, half of the board", "Tesla K80"),
    _kind("titan-v", "NVIDIA TITAN V", 12, 653, _tera(14.9, float16=110), None,
          "NVIDIA TITAN V announcement and specification, December 2017", "titanv"),
    _kind("gb10", "NVIDIA GB10", 128, 273, _tera(31, 62, 125, 125, 250), None,
          "NVIDIA DGX Spark data sheet, 2025; rates by its 1000 TOPS of sparse FP4, halved for every wider type"),
    _kind("mi300x", "AMD Instinct MI300X", 192, 5300, _tera(163.4, 653.7, 1307.4, 1307.4, 2614.9), 6.00,
          "AMD Instinct MI300X data sheet, December 2023; price: Azure ND96isr_MI300X_v5 / 8 on demand, 2024"),
    _kind("cpu-core", "one core of a server CPU", 4, 12.8, _tera(0.096), 0.05,
          "Assumed: two 256-bit fused multiply-add units at 3 GHz (Intel 64 Optimization Reference Manual), half a "
          "channel of DDR4-3200 (JEDEC JESD79-4) and 4 GiB a core; price: Amazon EC2 m6i on demand, 2024, by the vCPU",
          "cpu", "cpucore"),
)  # fmt: skip

DEVICES: Mapping[str, DeviceKind] = MappingProxyType({kind.name: kind for kind in _KINDS})

_BY_SPELLING: Mapping[str, DeviceKind] = MappingProxyType(
    {_key(spelling): kind for kind in _KINDS for spelling in (kind.name, kind.title, *kind.spellings)}
)
