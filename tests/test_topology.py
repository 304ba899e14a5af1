"""Topology laws: units are read as written, bare numbers refused, every fault listed, groups found as counted."""

import itertools

import pytest

from dpart.partitioner.topology import Topology, local_topology, parse_topology, read_topology
from dpart.partitioner.units import format_bytes, format_seconds, parse_bandwidth, parse_size, parse_time
from dpart.profiler.profile import Machine
from dpart.runtime.errors import UserError

TWO_LEVELS = """
device: {name: A100, memory: 80 GiB}
levels:
  - {name: host, count: 8, bandwidth: 300 GB/s, latency: 5 us}
  - {name: cluster, count: 2, bandwidth: 200 Gbit/s}
"""


def nested(*counts: int) -> Topology:
    levels = [f"  - {{name: l{i}, count: {c}, bandwidth: {9 - i} GB/s}}" for i, c in enumerate(counts)]
    return parse_topology("device: {name: x, memory: 1 GB}\nlevels:\n" + "\n".join(levels), "t.yaml")


def test_file_in_si_units(tmp_path) -> None:
    (tmp_path / "cluster.yaml").write_text(TWO_LEVELS)
    topology = read_topology(tmp_path / "cluster.yaml")
    host, cluster = topology.levels
    assert topology.device.memory_bytes == 80 * 2**30
    assert (host.bandwidth_bytes_per_second, host.latency_seconds) == (300e9, 5e-6)
    assert (cluster.bandwidth_bytes_per_second, cluster.latency_seconds) == (25e9, 0.0)
    assert topology.num_devices == 16
    assert "16 x A100, 80.0 GiB each" in str(topology)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("25 GB/s", 25e9),
        ("200 Gbit/s", 25e9),
        ("200Gb/s", 25e9),
        ("200 Gbps", 25e9),
        ("1.5 MiB/s", 1.5 * 2**20),
    ],
)
def test_bandwidths(text: str, bytes_per_second: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_second, rel=1e-15)


@pytest.mark.parametrize("text", [25, 25.0, "25", "25 GB", "25 gb/s", "-25 GB/s", "0 GB/s", "1e999 GB/s", "x", None])
def test_a_bandwidth_without_its_unit_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        parse_bandwidth(text)


def test_sizes_and_times() -> None:
    assert [parse_size(s) for s in ("80 GiB", "16 GB", "1.5 KiB")] == [80 * 2**30, 16 * 10**9, 1536]
    assert [parse_time(s) for s in ("5 us", "2ms", "0 s")] == [5e-6, 2e-3, 0.0]
    for bad in ("80", 80, "80 G", "0 B", "-1 GB", "1.2.3 GB"):
        with pytest.raises(ValueError, match="size"):
            parse_size(bad)
    assert (format_bytes(1.5 * 2**30), format_bytes(7)) == ("1.50 GiB", "7 B")
    assert [format_seconds(s) for s in (0.0123, 2.0, 0.0)] == ["12.3 ms", "2.00 s", "0 s"]


def test_all_faults_are_listed_with_their_paths() -> None:
    with pytest.raises(UserError) as caught:
        parse_topology(
            "device: {name: A100, memory: 80, price: 3}\n"
            "levels:\n"
            "  - {name: host, count: 0, bandwidth: 300}\n"
            "  - {name: cluster, bandwidth: -200 Gbit/s, latency: 5}\n",
            "t.yaml",
        )
    message = str(caught.value)
    for fault in (
        "t.yaml: device.memory: expected a size with its unit, such as 80 GiB",
        "t.yaml: device.price: no such field.",
        "t.yaml: levels[0].count: expected at least 1, got 0.",
        "t.yaml: levels[0].bandwidth: expected a bandwidth with its unit, such as 25 GB/s",
        "t.yaml: levels[1].count: this field is missing.",
        "t.yaml: levels[1].bandwidth: expected a bandwidth",
        "t.yaml: levels[1].latency: expected a time with its unit, such as 5 us",
    ):
        assert fault in message


@pytest.mark.parametrize("text", ["device: {", "3", "", "device: {name: x, memory: 1 GB}\nlevels: []"])
def test_what_is_no_topology_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError, match=r"t\.yaml"):
        parse_topology(text, "t.yaml")


@pytest.mark.parametrize("counts", [(4,), (2, 3), (3, 2, 2)])
def test_groups_against_counting(counts: tuple[int, ...]) -> None:
    topology = nested(*counts)

    def path(device: int) -> tuple[int, ...]:
        """The device's place on each level, outermost first."""
        places = []
        for count in counts:
            device, place = divmod(device, count)
            places.append(place)
        return tuple(reversed(places))

    for devices in itertools.chain(
        itertools.combinations(range(topology.num_devices), 2),
        itertools.combinations(range(topology.num_devices), 3),
    ):
        paths = [path(d) for d in devices]
        shared = next(i for i in range(len(counts)) if len({p[i] for p in paths}) > 1)
        assert topology.level_of(devices) == topology.levels[len(counts) - 1 - shared]
        for level, size in enumerate(topology.ring_sizes(devices)):
            depth = len(counts) - 1 - level
            groups: dict[tuple[int, ...], set[int]] = {}
            for p in paths:
                groups.setdefault(p[:depth], set()).add(p[depth])
            assert size == max(map(len, groups.values()))


def test_first_devices() -> None:
    topology = nested(4, 3)
    assert [level.count for level in topology.first(8).levels] == [4, 2]
    assert [level.count for level in topology.first(3).levels] == [3, 1]
    for impossible in (6, 13, 0):
        with pytest.raises(UserError, match="ask for"):
            topology.first(impossible)


def test_the_machine_at_hand() -> None:
    topology = local_topology(Machine("cpu", 2, 2**30, 1))
    assert (topology.num_devices, topology.device.memory_bytes) == (2, 2**30)
    assert "assumed" in str(topology)
    assert "H200" in str(local_topology(Machine("NVIDIA H200", 8, 2**37, 1)))
