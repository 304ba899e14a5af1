"""``dpart topology measure``: latency and bandwidth between the ranks of torchrun, by ping-pong.

One rank sends, the other sends back; half of a round trip is one way. Small messages give the latency, large ones
the bandwidth. Inside a host every pair is timed alone, and the slowest counts; between hosts all ranks of one host
send to their fellows at the same time, as the bandwidth of a host is what it sends over all its ports::

    host a: 0 1 2 3        inside:  0-1, 0-2, 0-3, 1-2, ... one after the other
            | | | |
    host b: 4 5 6 7        between: 0-4, 1-5, 2-6, 3-7 together
"""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, groupby, pairwise
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from dpart.partitioner.pools import Device, Level, Pool
from dpart.partitioner.topology import Topology, joined, topology_text
from dpart.partitioner.units import format_bandwidth
from dpart.profiler.devices import device_kind
from dpart.runtime.errors import PeerError, UserError
from dpart.runtime.files import refuse_existing, write_text

_SMALL_BYTES, _SMALL_REPEATS = 8, 50
_LARGE_BYTES = {"gloo": 16 * 2**20, "nccl": 128 * 2**20}
_LARGE_REPEATS = 4
_ROUNDS = 5
_MOST_PAIRS = 28
_MOST_HOSTS = 4
_TIMEOUT = timedelta(minutes=2)
_COMMAND = "torchrun --standalone --nproc-per-node 2 -m dpart.cli topology measure -o topology.yaml"


@dataclass(frozen=True)
class Host:
    """The ranks on one machine."""

    ranks: tuple[int, ...]
    device: Device


@dataclass(frozen=True)
class Measured:
    """A link between members, as it was found."""

    bandwidth_bytes_per_second: float
    latency_seconds: float

    def level(self, name: str, count: int) -> Level:
        """So many members joined by it."""
        return Level(name, count, float(f"{self.bandwidth_bytes_per_second:.4g}"), float(f"{self.latency_seconds:.4g}"))


def measure(output: Path, *, force: bool) -> None:
    """Measures under torchrun; rank 0 writes the topology file.

    Raises:
        UserError: This is not one of several ranks of torchrun, or the file exists.
        PeerError: Another rank failed or went away.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UserError(f"only torchrun's processes have links to measure: run `{_COMMAND}`.")
    if os.environ["WORLD_SIZE"] == "1":
        raise UserError(f"one process has no link: run two at least, `{_COMMAND}`.")
    try:
        if os.environ["RANK"] == "0":
            refuse_existing(output, force=force)  # Torchrun ends the ranks that wait for this one.
        backend = _join()
        topology, comments = _measure(backend)
        if dist.get_rank() == 0:
            write_text(topology_text(topology, comments), output, force=force)
            click.echo("\n".join(comments))
            click.echo(f"{topology}\n\nWrote {output}\nNext: dpart topology show {output}")
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        raise PeerError(f"rank {os.environ['RANK']}: measuring failed: {str(error).splitlines()[0]}") from error


def _join() -> str:
    backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    local, on_host = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend == "nccl" and on_host > torch.cuda.device_count():
        backend = "gloo"
    if backend == "nccl":
        torch.cuda.set_device(local)
    dist.init_process_group(backend, timeout=_TIMEOUT)
    return backend


def _measure(backend: str) -> tuple[Topology, tuple[str, ...]]:
    hosts = _hosts(backend)
    runs = [tuple(run) for _, run in groupby(hosts, key=lambda host: (len(host.ranks), host.device))]
    inside = [list(combinations(run[0].ranks, 2))[:_MOST_PAIRS] for run in runs]
    across = [list(zip(a.ranks, b.ranks, strict=False)) for a, b in pairwise(hosts[:_MOST_HOSTS])]
    timed = [[(pair,) for pair in pairs] for pairs in inside] + [[tuple(pairs)] for pairs in across]
    with _bar(sum(map(len, timed))) as bar:
        found = [[_link(pairs, backend, bar) for pairs in group] for group in timed]
    ranks = dist.get_world_size()
    comments = [f"Measured with {backend} between {ranks} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}."]
    for name, links in (("inside a host", found[: len(runs)]), ("between hosts", found[len(runs) :])):
        speeds = [link.bandwidth_bytes_per_second for group in links for link in group]
        if speeds:
            spread = f" (the fastest: {format_bandwidth(max(speeds))})" if len(speeds) > 1 else ""
            comments.append(f"Slowest bandwidth {name}: {format_bandwidth(min(speeds))}{spread}.")
    network = _slowest([link for group in found[len(runs) :] for link in group])
    if _ends_in_a_smaller_host(runs):
        whole = _pool([*runs[0], runs[0][0]], _slowest(found[0]), network)
        return _topology([whole.first(ranks)], network), tuple(comments)
    pools = [_pool(run, _slowest(links), network) for run, links in zip(runs, found, strict=False)]
    return _topology(pools, network), tuple(comments)


def _ends_in_a_smaller_host(runs: Sequence[Sequence[Host]]) -> bool:
    if len(runs) != 2 or len(runs[1]) > 1:
        return False
    first, last = runs[0][0], runs[1][0]
    return first.device == last.device and len(first.ranks) > len(last.ranks)


def _hosts(backend: str) -> list[Host]:
    """The machines in the order of their first ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (socket.gethostname(), _device(backend)))
    names, hosts = [], []
    for name, run in groupby(enumerate(told), key=lambda one: one[1][0]):
        members = list(run)
        least = min((device for _, (_, device) in members), key=lambda device: device.memory_bytes)
        names.append(name)
        hosts.append(Host(tuple(rank for rank, _ in members), least))
    if len(set(names)) < len(names):
        raise UserError(f"the ranks of a host are no neighbours: they stand on {', '.join(names)}; start them by host.")
    return hosts


