"""Topology laws: units are read as written, bare numbers refused, every fault listed, groups found as counted,
any number of devices allowed."""

import itertools
import math

import pytest

from dpart.partitioner.links import LINKS
from dpart.partitioner.topology import (
    Device,
    Level,
    Topology,
    local_topology,
    parse_topology,
    read_topology,
    topology_text,
)
from dpart.partitioner.units import format_bytes, format_seconds, parse_bandwidth, parse_size, parse_time
from dpart.profiler.devices import DEVICES
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
    for impossible in (13, 0):
        with pytest.raises(UserError, match="ask for"):
            topology.first(impossible)


@pytest.mark.parametrize("counts", [(7,), (4, 3), (2, 3, 2), (1, 5), (3, 1, 2)])
def test_the_first_devices_keep_their_links_whatever_their_number(counts: tuple[int, ...]) -> None:
    """Field case 84: seven of eight GPUs, and any prime, are a topology."""
    whole = nested(*counts)
    for n in range(1, whole.num_devices + 1):
        part = whole.first(n)
        assert part.num_devices == n
        assert part.is_uniform == (math.prod(level.count for level in part.levels) == n)
        assert f"{n} x x" in str(part)
        for m in range(1, n + 1):
            assert part.first(m) == whole.first(m)
        for devices in itertools.combinations(range(n), min(n, 2)):
            here, there = part.level_of(devices), whole.level_of(devices)
            assert (here.name, here.bandwidth_bytes_per_second) == (there.name, there.bandwidth_bytes_per_second)
            assert part.ring_sizes(devices) == whole.ring_sizes(devices)
        # No group is counted that has no device.
        for level, size in zip(part.levels, part.group_sizes, strict=True):
            assert level.count == 1 or n > size // level.count


def unlike() -> Topology:
    """Four fast devices in a host, then two hosts of three and of two slow ones: 0-3, 4-6, 7-8."""
    return parse_topology(
        "pools:\n"
        "  - device: {name: fast, memory: 2 GB, speed: 2.0, dollars_per_hour: 3}\n"
        "    levels: [{name: host, count: 4, bandwidth: 100 GB/s}]\n"
        "  - device: {name: slow, memory: 1 GB}\n"
        "    levels:\n"
        "      - {name: small host, count: 3, bandwidth: 10 GB/s, latency: 1 us}\n"
        "      - {name: rack, count: 2, bandwidth: 2 GB/s, latency: 2 us}\n"
        "    missing: 1\n"
        "between: {bandwidth: 1 GB/s, latency: 10 us}\n",
        "t.yaml",
    )


def test_unlike_hosts_are_numbered_through() -> None:
    topology = unlike()
    assert topology.num_devices == 9
    assert topology.ranges == (range(4), range(4, 9))
    assert [topology.device_of(i).name for i in range(9)] == ["fast"] * 4 + ["slow"] * 5
    assert (topology.device.speed, topology.device.price_dollars_per_hour) == (2.0, 3.0)
    assert (topology.others[0].device.speed, topology.others[0].device.price_dollars_per_hour) == (1.0, 0.0)
    for devices, level in (
        ((0, 3), "host"), ((4, 6), "small host"), ((6, 7), "rack"), ((7, 8), "small host"), ((8,), "small host"),
        ((3, 4), "pools"), (range(9), "pools"),
    ):  # fmt: skip
        assert topology.level_of(devices).name == level
    with pytest.raises(AssertionError):
        topology.level_of((0, 9))
    assert "9" not in str(topology).split(";")[0] and "pools at 1.00 GB/s, 10.0 us" in str(topology)


def test_rings_over_unlike_hosts() -> None:
    """Inside pools the widest counts and the slowest link at each depth; between them the pools there are."""
    topology = unlike()
    assert [level.bandwidth_bytes_per_second for level in topology.ring_levels] == [10e9, 2e9, 1e9]
    assert topology.ring_sizes(range(9)) == (4, 2, 2)
    assert topology.ring_sizes((0, 1)) == (2, 1, 1)
    assert topology.ring_sizes((4, 5, 6, 7)) == (3, 2, 1)
    assert topology.ring_sizes((0, 8)) == (1, 1, 2)
    plain = nested(2, 2)
    assert plain.ring_levels == plain.levels


def test_the_first_devices_of_unlike_hosts() -> None:
    topology = unlike()
    for n in range(1, 10):
        part = topology.first(n)
        assert part.num_devices == n
        assert (part.between is None) == (n <= 4)
        for devices in itertools.combinations(range(n), min(n, 2)):
            assert part.level_of(devices).name == topology.level_of(devices).name
    assert topology.first(9) == topology
    assert topology.first(4) == Topology(topology.device, topology.levels)


