"""Topologies that differ from a given one in a single thing: the bandwidth of a level, or one more device.

The questions about a plan ("what if the network were faster?") are answered by planning again on one of these.
"""

from dataclasses import dataclass, replace

from dpart.partitioner.topology import Level, Pool, Topology


@dataclass(frozen=True)
class LevelPlace:
    """A level of a topology.

    Attributes:
        pool: Number of its pool; None for the link between pools.
        index: Of the level in its pool, innermost first.
        name: For people.
    """

    pool: int | None
    index: int
    name: str
    bandwidth_bytes_per_second: float


@dataclass(frozen=True)
class Growth:
    """A topology with more devices than before.

    Attributes:
        added: How many more.
        what: In words, such as ``one more device (a100-80)`` or ``one more host (8 x a100-80)``.
        topologies: Ways to write the same devices down: a search may find more in one of them than in another.
    """

    added: int
    what: str
    topologies: tuple[Topology, ...]


def level_places(topology: Topology) -> tuple[LevelPlace, ...]:
    """All levels over which anything travels: those with two members or more."""
    places = [
        LevelPlace(p, i, f"pool {p}, {level.name}" if topology.others else level.name, level.bandwidth_bytes_per_second)
        for p, pool in enumerate(topology.pools)
        for i, level in enumerate(pool.levels)
        if level.count > 1
    ]
    if topology.between is not None:
        places.append(LevelPlace(None, 0, "between pools", topology.between.bandwidth_bytes_per_second))
    return tuple(places)


def with_bandwidth(topology: Topology, place: LevelPlace, factor: float) -> Topology:
    """The bandwidth of one level multiplied; its link type is no longer told."""

    def scaled(level: Level) -> Level:
        return replace(level, bandwidth_bytes_per_second=level.bandwidth_bytes_per_second * factor, link="")

    if place.pool is None:
        assert topology.between is not None, "a place of this topology"
        return replace(topology, between=scaled(topology.between))
    pools = list(topology.pools)
    levels = list(pools[place.pool].levels)
    levels[place.index] = scaled(levels[place.index])
    pools[place.pool] = replace(pools[place.pool], levels=tuple(levels))
    return _rebuilt(topology, pools)


def growths(topology: Topology) -> tuple[Growth, ...]:
    """For every pool, the least by which it grows: a device where one can be added alone, else a group.

    A pool that lacks devices gets one of them, and a pool of one level one more member. Of nested levels that are
    full, the outermost gets one more group: a host.
    """
    return tuple(_growth(topology, p) for p in range(len(topology.pools)))


def _growth(topology: Topology, p: int) -> Growth:
    pool = topology.pools[p]
    name = pool.device.name
    if pool.missing:
        return Growth(
            1, f"one more device ({name})", (_with_pool(topology, p, replace(pool, missing=pool.missing - 1)),)
        )
    *inner, outermost = pool.levels
    wider = replace(pool, levels=(*inner, replace(outermost, count=outermost.count + 1)))
    size = pool.num_devices // outermost.count
    if size > 1:
        group = f"one more {inner[-1].name} ({size} x {name})"
        return Growth(size, group, (_with_pool(topology, p, wider),))
    # Tensor-parallel groups fill a group of devices, and nine devices have none of two: the old ones stay a group.
    apart = Level(f"{outermost.name} and one", 2, outermost.bandwidth_bytes_per_second, outermost.latency_seconds)
    beside = Pool(pool.device, (*pool.levels, apart), outermost.count - 1)
    ways = (wider, beside) if outermost.count > 1 else (wider,)
    return Growth(1, f"one more device ({name})", tuple(_with_pool(topology, p, way) for way in ways))


def _with_pool(topology: Topology, p: int, pool: Pool) -> Topology:
    return _rebuilt(topology, [pool if i == p else other for i, other in enumerate(topology.pools)])


def _rebuilt(topology: Topology, pools: list[Pool]) -> Topology:
    first, *others = pools
    return Topology(first.device, first.levels, topology.note, tuple(others), topology.between, first.missing)
