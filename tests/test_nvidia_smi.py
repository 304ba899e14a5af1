"""What nvidia-smi prints, as people keep it: every shape is read alike, what is cut or contradicts itself is refused
with its rows named, and the groups found are those of the matrix."""

import os
import random
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from dpart.partitioner.bandwidths import check_bandwidths
from dpart.partitioner.import_topology import Imported, import_topology
from dpart.partitioner.nvidia_smi import nvlink_count, parse_printout
from dpart.partitioner.topology import Topology, parse_topology, topology_text
from dpart.runtime.errors import UserError

PEERS = os.environ.get("DPART_PEERS")
FOLDER = Path(PEERS).parent / "topologies" if PEERS else Path("DPART_PEERS is not set")
FILES = sorted(FOLDER.glob("*.txt"))


def printed(cells: list[list[str]], *, ports: int = 0, affinity: bool = True) -> str:
    """The text of a matrix as recent releases print it."""
    nics = [f"NIC{i}" for i in range(ports)]
    tail = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"] if affinity else []
    lines = ["\t" + "\t".join([*(f"GPU{i}" for i in range(len(cells))), *nics, *tail])]
    for i, row in enumerate(cells):
        shown = [" X " if cell == "X" else cell for cell in row]
        lines.append("\t".join([f"GPU{i}", *shown, *["SYS"] * ports, *(["0-31", "0", "", "N/A"] if affinity else [])]))
    for i in range(ports):
        row = ["SYS"] * len(cells) + [" X " if i == j else "PIX" for j in range(ports)]
        lines.append("\t".join([f"NIC{i}", *row]))
    legend = "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n  NV#  = Connection of # NVLinks\n"
    return "\n".join(lines) + "\n\n" + legend


def square(n: int, cell: Callable[[int, int], str]) -> list[list[str]]:
    return [["X" if i == j else cell(min(i, j), max(i, j)) for j in range(n)] for i in range(n)]


def shape(topology: Topology) -> list[tuple[list[int], int]]:
    return [([level.count for level in pool.levels], pool.num_devices) for pool in topology.pools]


def imported(text: str, device: str | None = None) -> Imported:
    found = import_topology(text, "m.txt", device)
    assert parse_topology(topology_text(found.topology, found.guesses), "t.yaml") == found.topology
    assert check_bandwidths(found.topology) == []
    return found