TOPOLOGIES = {
    "one level": nested(4),
    "nested": nested(2, 3, 2),
    "cut": nested(2, 3, 2).first(7),
    "unlike": unlike(),
    "local": local_topology(Machine("cpu", 2, 2**30 + 1, 1)),
    "odd numbers": Topology(Device("a: b", 1, 0.1 + 0.2, 1 / 3), (Level("#1", 3, 1e9 / 3, 1e-6 / 7, "8xndr"),)),
    "known": Topology(Device("h100", 2**33, 0.0), (Level("host", 2, 1.0, 0.0),)),
}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_equal_groups_for_searchers_are_never_faster_than_in_truth(topology: Topology) -> None:
    levels = topology.nested_levels
    assert math.prod(level.count for level in levels) == topology.num_devices
    assert (levels == topology.levels) == topology.is_uniform
    flat = Topology(topology.device, levels)
    for pair in itertools.combinations(range(topology.num_devices), 2):
        searched, true = flat.level_of(pair), topology.level_of(pair)
        assert true in topology.all_levels
        assert searched.bandwidth_bytes_per_second <= true.bandwidth_bytes_per_second
        assert searched.latency_seconds >= true.latency_seconds
    memories = {topology.device_of(i).memory_bytes for i in range(topology.num_devices)}
    assert topology.least_memory_bytes == min(memories)


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_what_is_written_reads_back_equal(topology: Topology) -> None:
    text = topology_text(topology, ("one comment", "another\nin two lines"))
    assert text.startswith("# one comment\n# another\n# in two lines\n")
    assert parse_topology(text, "t.yaml") == topology


def test_names_of_the_catalogue_stand_for_numbers() -> None:
    topology = parse_topology(
        "device: H100\nlevels:\n"
        "  - {name: host, count: 8, link: NVLink4}\n"
        "  - {name: cluster, count: 2, link: 8 x ndr, bandwidth: 300 GB/s, latency: 1 us}\n",
        "t.yaml",
    )
    kind, (host, cluster) = DEVICES["h100"], topology.levels
    assert topology.device == Device("h100", kind.memory_bytes, kind.price_dollars_per_hour or 0.0)
    assert host == Level("host", 8, 450e9, LINKS["nvlink4"].latency_seconds, "nvlink4")
    assert cluster == Level("cluster", 2, 300e9, 1e-6, "8xndr")
    given = parse_topology("device: {name: h100, memory: 70 GiB, dollars_per_hour: 1}\n" + LEVEL, "t.yaml").device
    assert given == Device("h100", 70 * 2**30, 1.0)


LEVEL = "levels: [{name: host, count: 8, bandwidth: 300 GB/s}]\n"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("device: h1o0\n" + LEVEL, ("t.yaml: device: no device 'h1o0'", "the closest is h100")),
        ("device: a100\n" + LEVEL, ("t.yaml: device: ", "a100-40 or a100-80")),
        ("device: {name: mine}\n" + LEVEL, ("t.yaml: device: memory is missing",)),
        ("device: {name: h100, speed: 0, dollars_per_hour: -1}\n" + LEVEL, ("device.speed", "device.dollars_per_hour")),
        ("device: h100\nlevels: [{name: host, count: 8}]", ("levels[0]: expected a bandwidth or a link",)),
        ("device: h100\nlevels: [{name: a, count: 8, link: nvlnk4}]", ("levels[0].link", "nvlink4 is the closest")),
        ("device: h100\nlevels: [{name: a, count: 8, link: 0xndr}]", ("levels[0].link: expected at least one link",)),
        ("device: h100\nmissing: 8\n" + LEVEL, ("missing: 8 of 8 devices leave none",)),
        ("device: h100\nmissing: -1\n" + LEVEL, ("missing: expected at least 0",)),
        ("pools: []\nbetween: {link: ndr}", ("pools: expected at least one pool",)),
        (
            "pools: [{device: h100, levels: []}, {device: l4, levels: [{name: a, count: 0, link: pcie4}]}]",
            ("pools[0].levels: expected at least one", "pools[1].levels[0].count", "between: this field is missing"),
        ),
        (
            "pools: [{device: h100, missing: 9, levels: [{name: a, count: 9, link: ndr}]}]",
            ("pools[0].missing: 9 of 9",),
        ),
    ],
)
def test_faults_of_catalogue_names_and_pools(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        parse_topology(text, "t.yaml")
    for part in parts:
        assert part in str(caught.value)


def test_the_machine_at_hand() -> None:
    topology = local_topology(Machine("cpu", 2, 2**30, 1))
    assert (topology.num_devices, topology.device.memory_bytes) == (2, 2**30)
    assert "assumed" in str(topology)
    assert "H200" in str(local_topology(Machine("NVIDIA H200", 8, 2**37, 1)))
