"""What ``dpart topology`` does, measuring apart: tables on standard output, warnings on standard error."""

import os
import re
import shlex
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpart.partitioner.bandwidths import check_bandwidths
from dpart.partitioner.hosts import HOSTS, HostKind, find_topology
from dpart.partitioner.import_topology import import_topology
from dpart.partitioner.links import LINKS, link_named
from dpart.partitioner.topology import Level, Topology, topology_text
from dpart.partitioner.units import format_bandwidth, format_bytes, format_seconds
from dpart.profiler.devices import DEVICES, DeviceKind, device_kind
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_text, refuse_existing, write_text

_NARROWEST = 116


def checked_topology(word: str | os.PathLike[str]) -> Topology:
    """The topology of a file or a catalogue word; what is hard to believe of it is said on standard error."""
    topology = find_topology(word)
    for warning in check_bandwidths(topology):
        click.echo(f"Warning: {os.fspath(word)}: {warning}", err=True)
    return topology


def show(word: str) -> None:
    """``dpart topology show``: the levels and devices of a topology."""
    topology = find_topology(word)
    console = _console()
    console.print(_levels_table(word, topology))
    console.print(_devices_table(topology))
    for line in _sources(word, topology):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for warning in check_bandwidths(topology):
        console.print(f"Warning: {warning}", markup=False, highlight=False, soft_wrap=True)


def list_catalogue() -> None:
    """``dpart topology list``: hosts, devices and links that words can name."""
    console = _console()
    console.print(_hosts_table())
    console.print(_kinds_table())
    console.print(_links_table())
    console.print(
        "Use: --topology dgx-h100, 4xdgx-h100, 8xrtx4090, 16384xh100, 2xdgx-h100+4xdgx-a100-80; the source of every "
        "figure: dpart topology show WORD.",
        soft_wrap=True, markup=False, highlight=False,
    )  # fmt: skip