def _device(backend: str) -> Device:
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend == "nccl":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, memory = properties.name, properties.total_memory
    else:
        name = "CPU core"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // on_host
    try:
        price = device_kind(name).price_dollars_per_hour or 0.0
    except UserError:
        price = 0.0
    return Device(name, memory, price)


def _link(pairs: Sequence[tuple[int, int]], backend: str, bar: Any) -> Measured:
    """Of all these pairs together, timed at the same time; every rank calls this."""
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8, device=device)
    large = torch.zeros(_LARGE_BYTES[backend], dtype=torch.uint8, device=device)
    latency = _one_way_seconds(pairs, small, _SMALL_REPEATS)
    seconds = _one_way_seconds(pairs, large, _LARGE_REPEATS)
    bar.update()
    # A large message takes longer than a small one, but for noise.
    carrying = max(seconds - latency, seconds / 10)
    return Measured(len(pairs) * large.numel() / carrying, latency)


def _one_way_seconds(pairs: Sequence[tuple[int, int]], message: Tensor, repeats: int) -> float:
    """Half a round trip of the slowest pair in the quickest round: what else the machine does only adds time."""
    peers = [b if a == dist.get_rank() else a for a, b in pairs if dist.get_rank() in (a, b)]
    first = any(a == dist.get_rank() for a, _ in pairs)
    own = []
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        _wait(message)
        began = time.perf_counter()
        for _ in range(repeats if peers else 0):
            _ping(message, peers[0]) if first else _pong(message, peers[0])
        _wait(message)
        own.append((time.perf_counter() - began) / (2 * repeats))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own if peers else None)
    # The first round opens connections.
    return float(min(max(rounds) for rounds in zip(*(t[1:] for t in told if t is not None), strict=True)))


def _ping(message: Tensor, peer: int) -> None:
    dist.send(message, peer)
    dist.recv(message, peer)


def _pong(message: Tensor, peer: int) -> None:
    dist.recv(message, peer)
    dist.send(message, peer)


def _wait(message: Tensor) -> None:
    if message.is_cuda:
        torch.cuda.synchronize(message.device)


def _slowest(links: Sequence[Measured]) -> Measured | None:
    if not links:
        return None
    return Measured(min(link.bandwidth_bytes_per_second for link in links), max(link.latency_seconds for link in links))


def _pool(run: Sequence[Host], inside: Measured | None, network: Measured | None) -> Pool:
    """Equal hosts one after the other."""
    levels = [] if inside is None else [inside.level("host", len(run[0].ranks))]
    if network is not None and (len(run) > 1 or not levels):
        levels.append(network.level("cluster", len(run)))
    return Pool(run[0].device, tuple(levels))


def _topology(pools: Sequence[Pool], network: Measured | None) -> Topology:
    parts = [Topology(pool.device, pool.levels, missing=pool.missing) for pool in pools]
    if len(parts) == 1:
        return parts[0]
    assert network is not None, "several runs of hosts are several hosts"
    return joined(parts, network.level("pools", len(parts)))


def _bar(total: int) -> Any:
    """Shown by rank 0, and only where a person looks."""
    return tqdm(total=total, desc="measuring links", unit="link", disable=None if dist.get_rank() == 0 else True)
