"""The catalogue: every spelling finds its device, figures are in proportion, words are topologies, slips are
warned of."""

import math

import pytest

from dpart.partitioner.bandwidths import check_bandwidths
from dpart.partitioner.hosts import DEVICE_LINKS, HOSTS, catalogue_topology, find_topology
from dpart.partitioner.links import LINKS, link_named
from dpart.partitioner.topology import parse_topology, topology_text
from dpart.profiler.devices import DEVICES, PeakFlops, device_kind
from dpart.runtime.errors import UserError


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("h100 SXM", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("A100 80 GB", "a100-80"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla V100-PCIE-32GB", "v100-32-pcie"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("rtx-4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5060 Ti", "rtx5060ti"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("Tesla K80", "k80"),
        ("NVIDIA TITAN V", "titan-v"),
        ("NVIDIA GB10", "gb10"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("cpu", "cpu-core"),
        ("CPU core", "cpu-core"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert device_kind(spelling).name == name
    assert device_kind(spelling.upper()) is device_kind(spelling.lower()) is DEVICES[name]


@pytest.mark.parametrize(
    "unlike",
    ["H100 NVL", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA RTX 6000 Ada Generation",
     "L40S", "A10", "h1o0", "", "GPU"],
)  # fmt: skip
def test_what_only_looks_alike_is_refused_with_the_closest(unlike: str) -> None:
    with pytest.raises(UserError, match=r"no device .* h100, "):
        device_kind(unlike)
    with pytest.raises(UserError, match="the closest is h100"):
        device_kind("H10O")
    with pytest.raises(UserError, match="a100-40 or a100-80"):
        device_kind("A100")


def test_figures_are_in_proportion() -> None:
    assert {*DEVICES} == {*DEVICE_LINKS}
    for name, kind in DEVICES.items():
        assert kind.name == name and kind.source and device_kind(kind.title) is kind
        assert 2**31 <= kind.memory_bytes <= 2**38
        # All of the memory is read in 5 to 600 milliseconds, and a product needs more sums than bytes.
        assert 0.005 < kind.memory_bytes / kind.memory_bandwidth_bytes_per_second < 0.6
        flops = kind.flops
        assert flops.float32 > kind.memory_bandwidth_bytes_per_second
        assert flops.float32 <= flops.of("tf32") <= flops.of("bfloat16") <= flops.of("float8")
        assert flops.of("bfloat16") <= flops.of("float16")
        if kind.price_dollars_per_hour is not None:
            assert 0 < kind.price_dollars_per_hour < 20 and "price" in kind.source


def test_a_type_without_units_of_its_own_runs_as_the_next_wider() -> None:
    flops = PeakFlops(1.0, bfloat16=4.0)
    assert [flops.of(t) for t in ("float32", "tf32", "bfloat16", "float16", "float8")] == [1, 1, 4, 1, 4]


@pytest.mark.parametrize("name", HOSTS)
def test_hosts(name: str) -> None:
    host, kind = HOSTS[name], DEVICES[HOSTS[name].device]
    one, three = catalogue_topology(name), catalogue_topology(f"3x{name}")
    assert host.source
    assert (one.num_devices, three.num_devices) == (host.num_devices, 3 * host.num_devices)
    assert three.levels[:-1] == one.levels
    assert three.levels[-1].count == 3
    assert one.device.memory_bytes == kind.memory_bytes
    if host.price_dollars_per_hour is not None:
        assert one.device.price_dollars_per_hour * host.num_devices == pytest.approx(host.price_dollars_per_hour)
    for topology in (one, three):
        assert check_bandwidths(topology) == []
        assert parse_topology(topology_text(topology), "t.yaml") == topology


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("number", [1, 2, 7, 11, 64])
def test_any_number_of_devices(name: str, number: int) -> None:
    links = DEVICE_LINKS[name]
    if links.host is None and number > links.most:
        with pytest.raises(UserError, match="write a topology file"):
            catalogue_topology(f"{number}x{name}")
        return
    topology = catalogue_topology(f"{number}x{name}")
    assert topology.num_devices == number
    assert topology.device.name == name
    assert check_bandwidths(topology) == []
    assert parse_topology(topology_text(topology), "t.yaml") == topology


def test_words() -> None:
    assert catalogue_topology("4 X DGX_H100") == catalogue_topology("4xdgx-h100") == catalogue_topology("32xh100")
    assert catalogue_topology("dgx-h100").num_devices == 8
    assert catalogue_topology("16384xh100").levels[-1].count == 2048
    both = catalogue_topology("2xdgx-h100+4xdgx-a100-80")
    assert [len(own) for own in both.ranges] == [16, 32]
    assert both.between is not None and both.between.bandwidth_bytes_per_second == 200e9
    assert parse_topology(topology_text(both), "t.yaml") == both
    for word, part in (
        ("dgx-h10", "closest: dgx-h100"), ("4xdgx-hx200", "dgx-h200"), ("dgx-a100", "dgx-a100-40 or dgx-a100-80"),
        ("0xh100", "at least one"), ("", "empty"), ("2xh100+", "empty"), ("a100", "several sizes"), ("zzzz", "no host"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=part):
            catalogue_topology(word)


def test_a_file_goes_before_a_word(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_topology("dgx-h100").device.name == "h100"
    (tmp_path / "dgx-h100").write_text(topology_text(catalogue_topology("l4")))
    assert find_topology("dgx-h100").device.name == "l4"
    for missing in ("cluster.yaml", "sub/dgx-h100", tmp_path / "nothing"):
        with pytest.raises(UserError, match="no such file"):
            find_topology(missing)
    with pytest.raises(UserError, match="dgx-h10: no such file, and no host or device"):
        find_topology("dgx-h10")


def test_links() -> None:
    for name, kind in LINKS.items():
        link = link_named(name)
        least, most = link.range_bytes_per_second
        assert kind.source and link.type is kind
        assert least < link.bandwidth_bytes_per_second < most
        assert link_named(f"2 x {name.upper()}").bandwidth_bytes_per_second == 2 * kind.unit_bytes_per_second
    same = {
        "100gbe": ("eth100", "Ethernet-100", "100 GbE"),
        "ndr": ("InfiniBand NDR", "ib-ndr"),
        "nvlink4": ("NVLink 4",),
    }
    for name, others in same.items():
        assert all(link_named(other) == link_named(name) for other in others)


def cluster(level: str) -> str:
    host = "{name: host, count: 8, bandwidth: 300 GB/s, latency: 5 us}"
    return f"device: {{name: x, memory: 80 GiB}}\nlevels:\n  - {host}\n  - {{name: cluster, count: 2, {level}}}\n"


@pytest.mark.parametrize(
    ("level", "parts"),
    [
        # Field case 72: a bandwidth set far too high makes communication free.
        ("bandwidth: 400 GB/s, link: ndr", ("one port of ndr", "50.0 GB/s meant (bits read as bytes)")),
        ("bandwidth: 25 TB/s", ("networks between hosts", "25.0 GB/s meant (a slip of 1,000)")),
        ("bandwidth: 100 kB/s", ("below", "100 MB/s meant (a slip of 1,000)")),
        ("bandwidth: 200 TB/s, link: 8xhdr", ("of 8xhdr", "a slip of 1,000")),
        ("bandwidth: 900 GB/s, link: nvlink4", ("of nvlink4", "450 GB/s meant (both directions counted as one)")),
        ("bandwidth: 25 GB/s, link: 8xhdr", ("below", "200 GB/s meant (bytes read as bits)")),
        ("bandwidth: 25 GB/s, latency: 5 s", ("latency of 5.00 s",)),
    ],
)
def test_a_slip_in_a_unit_is_warned_of(level: str, parts: tuple[str, ...]) -> None:
    warnings = check_bandwidths(parse_topology(cluster(level), "t.yaml"))
    assert any(all(part in warning for part in ("cluster", *parts)) for warning in warnings), warnings


@pytest.mark.parametrize(
    "level",
    ["bandwidth: 200 Gbit/s, latency: 10 us", "bandwidth: 1 Gbit/s", "link: ndr", "bandwidth: 390 GB/s, link: 8xndr",
     "bandwidth: 40 GB/s, link: ndr", "bandwidth: 12 GB/s, link: 100gbe", "bandwidth: 2 TB/s, count: 1"],
)  # fmt: skip
def test_what_can_be_true_is_not_warned_of(level: str) -> None:
    text = cluster(level) if "count" not in level else cluster("bandwidth: 2 TB/s").replace("count: 2", "count: 1")
    assert check_bandwidths(parse_topology(text, "t.yaml")) == []


def test_no_group_sends_more_than_its_members() -> None:
    text = "device: {name: l4, memory: 24 GiB}\nlevels:\n  - {name: host, count: 2, bandwidth: 310 GB/s}\n"
    assert any("memory of a l4" in warning for warning in check_bandwidths(parse_topology(text, "t.yaml")))
    text = text.replace("310", "10") + "  - {name: cluster, count: 2, bandwidth: 25 GB/s}\n"
    (warning,) = check_bandwidths(parse_topology(text, "t.yaml"))
    assert "more than the 2 members" in warning
    both = catalogue_topology("dgx-h100+dgx-h200")
    assert check_bandwidths(both) == []
    assert math.isclose(both.between.bandwidth_bytes_per_second, 400e9)  # type: ignore[union-attr]