NESTED = square(8, lambda i, j: "NV12" if i // 2 == j // 2 else "PHB" if i // 4 == j // 4 else "SYS")


@pytest.mark.parametrize(
    "kept",
    [
        lambda text: text,
        lambda text: text.expandtabs(8),
        lambda text: text.replace("\t", "  "),
        lambda text: text.lstrip("\t"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.split("Legend")[0],
        lambda text: "\x1b[4m" + text.replace("\tGPU NUMA ID", "\tGPU NUMA ID\x1b[0m"),
        lambda text: "[4m" + text.replace("\tGPU NUMA ID", "\tGPU NUMA ID[0m"),
        lambda text: "".join(f"0: {line}\n" for line in text.splitlines()),
        lambda text: "".join(f"gpu-node-17: {line}\n" for line in text.splitlines()),
        lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
        lambda text: "user@login:~$ srun --gres=gpu:8 nvidia-smi topo -m\n" + text + "user@login:~$ exit\n",
        lambda text: "```\n" + text + "```\n",
        lambda text: text.replace("\t0-31\t0\t\tN/A", ""),
        lambda text: text.replace("0-31\t0\t", "\t\t"),
        lambda text: text.replace("NIC", "mlx5_"),
        lambda text: "\n".join(line for line in text.splitlines() if not line.startswith("NIC")),
        lambda text: text.replace("\tNUMA Affinity\tGPU NUMA ID", ""),
        lambda text: "\ufeff" + text,
    ],
    ids=["as printed", "spaces", "two spaces", "no leading tab", "CRLF", "no legend", "underlined", "no escape",
         "srun", "labelled", "quoted", "prompts", "fenced", "no affinities", "blank affinities", "mlx5", "GPU rows",
         "old columns", "BOM"],
)  # fmt: skip
def test_every_shape_is_read_alike(kept: Callable[[str], str]) -> None:
    expected = parse_printout(printed(NESTED, ports=3), "m.txt").links
    found = parse_printout(kept(printed(NESTED, ports=3)), "m.txt").links
    assert expected is not None and expected.num_ports == 3
    assert found == expected
    assert [found.cells[i, j] for i, j in combinations(range(8), 2)] == [
        NESTED[i][j] for i, j in combinations(range(8), 2)
    ]


def test_two_tasks_that_print_the_same_are_one_host() -> None:
    text = "".join(f"{task}: {line}\n" for task in (0, 1) for line in printed(NESTED).splitlines())
    found = imported(text)
    assert found.topology == imported(printed(NESTED)).topology
    assert any("2 times" in guess for guess in found.guesses)


@pytest.mark.parametrize("lost", [(7,), (4, 5, 6, 7), (0,), (2, 5)])
def test_missing_rows_are_named(lost: tuple[int, ...]) -> None:
    lines = printed(NESTED, ports=2).splitlines()
    text = "\n".join(line for line in lines if not any(line.startswith(f"GPU{i}\t") for i in lost))
    with pytest.raises(UserError, match=r"m\.txt: topo -m: the text is cut: of 8 rows") as caught:
        import_topology(text, "m.txt")
    named = re.findall(r"GPU\d", str(caught.value).split("rows, ")[1])
    assert named == [f"GPU{i}" for i in lost]


def test_every_cut_is_found() -> None:
    """Wherever the square of the text ends early, it is an error that names what is missing."""
    text = printed(NESTED, affinity=False).split("\n\nLegend")[0]
    for end in range(text.index("GPU0\t X"), len(text) - 4):
        with pytest.raises(UserError, match=r"missing|is no link|no output"):
            import_topology(text[:end], "m.txt")


def test_what_contradicts_itself_is_named() -> None:
    cells = [row[:] for row in NESTED]
    cells[5][1] = "PIX"
    with pytest.raises(UserError, match="GPU1 to GPU5 is SYS, but GPU5 to GPU1 is PIX"):
        import_topology(printed(cells), "m.txt")
    cells = [row[:] for row in NESTED]
    cells[2][3] = cells[3][2] = "NVX"
    with pytest.raises(UserError, match="row GPU2, column GPU3: 'NVX' is no link"):
        import_topology(printed(cells), "m.txt")
    cells[2][3] = cells[3][2] = "X"
    with pytest.raises(UserError, match="row GPU2, column GPU3: 'X' is no link"):
        import_topology(printed(cells), "m.txt")
    with pytest.raises(UserError, match="row GPU1 stands there several times, and differs"):
        import_topology(printed(NESTED) + "\n" + printed(square(8, lambda i, j: "NV12")), "m.txt")
    rows = "\n".join(printed(NESTED).splitlines()[1:])
    with pytest.raises(UserError, match="the row of column names"):
        import_topology(rows, "m.txt")
    with pytest.raises(UserError, match="different hosts"):
        import_topology(printed(NESTED) + "GPU 0: NVIDIA L4 (UUID: GPU-0)\n", "m.txt")


@pytest.mark.parametrize("text", ["", "hello\n", "GPU0 is broken\n", "{}", "GPU 0: NVIDIA L4 (UUID: GPU-0)\n"])
def test_what_is_no_output_is_said(text: str) -> None:
    with pytest.raises(UserError, match=r"m\.txt: no output of nvidia-smi"):
        import_topology(text, "m.txt")


@pytest.mark.parametrize("links", [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 18])
def test_any_number_of_nvlinks_goes_before_pcie(links: int) -> None:
    """Field case 86: NV5, NV10 and NV16 were ranked below PCIe, as they stood in no list."""
    assert nvlink_count(f"NV{links}") == links
    found = imported(printed(square(4, lambda i, j: f"NV{links}" if i // 2 == j // 2 else "PIX")))
    assert shape(found.topology) == [([2, 2], 4)]
    inner, outer = found.topology.levels
    assert inner.link.startswith(f"{links}xnvlink") and outer.link.startswith("pcie")
    assert inner.bandwidth_bytes_per_second > outer.bandwidth_bytes_per_second
    assert sum("was guessed" in guess for guess in found.guesses) == 1


@pytest.mark.parametrize("n", range(1, 18))
def test_odd_counts_of_devices(n: int) -> None:
    """Field case 84: seven GPUs, and every other number, are a topology."""
    topology = imported(printed(square(n, lambda i, j: "NV12"))).topology
    assert shape(topology) == [([n], n)]
    topology = imported(printed(square(n, lambda i, j: "PIX" if i // 4 == j // 4 else "SYS"))).topology
    assert topology.num_devices == n
    for i, j in combinations(range(n), 2):
        assert topology.level_of((i, j)).name == ("host" if i // 4 != j // 4 or n <= 4 else "switch")


@pytest.mark.parametrize("seed", range(30))
def test_nested_matrices_are_found_as_they_are(seed: int) -> None:
    """Groups of groups in any numbering: the links of every pair come back, under the numbering that is told."""
    rng = random.Random(seed)
    counts = [rng.randint(1, 3) for _ in range(3)]
    n = counts[0] * counts[1] * counts[2]
    place = rng.sample(range(n), n)
    inner, middle = counts[0], counts[0] * counts[1]

    def cell(i: int, j: int) -> str:
        a, b = place[i], place[j]
        return "NV4" if a // inner == b // inner else "PHB" if a // middle == b // middle else "SYS"

    found = imported(printed(square(n, cell)), "a6000")
    order = list(range(n))
    for guess in found.guesses:
        if match := re.search(r"CUDA_VISIBLE_DEVICES=([\d,]+)", guess):
            order = [int(i) for i in match[1].split(",")]
    assert found.topology.is_uniform and sorted(order) == list(range(n))
    seen = {"NV4": "nvlink3-bridge", "PHB": "pcie4", "SYS": "pcie4"}
    bandwidths: dict[str, set[float]] = {}
    for a, b in combinations(range(n), 2):
        level, text = found.topology.level_of((a, b)), cell(*sorted((order[a], order[b])))
        assert level.link.endswith(seen[text])
        bandwidths.setdefault(text, set()).add(level.bandwidth_bytes_per_second)
    speeds = [bandwidths[text] for text in ("SYS", "PHB", "NV4") if text in bandwidths]
    assert all(len(speed) == 1 for speed in speeds)
    assert speeds == sorted(speeds, key=min)


@pytest.mark.parametrize("seed", range(20))
def test_no_link_is_taken_for_a_faster_one(seed: int) -> None:
    """Whatever the matrix, every pair gets at most the bandwidth that it has."""
    rng = random.Random(seed)
    n = rng.randint(2, 7)
    table = {(i, j): rng.choice(["NV1", "NV2", "PIX", "SYS"]) for i, j in combinations(range(n), 2)}
    found = imported(printed(square(n, lambda i, j: table[i, j])), "v100-16")
    order = list(range(n))
    for guess in found.guesses:
        if match := re.search(r"CUDA_VISIBLE_DEVICES=([\d,]+)", guess):
            order = [int(i) for i in match[1].split(",")]
    has = {"NV1": 25e9, "NV2": 50e9, "PIX": 15.76e9, "SYS": 7.88e9}
    for a, b in combinations(range(n), 2):
        pair = (min(order[a], order[b]), max(order[a], order[b]))
        assert found.topology.level_of((a, b)).bandwidth_bytes_per_second <= has[table[pair]] * (1 + 1e-9)


def test_a_mesh_that_is_not_nested_says_what_it_lost() -> None:
    """The hybrid cube mesh: two quads of NVLink, and four NVLinks between them that count as the slowest."""
    mesh = [(0, 4), (1, 5), (2, 6), (3, 7)]
    found = imported(printed(square(8, lambda i, j: "NV1" if i // 4 == j // 4 or (i, j) in mesh else "SYS")))
    assert shape(found.topology) == [([4, 2], 8)]
    assert [level.link for level in found.topology.levels] == ["1xnvlink2", "pcie3"]
    (lost,) = [guess for guess in found.guesses if "not nested" in guess]
    assert all(f"GPU{i}-GPU{j} (NV1)" in lost for i, j in mesh) and "taken for SYS" in lost


def test_the_device_fills_in_memory_and_speeds() -> None:
    text = printed(square(8, lambda i, j: "NV18"))
    assert imported(text).topology.device.name == "h100"
    for device, bandwidth in (("h200", 450e9), ("b200", 900e9), ("NVIDIA H100 80GB HBM3", 450e9)):
        found = imported(text, device)
        assert found.topology.levels[0].bandwidth_bytes_per_second == bandwidth
        assert not any("guessed" in guess for guess in found.guesses)
    with pytest.raises(UserError, match="NV18, but a100-80 has 12"):
        import_topology(text, "m.txt", "a100-80")
    with pytest.raises(UserError, match="l4 has no NVLink"):
        import_topology(text, "m.txt", "l4")
    with pytest.raises(UserError, match="closest is h100"):
        import_topology(text, "m.txt", "h1000")


NVLINK_S = """GPU 0: NVIDIA RTX A6000 (UUID: GPU-0)
\t Link 0: 14.062 GB/s
\t Link 1: 14.062 GB/s
GPU 1: NVIDIA RTX A6000 (UUID: GPU-1)
\t Link 0: 14.062 GB/s
\t Link 1: 14.062 GB/s
GPU 2: NVIDIA L4 (UUID: GPU-2)
NVML: Unable to retrieve NVLink information as all links are inActive
"""
PEER = (
    "  \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tGNS\n GPU1\tOK\tX\tGNS\n GPU2\tGNS\tGNS\tX\n\nLegend:\n  OK   = Status Ok\n"
)


def test_parts_of_one_host_are_read_together() -> None:
    """The matrix gives the links, `nvlink -s` the models, `-p2p` who has no peer access."""
    matrix = printed(square(3, lambda i, j: "NV2" if j == 1 else "PHB"))
    found = imported(matrix + NVLINK_S + PEER)
    assert [found.topology.device_of(i).name for i in range(3)] == ["a6000", "a6000", "l4"]
    assert found.topology.level_of((0, 1)).bandwidth_bytes_per_second == 2 * 14.0625e9
    alone = imported(matrix + NVLINK_S)
    half, whole = (t.topology.level_of((1, 2)).bandwidth_bytes_per_second for t in (found, alone))
    assert half == whole / 2
    assert any("no peer access (GNS)" in guess for guess in found.guesses)
    assert imported(NVLINK_S).topology.level_of((0, 1)).link == "2xnvlink3-bridge"
    assert imported(PEER).topology.num_devices == 3
    with pytest.raises(UserError, match="GPU 1 is missing"):
        import_topology(NVLINK_S.replace("GPU 1:", "GPU X:"), "m.txt")
    with pytest.raises(UserError, match=r"topo -p2p: .* GPU1 is missing"):
        import_topology(PEER.replace(" GPU1\tOK\tX\tGNS\n", ""), "m.txt")
    with pytest.raises(UserError, match="GPU0 to GPU1 is OK, but GPU1 to GPU0 is NS"):
        import_topology(PEER.replace("GPU1\tOK", "GPU1\tNS"), "m.txt")


def test_slices_are_said() -> None:
    text = (
        printed(square(1, lambda i, j: "")) + "GPU 0: NVIDIA L4 (UUID: GPU-0)\n  MIG 1g.5gb Device 0: (UUID: MIG-0)\n"
    )
    found = imported(text)
    assert found.topology.device.name == "l4" and any("MIG" in guess for guess in found.guesses)


EXPECTED = {
    "01_dgx1_8xV100_mlx5_oldcols.txt": ("v100-16", [([4, 2], 8)]),
    "02_8xV100_SXM2_32GB_NIC0_newcols.txt": ("v100-16", [([4, 2], 8)]),
    "04_4xV100_partial_nvlink_2socket.txt": ("v100-16", [([2, 2], 4)]),
    "05_8xA100_SXM_4NIC_short_nic_rows.txt": ("a100-80", [([8], 8)]),
    "07_dgxA100_nps4_mlx5_12_gpu_rows_only.txt": ("a100-80", [([8], 8)]),
    "09_8xH200_8NIC_full_legend.txt": ("h100", [([8], 8)]),
    "12_8xTITANV_pcie_2socket_cpuaff_only.txt": ("GPU", [([2, 2, 2], 8)]),
    "14_2xK80_4gpu_mlx4_old_SOC_legend_spaces.txt": ("GPU", [([2, 2], 4)]),
    "15_2xRTX3090_nvlink_bridge.txt": ("rtx3090", [([2], 2)]),
    "17_3xA6000_one_nvlink_pair.txt": ("rtx3090", [([2, 2], 3)]),
    "19_4xRTX5060Ti_phb.txt": ("GPU", [([4], 4)]),
    "21_4xA100_polaris_header_no_leading_tab.txt": ("a100-40", [([4], 4)]),
    "23_4xA100_blank_cpu_affinity_slurm.txt": ("a100-40", [([4], 4)]),
    "25_single_GB10.txt": ("GPU", [([1], 1)]),
    "27_2xA100_vm_8NIC_blank_affinity_spaces.txt": ("a100-80", [([2], 2)]),
    "nvlink_s_2xRTX3090.txt": ("rtx3090", [([2], 2)]),
    "nvlink_s_3xA6000_one_inactive.txt": ("a6000", [([2, 2], 3)]),
    "p2p_rw_2xRTX5090_gns.txt": ("GPU", [([2], 2)]),
    "p2p_rw_4xRTX5060Ti_ok.txt": ("GPU", [([4], 4)]),
}


@pytest.mark.skipif(not FILES, reason=f"no published printouts: {FOLDER}")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_published_printouts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = imported(text)
    device, expected = EXPECTED.get(path.name, (found.topology.device.name, shape(found.topology)))
    assert found.topology.device.name == device
    assert shape(found.topology) == expected
    assert any("not tell the kind" in guess or "are from the catalogue" in guess for guess in found.guesses)
    # Without its last GPU row it is refused.
    rows = [line for line in text.splitlines() if re.match(r" ?GPU\d+\s+(X|[A-Z]{2})", line)]
    if len(rows) > 1:
        with pytest.raises(UserError, match=f"{rows[-1].split()[0]} is missing"):
            import_topology(text.replace(rows[-1], ""), path.name)
