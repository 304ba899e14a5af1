"""`import_topology`: the text of `nvidia-smi` as a `Topology`.

Pairs are sorted into groups from the slowest link in: GPUs that only the slowest links join stand in different
groups. Where that leaves whole cliques, the matrix is nested and nothing is lost::

        0  1  2  3                        PHB
    0   X PIX PHB PHB                   /     \\
    1  PIX X  PHB PHB      ->        PIX       PIX
    2  PHB PHB X  PIX                / \\       / \\
    3  PHB PHB PIX X                0   1     2   3

Where it does not (a hybrid cube mesh, a ring), groups of equal cliques are sought, and links between groups count
as the slowest. Groups need neighbouring numbers, so GPUs may have to be numbered anew; all of this is said.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

from dpart.partitioner.nvidia_smi import parse_printout
from dpart.partitioner.topology import Device, Level, Pool, Topology, joined
from dpart.partitioner.wires import Wire, Wiring, wiring

_MOST_PARTITIONS = 10_000
"""Of sixteen GPUs there are millions; the first ones keep neighbours together."""


@dataclass(frozen=True)
class Imported:
    """A topology, and a sentence for everything that was guessed or lost."""

    topology: Topology
    guesses: tuple[str, ...]


@dataclass(frozen=True)
class _Group:
    """GPUs that one kind of wire joins, or groups of them; a GPU alone has no wire.

    Attributes:
        gpus: In the order in which they are numbered.
    """

    gpus: tuple[int, ...]
    wire: Wire | None = None
    parts: tuple["_Group", ...] = ()


def import_topology(text: str, source: str, device: str | None = None) -> Imported:
    """The topology of the host whose nvidia-smi printed `text`.

    Args:
        source: Names the text in errors.
        device: The catalogue name of its GPUs; None to go by the text, and to guess.

    Raises:
        UserError: The text is not such output, is cut, or contradicts itself or the device.
    """
    read = wiring(parse_printout(text, source), device)
    losses: list[str] = []
    kinds: dict[Device, list[int]] = {}
    for i, kind in enumerate(read.devices):
        kinds.setdefault(kind, []).append(i)
    found: list[Topology] = []
    order: list[int] = []
    for kind, gpus in kinds.items():
        group = _grouped(tuple(gpus), read, losses)
        pools, wire = _pools(kind, group, losses)
        found.append(_topology(pools, wire))
        order += group.gpus
    topology = found[0]
    if len(found) > 1:
        across = _slowest(read.wires[i, j] for i, j in read.wires if read.devices[i] != read.devices[j])
        topology = joined(found, _level("host", len(found), across))
    if order != sorted(order):
        numbers = ",".join(read.names[i].removeprefix("GPU") for i in order)
        losses.append(f"GPUs that belong together get neighbouring numbers: run with CUDA_VISIBLE_DEVICES={numbers}.")
    return Imported(topology, (*read.guesses, *losses))


def _grouped(gpus: tuple[int, ...], read: Wiring, losses: list[str]) -> _Group:
    """The groups of these GPUs, from the slowest wire in."""
    if len(gpus) == 1:
        return _Group(gpus)
    pairs = list(combinations(gpus, 2))
    slowest = _slowest(read.wires[pair] for pair in pairs)
    faster = {pair for pair in pairs if _rank(read.wires[pair]) > _rank(slowest)}
    apart = _components(gpus, faster) if faster else [(gpu,) for gpu in gpus]
    if len(apart) == 1:
        apart = [] if slowest.is_nvlink else _cliques(gpus, faster, read.wires)
        inside = {pair for part in apart for pair in combinations(part, 2)}
        lost = sorted(faster - inside) if apart else sorted(faster)
        names = ", ".join(f"{read.names[i]}-{read.names[j]} ({read.cells[i, j]})" for i, j in lost)
        as_what = next(read.cells[pair] for pair in pairs if read.wires[pair] == slowest)
        losses.append(f"The matrix is not nested: the links {names} were taken for {as_what}, which is slower.")
        apart = apart or [(gpu,) for gpu in gpus]
    parts = tuple(_grouped(part, read, losses) for part in apart)
    # Larger groups first, so that a smaller one is the last; Python's sort keeps the order of equals.
    parts = tuple(sorted(parts, key=lambda part: -len(part.gpus)))
    return _Group(tuple(gpu for part in parts for gpu in part.gpus), slowest, parts)


def _slowest(wires: Iterable[Wire]) -> Wire:
    return min(wires, key=_rank)


def _rank(wire: Wire) -> tuple[bool, float]:
    """The faster, the greater; any number of NVLinks goes before PCIe, which all devices of a host share."""
    return wire.is_nvlink, wire.bandwidth_bytes_per_second


def _components(gpus: Sequence[int], joined_pairs: set[tuple[int, int]]) -> list[tuple[int, ...]]:
    """What hangs together, each in order."""
    home = {gpu: gpu for gpu in gpus}
    for i, j in sorted(joined_pairs):
        old, new = max(home[i], home[j]), min(home[i], home[j])
        home = {gpu: new if of == old else of for gpu, of in home.items()}
    return [tuple(gpu for gpu in gpus if home[gpu] == first) for first in sorted(set(home.values()))]


def _cliques(
    gpus: tuple[int, ...], pairs: set[tuple[int, int]], wires: Mapping[tuple[int, int], Wire]
) -> list[tuple[int, ...]]:
    """The GPUs in equal cliques of these pairs: the largest there are, and of those the fastest; or nothing."""
    for size in range(len(gpus) // 2, 1, -1):
        found = list(islice(_partitions(gpus, size, pairs), _MOST_PARTITIONS)) if len(gpus) % size == 0 else []
        if found:
            return max(
                found,
                key=lambda parts: sum(
                    wires[pair].bandwidth_bytes_per_second for part in parts for pair in combinations(part, 2)
                ),
            )
    return []


def _partitions(gpus: tuple[int, ...], size: int, pairs: set[tuple[int, int]]) -> Iterable[list[tuple[int, ...]]]:
    if not gpus:
        yield []
        return
    first, *rest = gpus
    for chosen in combinations([gpu for gpu in rest if (first, gpu) in pairs], size - 1):
        if all(pair in pairs for pair in combinations(chosen, 2)):
            left = tuple(gpu for gpu in rest if gpu not in chosen)
            for others in _partitions(left, size, pairs):
                yield [(first, *chosen), *others]


def _pools(device: Device, group: _Group, losses: list[str]) -> tuple[list[Pool], Wire | None]:
    """The group as one pool if it can be, else as runs of equal parts, with the wire between them."""
    whole = _pool(device, group)
    if whole is not None:
        return [whole], None
    pools: list[Pool] = []
    for part in group.parts:
        pool = _pool(device, part)
        if pool is None:
            assert part.wire is not None
            losses.append(
                f"A group of {len(part.gpus)} GPUs has unequal parts: all its links were taken for its slowest."
            )
            pool = Pool(device, (_level("group", len(part.gpus), part.wire),))
        pools.append(pool)
    return pools, group.wire


def _pool(device: Device, group: _Group) -> Pool | None:
    """The group under nested levels, of which the last part may be smaller; None where that is not its shape."""
    if group.wire is None:
        return Pool(device, ())
    parts = [_pool(device, part) for part in group.parts]
    first, last = parts[0], parts[-1]
    if first is None or last is None or first.missing or any(part != first for part in parts[:-1]):
        return None
    if last != first and (last.missing or last.num_devices >= first.num_devices or not _starts_like(last, first)):
        return None
    level = _level(group.wire.holder, len(parts), group.wire)
    return Pool(device, (*first.levels, level), first.num_devices - last.num_devices)


def _starts_like(part: Pool, whole: Pool) -> bool:
    """Whether the part is what is left of the whole when its last devices go."""
    rest = whole.first(part.num_devices)
    return part.levels == tuple(level for level in rest.levels if level.count > 1) and not rest.missing


def _level(name: str, count: int, wire: Wire) -> Level:
    return Level(name, count, wire.bandwidth_bytes_per_second, wire.latency_seconds, wire.link)


def _topology(pools: Sequence[Pool], wire: Wire | None) -> Topology:
    named = [_with_names(pool) for pool in pools]
    parts = [Topology(pool.device, pool.levels, missing=pool.missing) for pool in named]
    if wire is None:
        return parts[0]
    return joined(parts, _level("host", len(parts), wire))


def _with_names(pool: Pool) -> Pool:
    """The outermost level is the host. A GPU alone has one too, whose link nothing uses."""
    *inner, outer = pool.levels or (Level("host", 1, 1e10, 1e-5),)
    return Pool(pool.device, (*inner, replace(outer, name="host")), pool.missing)
