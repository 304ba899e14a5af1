"""What `nvidia-smi` prints about links, read as tables: ``topo -m``, ``topo -p2p``, and ``nvlink -s``.

People keep this text in many shapes: tabs or spaces, with prompts around it, labels of `srun` before it, terminal
codes in it, with or without network ports, affinity columns and legend. What is read is the square between GPUs::

            GPU0    GPU1    NIC0    CPU Affinity          GPU0-GPU1: NV4
    GPU0     X      NV4     PHB     0-23           ->
    GPU1    NV4      X      PHB     0-23

A square with rows or cells missing, or whose halves disagree, is refused with the rows and pairs named.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from dpart.runtime.errors import UserError

_CLASSES = {"SOC": "SYS", "SYS": "SYS", "NODE": "NODE", "PHB": "PHB", "PXB": "PXB", "PIX": "PIX", "PSB": "PIX"}
"""What stands between two GPUs, from the far end of the host to one switch; older releases print SOC and PSB."""

_PEER_STATES = ("OK", "CNS", "GNS", "TNS", "NS", "DR", "U")

_TERMINAL = re.compile(r"(?:\x1b|\^\[)?\[[0-9;]*m|\x1b\[[0-9;?]*[A-Za-z]")
_LABEL = re.compile(r"^\s*(?:\[?[\w.-]*\d\]?:\s+(?=\S)|>\s*)+")
_CELL = re.compile(r"(?!(?:GPU|NIC)\d*$|CPU$|NUMA$)[A-Z][A-Z0-9/#]{0,7}")
_COLUMN = re.compile(r"CPU|NUMA|GPU|\w*\d\w*")
_DEVICE = re.compile(r"GPU\d+")
_MOST_LISTED = 12


@dataclass(frozen=True)
class Matrix:
    """The square between the GPUs of one host.

    Attributes:
        names: ``GPU0`` and so on, in the order of the columns.
        cells: By pair of positions, the lower first: ``NV12``, ``SYS``, ...; or ``OK``, ``GNS``, ... of a
            ``-p2p`` square.
        num_ports: Network ports that stand beside the GPUs.
        copies: How often the text has this square.
        old: Whether it is in the words of releases before 2017.
    """

    names: tuple[str, ...]
    cells: Mapping[tuple[int, int], str]
    num_ports: int
    copies: int
    old: bool


@dataclass(frozen=True)
class NvlinkStatus:
    """What ``nvlink -s`` tells (``-L`` only the first): the model of each GPU, and its active links.

    Attributes:
        models: By position.
        link_bytes_per_second: By position, of one link, one way; 0 where none is active.
        num_links: By position, the active ones.
    """

    models: tuple[str, ...]
    link_bytes_per_second: tuple[float, ...]
    num_links: tuple[int, ...]


@dataclass(frozen=True)
class Printout:
    """Everything that a text has of nvidia-smi; at least one part is there.

    Attributes:
        has_slices: Whether a GPU is cut into slices (MIG).
    """

    links: Matrix | None
    peers: Matrix | None
    nvlinks: NvlinkStatus | None
    has_slices: bool = False


def parse_printout(text: str, source: str) -> Printout:
    """Reads the output of nvidia-smi; `source` names it in errors.

    Raises:
        UserError: There is no such output, or rows are missing, or it contradicts itself.
    """
    lines = [_clean(line) for line in text.splitlines()]
    links = _matrix(lines, source, peers=False)
    peers = _matrix(lines, source, peers=True)
    nvlinks = _nvlinks(lines, source)
    if nvlinks is not None and not any(nvlinks.num_links) and not (links or peers or "NVLink" in text):
        nvlinks = None
    if links is None and peers is None and nvlinks is None:
        raise UserError(
            f"{source}: no output of nvidia-smi in it: expected the text of `nvidia-smi topo -m`, with its row of "
            "column names (GPU0 GPU1 ...), of `nvidia-smi topo -p2p r`, or of `nvidia-smi nvlink -s`."
        )
    counts = {len(part) for part in (links and links.names, peers and peers.names, nvlinks and nvlinks.models) if part}
    if len(counts) > 1:
        raise UserError(f"{source}: its parts are of different hosts: they have {_list(map(str, counts))} GPUs.")
    return Printout(links, peers, nvlinks, any(re.match(r"\s*MIG\b", line) for line in lines))


def nvlink_count(cell: str) -> int:
    """How many NVLinks a cell stands for: 12 of ``NV12``, 0 of ``SYS``."""
    match = re.fullmatch(r"NV(\d+)", cell)
    return int(match[1]) if match else 0


def _clean(line: str) -> str:
    """Without terminal codes, and without what srun or a quotation puts before a line."""
    text = _TERMINAL.sub("", line).replace("\ufeff", "").replace("|", " ")
    return text if re.match(r"\s*GPU ?\d+\b", text) else _LABEL.sub("", text)


def _is_link(cell: str) -> bool:
    return cell in _CLASSES or bool(re.fullmatch(r"NV[1-9]\d*", cell))


def _is_peer_state(cell: str) -> bool:
    return cell in _PEER_STATES


def _matrix(lines: list[str], source: str, *, peers: bool) -> Matrix | None:
    """The square of one kind that the lines have, checked; None where no row of it is there."""
    headers: list[list[str]] = []
    rows: dict[str, list[list[str]]] = {}
    for line in lines:
        words = line.split()
        if not words or not _DEVICE.fullmatch(words[0]):
            continue
        if len(words) > 1 and _CELL.fullmatch(words[1]):
            if peers == any(map(_is_peer_state, words)):
                rows.setdefault(words[0], []).append(words[1:])
        elif len(words) == 1 or _COLUMN.fullmatch(words[1]):
            headers.append(words)
    if not rows:
        return None
    header = max(headers, key=lambda words: len(_gpus(words)), default=[])
    names = _gpus(header)
    what = f"{source}: {'topo -p2p' if peers else 'topo -m'}"
    if not names:
        raise UserError(f"{what}: the row of column names (GPU0 GPU1 ...) is missing above {_list(rows)}.")
    faults = _faults(names, rows, _is_peer_state if peers else _is_link)
    if faults:
        listed = faults[:_MOST_LISTED] + [f"and {len(faults) - _MOST_LISTED} more"] * (len(faults) > _MOST_LISTED)
        raise UserError("\n".join(f"{what}: {fault}." for fault in listed))
    square = {(i, j): rows[names[i]][0][j] for i, j in combinations(range(len(names)), 2)}
    return Matrix(
        names=names,
        cells={pair: _CLASSES.get(cell, cell) for pair, cell in square.items()},
        num_ports=_num_ports(header),
        copies=min(map(len, rows.values())),
        old=any(re.search(r"\bSOC\b", line) for line in lines),
    )


def _gpus(words: list[str]) -> tuple[str, ...]:
    return tuple(word for word in words if _DEVICE.fullmatch(word))


def _num_ports(header: list[str]) -> int:
    """Network ports stand between the GPUs and the columns on affinity, whose names have spaces."""
    rest = header[len(_gpus(header)) :]
    return next((i for i, word in enumerate(rest) if word in ("CPU", "NUMA", "GPU")), len(rest))


def _faults(names: tuple[str, ...], rows: Mapping[str, list[list[str]]], known: Callable[[str], bool]) -> list[str]:
    faults = _missing(names, rows)
    cells = {name: rows[name][0][: len(names)] for name in names if name in rows}
    for name, row in cells.items():
        faults += _row_faults(name, names, row, known)
        if any(copy[: len(names)] != row for copy in rows[name]):
            faults.append(f"row {name} stands there several times, and differs")
    return faults or _disagreements(names, cells)


def _missing(names: tuple[str, ...], rows: Mapping[str, object]) -> list[str]:
    lost = [name for name in names if name not in rows]
    extra = [name for name in rows if name not in names]
    faults = []
    if lost:
        faults.append(f"the text is cut: of {len(names)} rows, {_list(lost)} {_is_are(lost)} missing")
    if extra:
        faults.append(f"the row of column names is cut: {_list(extra)} {_is_are(extra)} missing in it")
    return faults


def _row_faults(name: str, names: tuple[str, ...], cells: list[str], known: Callable[[str], bool]) -> list[str]:
    faults = []
    for other, cell in zip(names, cells, strict=False):
        if (cell == "X") != (name == other) or not (cell == "X" or known(cell)):
            faults.append(f"row {name}, column {other}: {cell!r} is no link that nvidia-smi prints there")
    if len(cells) < len(names):
        lost = names[len(cells) :]
        faults.append(f"row {name} is cut: {_list(lost)} {_is_are(lost)} missing in it")
    return faults


def _disagreements(names: tuple[str, ...], cells: Mapping[str, list[str]]) -> list[str]:
    faults = []
    for i, j in combinations(range(len(names)), 2):
        here, there = cells[names[i]][j], cells[names[j]][i]
        if here != there:
            faults.append(f"{names[i]} to {names[j]} is {here}, but {names[j]} to {names[i]} is {there}")
    return faults


def _nvlinks(lines: list[str], source: str) -> NvlinkStatus | None:
    """The GPUs by model, as ``nvlink -s`` and ``-L`` list them, with what they say of links."""
    models: dict[int, str] = {}
    speeds: dict[int, list[float]] = {}
    position = None
    for line in lines:
        if device := re.match(r"\s*GPU (\d+): (.+?)\s*(?:\(UUID|$)", line):
            position = int(device[1])
            models[position], speeds[position] = device[2], []
        elif position is not None and (link := re.match(r"\s*Link \d+: ([\d.]+) GB/s", line)):
            speeds[position].append(float(link[1]) * 1e9)
    if not models:
        return None
    order = range(max(models) + 1)
    lost = [f"GPU {i}" for i in order if i not in models]
    if lost:
        raise UserError(f"{source}: nvlink -s: the text is cut: {_list(lost)} {_is_are(lost)} missing.")
    return NvlinkStatus(
        tuple(models[i] for i in order),
        tuple(min(speeds[i], default=0.0) for i in order),
        tuple(len(speeds[i]) for i in order),
    )


def _list(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _is_are(names: Iterable[str]) -> str:
    return "is" if len(list(names)) == 1 else "are"
