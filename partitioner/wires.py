"""What joins each pair of GPUs of one host, in bytes per second, from what `nvidia-smi` says and the catalogue.

The text has classes of links, hardly ever speeds and models; what is filled in from elsewhere is said, a sentence
for every guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from dpart.partitioner.hosts import DEVICE_LINKS
from dpart.partitioner.links import link_named
from dpart.partitioner.nvidia_smi import Matrix, Printout, nvlink_count
from dpart.partitioner.topology import Device
from dpart.partitioner.units import format_bandwidth
from dpart.profiler.devices import DEVICES, DeviceKind, device_kind
from dpart.runtime.errors import UserError

_SHARES = {"PIX": 1.0, "PXB": 1.0, "PHB": 0.8, "NODE": 0.8, "SYS": 0.5}
_HOLDERS = {"PIX": "switch", "PXB": "switch", "PHB": "root complex", "NODE": "root complex", "SYS": "host"}
_NVLINK = "NVLink group"
_UNKNOWN_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Wire:
    """What joins two GPUs.

    Attributes:
        holder: What the GPUs that are joined like this are in.
        link: Its type, as a level has it.
    """

    bandwidth_bytes_per_second: float
    latency_seconds: float
    holder: str
    link: str

    @property
    def is_nvlink(self) -> bool:
        """Whether it is no PCIe."""
        return self.holder == _NVLINK


@dataclass(frozen=True)
class Wiring:
    """The GPUs of a host and what joins them.

    Attributes:
        names: ``GPU0`` and so on.
        devices: Of each.
        wires: Of each pair of positions, the lower first.
        cells: What the text has for each pair.
        guesses: A sentence for everything that the text does not tell.
    """

    names: tuple[str, ...]
    devices: tuple[Device, ...]
    wires: Mapping[tuple[int, int], Wire]
    cells: Mapping[tuple[int, int], str]
    guesses: tuple[str, ...]


def wiring(printout: Printout, device: str | None) -> Wiring:
    """Fills in models, memory and speeds.

    Args:
        device: The catalogue name of the GPUs; None to go by the text.

    Raises:
        UserError: The catalogue has no such device, or it cannot have the links of the text.
    """
    return _Reader(printout, device).read()


@dataclass
class _Reader:
    """Collects the guesses on the way."""

    printout: Printout
    device: str | None
    guesses: list[str] = field(default_factory=list)

    def read(self) -> Wiring:
        parts = self.printout
        matrix = parts.links or parts.peers
        names = (
            matrix.names
            if matrix
            else tuple(f"GPU{i}" for i in range(len(parts.nvlinks.models if parts.nvlinks else ())))
        )
        cells = self._cells(len(names))
        kinds = self._kinds(len(names), cells)
        devices = tuple(self._devices(kinds))
        wires = {pair: self._wire(cells[pair], kinds[pair[0]], kinds[pair[1]], pair) for pair in cells}
        self._say_links(cells, kinds)
        self._say_matrix(parts.links)
        if parts.has_slices:
            self.guesses.append("Slices of GPUs (MIG) were not looked at: every GPU was taken whole.")
        return Wiring(names, devices, wires, cells, tuple(dict.fromkeys(self.guesses)))

    def _cells(self, num: int) -> Mapping[tuple[int, int], str]:
        if self.printout.links is not None:
            return self.printout.links.cells
        cells = dict.fromkeys(combinations(range(num), 2), "PHB")
        status = self.printout.nvlinks
        joined = [i for i in range(num) if status is not None and status.num_links[i]]
        if num > 1:
            self.guesses.append(
                "The text has no `topo -m` matrix: GPUs without NVLink were taken to hang on one PCIe host bridge."
            )
        if status is not None and len(joined) > 1:
            links = min(status.num_links[i] for i in joined)
            if len(joined) > 2:
                self.guesses.append(
                    f"Which GPUs are joined by NVLink is not told: all {len(joined)} with active links were taken to "
                    "be joined to each other."
                )
            kind = _known(status.models[joined[0]])
            switched = kind is not None and DEVICE_LINKS[kind.name].nvlink is not None and links == _full(kind)
            count = links if len(joined) == 2 or switched else max(1, links // (len(joined) - 1))
            cells |= dict.fromkeys(combinations(joined, 2), f"NV{count}")
        return cells

    def _kinds(self, num: int, cells: Mapping[tuple[int, int], str]) -> list[DeviceKind | None]:
        if self.device is not None:
            kind = device_kind(self.device)
            self._refuse_contradiction(kind, cells)
            return [kind] * num
        if self.printout.nvlinks is not None:
            return [_known(model) for model in self.printout.nvlinks.models]
        most = max(map(nvlink_count, cells.values()), default=0)
        guess = _guess(most, cells, num)
        if guess is None:
            self.guesses.append(
                "The text does not tell the kind of GPU: 16 GiB of memory and PCIe 3.0 were assumed; give --device."
            )
            return [None] * num
        self.guesses.append(
            f"The text does not tell the kind of GPU: {guess} was guessed from NV{most} among {num} GPUs; give "
            "--device if it is another."
        )
        return [DEVICES[guess]] * num

    def _refuse_contradiction(self, kind: DeviceKind, cells: Mapping[tuple[int, int], str]) -> None:
        most = max(map(nvlink_count, cells.values()), default=0)
        nvlink = DEVICE_LINKS[kind.name].nvlink
        if most and nvlink is None:
            raise UserError(f"the matrix has NV{most}, but {kind.name} has no NVLink: give another --device.")
        if most and nvlink is not None and most > _full(kind):
            raise UserError(
                f"the matrix has NV{most}, but {kind.name} has {_full(kind)} NVLinks: give another --device."
            )

    def _devices(self, kinds: list[DeviceKind | None]) -> list[Device]:
        devices = []
        for i, kind in enumerate(kinds):
            if kind is not None:
                devices.append(Device(kind.name, kind.memory_bytes, kind.price_dollars_per_hour or 0.0))
                continue
            name = self.printout.nvlinks.models[i] if self.printout.nvlinks is not None else "GPU"
            if name != "GPU":
                self.guesses.append(f"The catalogue has no {name}: 16 GiB of memory and PCIe 3.0 were assumed.")
            devices.append(Device(name, _UNKNOWN_BYTES))
        known = {kind.name: kind for kind in kinds if kind is not None}
        for kind in known.values():
            self.guesses.append(f"Memory and link speeds of {kind.name} are from the catalogue ({kind.source}).")
        return devices

    def _wire(self, cell: str, one: DeviceKind | None, other: DeviceKind | None, pair: tuple[int, int]) -> Wire:
        count = nvlink_count(cell)
        if count:
            return self._nvlink(count, one, pair)
        pcie = min((self._pcie(kind) for kind in (one, other)), key=lambda w: link_named(w).bandwidth_bytes_per_second)
        link = link_named(pcie)
        share = _SHARES[cell] * (1.0 if self._has_peer_access(pair, one, other) else 0.5)
        return Wire(link.bandwidth_bytes_per_second * share, link.type.latency_seconds, _HOLDERS[cell], pcie)

    def _nvlink(self, count: int, kind: DeviceKind | None, pair: tuple[int, int]) -> Wire:
        status = self.printout.nvlinks
        reported = min(status.link_bytes_per_second[i] for i in pair) if status is not None else 0.0
        word = (DEVICE_LINKS[kind.name].nvlink if kind else None) or (
            "nvlink3-bridge" if reported < 2e10 else "nvlink3"
        )
        link = link_named(f"{count}x{word}")
        unit = link.type.unit_bytes_per_second
        if kind is None and reported:
            unit = reported
        return Wire(count * unit, link.type.latency_seconds, _NVLINK, f"{count}x{word}")

    def _pcie(self, kind: DeviceKind | None) -> str:
        return DEVICE_LINKS[kind.name].pcie if kind is not None else "pcie3"

    def _has_peer_access(self, pair: tuple[int, int], *kinds: DeviceKind | None) -> bool:
        if self.printout.peers is not None:
            state = self.printout.peers.cells[pair]
            if state != "OK":
                self.guesses.append(
                    f"Some GPUs have no peer access ({state}): their messages pass through the host's memory, at half "
                    "the rate of PCIe (assumed)."
                )
            return state == "OK"
        if all(kind is None or DEVICE_LINKS[kind.name].peer_access for kind in kinds):
            return True
        self.guesses.append(
            "These GPUs have no peer access over PCIe: their messages were taken to pass through the host's memory, at "
            "half its rate."
        )
        return False

    def _say_links(self, cells: Mapping[tuple[int, int], str], kinds: list[DeviceKind | None]) -> None:
        classes = set(cells.values())
        if classes & set(_SHARES):
            word = self._pcie(kinds[0])
            rate = format_bandwidth(link_named(word).bandwidth_bytes_per_second)
            across = [
                text
                for text, of in (
                    ("0.8 of that across a host bridge", ("PHB", "NODE")),
                    ("half across sockets", ("SYS",)),
                )
                if classes & set(of)
            ]
            shares = f", {' and '.join(across)}" if across else ""
            self.guesses.append(f"PCIe was taken for {word}, {rate} one way{shares}.")
        if cells:
            self.guesses.append("Latencies were assumed, by the type of link.")

    def _say_matrix(self, matrix: Matrix | None) -> None:
        if matrix is None:
            return
        if matrix.copies > 1:
            self.guesses.append(f"The matrix stands there {matrix.copies} times, alike, and was read as one host.")
        if matrix.num_ports:
            self.guesses.append(
                f"The matrix is of one host with {matrix.num_ports} network port{'s' * (matrix.num_ports > 1)}: for "
                "several hosts, add a level with the bandwidth of the network."
            )


def _guess(most: int, cells: Mapping[tuple[int, int], str], num: int) -> str | None:
    """The commonest device with such links."""
    if not most:
        return None
    partners = [sum(bool(nvlink_count(cell)) for pair, cell in cells.items() if i in pair) for i in range(num)]
    if most > 12:
        return "h100"
    if most > 6:
        return "a100-80"
    if most == 4 and max(partners) == 1:
        return "rtx3090"
    if most == 4 and num == 4 and min(partners) == 3:
        return "a100-40"
    return "v100-32" if num > 8 else "v100-16"


def _full(kind: DeviceKind) -> int:
    nvlink = DEVICE_LINKS[kind.name].nvlink
    assert nvlink is not None, f"{kind.name} has no NVLink"
    return link_named(nvlink).units


def _known(model: str) -> DeviceKind | None:
    try:
        return device_kind(model)
    except UserError:
        return None