def import_file(file: Path, device: str | None, output: Path, *, force: bool) -> None:
    """``dpart topology import``: from the text of nvidia-smi to a topology file."""
    refuse_existing(output, force=force)
    found = import_topology(read_text(file), os.fspath(file), device)
    heading = f"From {file.name}, as nvidia-smi printed it."
    write_text(topology_text(found.topology, (heading, *found.guesses)), output, force=force)
    console = _console()
    console.print(_levels_table(os.fspath(output), found.topology))
    for guess in found.guesses:
        console.print(f"Note: {guess}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"\nWrote {output}", soft_wrap=True, markup=False, highlight=False)
    name = shlex.quote(os.fspath(output))
    console.print(
        f"Next: dpart partition profile.json --topology {name} -o plan.json",
        soft_wrap=True, markup=False, highlight=False,
    )  # fmt: skip


def _levels_table(word: str, topology: Topology) -> Table:
    table = _table(f"{word}: {topology.num_devices} devices")
    table.add_column("level")
    for column in ("members", "devices", "bandwidth", "latency"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("link")
    for number, (pool, own) in enumerate(zip(topology.pools, topology.ranges, strict=True)):
        where = f"pool {number}, " if topology.others else ""
        for level, size in zip(pool.levels, pool.group_sizes, strict=True):
            _level_row(table, f"{where}{level.name}", level, str(min(size, pool.num_devices)))
        if pool.missing:
            table.add_row(f"{where}last group", "", f"{pool.missing} fewer", "", "", "")
        if topology.others:
            table.add_row(f"{where}devices {own.start} to {own.stop - 1}", "", str(len(own)), "", "", "")
    if topology.between is not None:
        _level_row(table, "between pools", topology.between, str(topology.num_devices))
    return table


def _level_row(table: Table, name: str, level: Level, size: str) -> None:
    bandwidth = format_bandwidth(level.bandwidth_bytes_per_second)
    table.add_row(escape(name), str(level.count), size, bandwidth, format_seconds(level.latency_seconds), level.link)


def _devices_table(topology: Topology) -> Table:
    table = _table("Devices")
    table.add_column("device")
    for column in ("number", "memory", "its bandwidth", "float32", "bfloat16", "speed", "price an hour"):
        table.add_column(column, justify="right", no_wrap=True)
    for pool in topology.pools:
        device, kind = pool.device, _known(pool.device.name)
        table.add_row(
            escape(device.name),
            str(pool.num_devices),
            format_bytes(device.memory_bytes),
            format_bandwidth(kind.memory_bandwidth_bytes_per_second) if kind else "-",
            _teraflops(kind.flops.float32) if kind else "-",
            _teraflops(kind.flops.bfloat16) if kind and kind.flops.bfloat16 else "-",
            f"{device.speed:g}x",
            f"${device.price_dollars_per_hour:.2f}" if device.price_dollars_per_hour else "-",
        )
    return table


def _sources(word: str, topology: Topology) -> list[str]:
    """Where the figures are from: of the hosts that the word names, of the devices, and of the links."""
    parts = [part.strip().lower().replace("_", "-") for part in word.split("+")]
    hosts = [
        host for host in HOSTS.values() if any(re.fullmatch(rf"(\d+ *[x*] *)?{re.escape(host.name)}", p) for p in parts)
    ]
    lines = [f"Source of {host.name}: {host.source}." for host in hosts]
    kinds = [_known(pool.device.name) for pool in topology.pools]
    lines += [f"Source of {kind.name}: {kind.source}." for kind in kinds if kind is not None]
    words = [level.link for pool in topology.pools for level in pool.levels if level.link]
    types = [link_named(link).type for link in words]
    lines += [f"Source of {kind.name}: {kind.source}; its latency is assumed." for kind in types]
    return list(dict.fromkeys(lines))


def _hosts_table() -> Table:
    table = _table("Hosts")
    table.add_column("host")
    table.add_column("devices")
    for column in ("inside", "network", "price an hour"):
        table.add_column(column, justify="right", no_wrap=True)
    for host in HOSTS.values():
        table.add_row(
            host.name, f"{host.num_devices} x {host.device}", _inside(host), _rate(host.network),
            f"${host.price_dollars_per_hour:.2f}" if host.price_dollars_per_hour is not None else "-",
        )  # fmt: skip
    return table


def _inside(host: HostKind) -> str:
    return ", ".join(dict.fromkeys(_rate(word) for _, _, word in host.inside))


def _rate(word: str) -> str:
    return f"{word}, {format_bandwidth(link_named(word).bandwidth_bytes_per_second)}"


def _kinds_table() -> Table:
    table = _table("Devices; rates are of dense products")
    table.add_column("device")
    for column in ("memory", "its bandwidth", "float32", "bfloat16", "float8", "price an hour"):
        table.add_column(column, justify="right", no_wrap=True)
    for kind in DEVICES.values():
        flops = kind.flops
        table.add_row(
            kind.name,
            format_bytes(kind.memory_bytes),
            format_bandwidth(kind.memory_bandwidth_bytes_per_second),
            _teraflops(flops.float32),
            _teraflops(flops.bfloat16) if flops.bfloat16 else "-",
            _teraflops(flops.float8) if flops.float8 else "-",
            f"${kind.price_dollars_per_hour:.2f}" if kind.price_dollars_per_hour is not None else "-",
        )
    return table


def _links_table() -> Table:
    table = _table("Links, one way")
    table.add_column("link")
    for column in ("one", "a device or port", "latency"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for kind in LINKS.values():
        whole = kind.units * kind.unit_bytes_per_second
        table.add_row(
            kind.name, format_bandwidth(kind.unit_bytes_per_second), format_bandwidth(whole),
            format_seconds(kind.latency_seconds), kind.source,
        )  # fmt: skip
    return table


def _teraflops(rate: float) -> str:
    return f"{rate / 1e12:.3g} T" if rate < 1e15 else f"{rate / 1e12:,.0f} T"


def _known(name: str) -> DeviceKind | None:
    try:
        return device_kind(name)
    except UserError:
        return None


def _table(title: str) -> Table:
    return Table(
        title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _NARROWEST))
