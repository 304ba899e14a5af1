"""Places: a tensor-parallel group stands inside one host, no device is given out twice, and what fits is placed."""

import random
from collections.abc import Sequence

import pytest

from dpart.partitioner.placement import give_out
from dpart.partitioner.topology import Device, Level, Topology

GiB = 2**30


def hosts(size: int, count: int) -> Topology:
    inner = Level("host", size, 8e9, 1e-5)
    return Topology(Device("cpu", GiB), (inner, Level("cluster", count, 1e9, 1e-4)))


def check(stages: Sequence[tuple[int, int]], topology: Topology, size: int) -> bool:
    """Whether the stages were placed; and if so, rightly."""
    placed = give_out(stages, topology)
    if placed is None:
        return False
    used = [device for devices in placed for device in devices]
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(topology.num_devices))
    assert [len(devices) for devices in placed] == [replicas * degree for replicas, degree in stages]
    for (replicas, degree), devices in zip(stages, placed, strict=True):
        for r in range(replicas):
            group = devices[r * degree : (r + 1) * degree]
            assert list(group) == list(range(group[0], group[0] + degree))
            assert group[0] // size == group[-1] // size
            assert group[0] % size % degree == 0
    return True


def draw(rng: random.Random, degrees: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Stages until a budget of devices is used up, or nearly."""
    stages = []
    while budget:
        degree = rng.choice([t for t in degrees if t <= budget])
        replicas = rng.randint(1, budget // degree)
        stages.append((replicas, degree))
        budget -= replicas * degree
        if rng.random() < 0.1:
            break
    return stages


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(40))
def test_powers_of_two_always_pack(seed: int, size: int) -> None:
    """Whatever is enough by count is enough, also where the last host is smaller."""
    rng = random.Random(seed)
    topology = hosts(size, rng.randint(1, 5))
    if rng.random() < 0.5:
        topology = topology.first(rng.randint(1, topology.num_devices))
    degrees = [t for t in (1, 2, 4, 8) if t <= min(size, topology.num_devices)]
    assert check(draw(rng, degrees, topology.num_devices), topology, size)


@pytest.mark.parametrize("seed", range(60))
def test_other_sizes_are_placed_rightly_or_not_at_all(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([3, 6, 12])
    topology = hosts(size, rng.randint(1, 4))
    check(draw(rng, [t for t in (1, 2, 3, 4, 6) if size % t == 0], topology.num_devices), topology, size)


def test_too_many_devices_or_too_large_a_group_are_refused() -> None:
    topology = hosts(4, 2)
    assert give_out([(2, 4)], topology) == (tuple(range(8)),)
    assert give_out([(9, 1)], topology) is None
    assert give_out([(3, 4)], topology) is None
    assert give_out([(1, 8)], topology) is None
    assert give_out([(1, 4), (1, 2), (1, 4)], topology.first(7)) is None


def test_neighbours_stand_side_by_side_and_gaps_are_filled() -> None:
    """Stage by stage where that goes; large groups first where it does not."""
    topology = hosts(8, 2)
    assert give_out([(1, 1), (1, 2), (1, 4), (1, 1)], topology) == ((0,), (2, 3), (4, 5, 6, 7), (1,))
    one = hosts(4, 1)
    assert give_out([(1, 1), (1, 2), (1, 1)], one) == ((0,), (2, 3), (1,))
    crowded = give_out([(3, 1), (1, 4), (1, 1)], hosts(4, 2))
    assert crowded is not None
    assert crowded[1] == (4, 5, 6, 7)


@pytest.mark.parametrize("seed", range(20))
def test_replicas_of_one_size_stand_in_a_row(seed: int) -> None:
    """So that what stages exchange, and their all-reduces, stay inside as few hosts as can be."""
    rng = random.Random(seed)
    topology = hosts(rng.choice([2, 4, 8]), 4)
    replicas = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    if sum(replicas) <= topology.num_devices:
        placed = give_out([(r, 1) for r in replicas], topology)
        assert placed is not None
        assert [device for devices in placed for device in devices] == list(range(sum(replicas)))
