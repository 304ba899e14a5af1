"""Piper's input files (msr-fiddle/piper, 2021): layers with variants per tensor-parallel degree, and their ideals."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class InputError(ValueError):
    """The file is not what this reader takes."""


@dataclass(frozen=True)
class Variants:
    """The layers at one tensor-parallel degree, the faster variant of each, and what its other variant changes.

    Attributes:
        present: [L]: whether a layer has this degree.
        seconds: [L]: forward and backward of one microbatch.
        parameter_bytes: [L].
        stash_bytes: [L]: memory per microbatch in flight.
        static_bytes: [L]: memory apart from these.
        extra_seconds: [L]: of the slower variant.
        saved_stash_bytes: [L]: with the slower variant; may be negative, as the next.
        saved_static_bytes: [L].
        entering_bytes: [E]: sent over an edge for the stage its head is in.
        leaving_bytes: [E]: likewise for its tail's.
    """

    present: Mask
    seconds: Vector
    parameter_bytes: Vector
    stash_bytes: Vector
    static_bytes: Vector
    extra_seconds: Vector
    saved_stash_bytes: Vector
    saved_static_bytes: Vector
    entering_bytes: Vector
    leaving_bytes: Vector


@dataclass(frozen=True)
class LayerGraph:
    """A file's contents, layers in topological order.

    Attributes:
        ids: In the file.
        place: [L]: the layer's place in the file, by which ties are broken.
        tail: [E]: layer an edge comes from.
        head: [E]: layer it goes to.
        degrees: Tensor-parallel degrees.
        variants: One per degree.
    """

    ids: tuple[int, ...]
    place: Integers
    tail: Integers
    head: Integers
    degrees: tuple[int, ...]
    variants: tuple[Variants, ...]

    def predecessors(self) -> list[list[int]]:
        """Of each layer, those it reads from."""
        before: list[list[int]] = [[] for _ in self.ids]
        for tail, head in zip(self.tail.tolist(), self.head.tolist(), strict=True):
            before[head].append(tail)
        return before


def read_graph(path: str, num_layers: int | None = None) -> LayerGraph:
    """Read a file; with `num_layers`, its repeated layer once more and again until there are so many.

    Raises:
        InputError: It is not such a file, or has something that this reader does not know.
        OSError: It cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
        nodes: dict[int, Any] = {int(node["id"]): node["TMPCs"] for node in raw["nodes"]}
        edges = {
            (int(edge["sourceId"]), int(edge["destId"])): float(edge["communicationCost"]) for edge in raw["edges"]
        }
        if len(nodes) < len(raw["nodes"]) or len(edges) < len(raw["edges"]):
            raise InputError("two nodes of the same id, or two edges between the same nodes")
        if num_layers is not None:
            _repeat(nodes, edges, {int(node["id"]): node["name"] for node in raw["nodes"]}, num_layers)
        return _tabulate(nodes, edges)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"no input of Piper: {type(error).__name__}: {error}") from error


def _repeat(nodes: dict[int, Any], edges: dict[tuple[int, int], float], names: dict[int, str], num_layers: int) -> None:
    """Copies of the last repeated layer that stands between two others, in a chain behind it.

    Only the chain's edges are copied: what else the layer reads, its copies do not.
    """
    name, count = Counter(names.values()).most_common(1)[0]
    if num_layers < count:
        raise InputError(f"--layers {num_layers}: the file has {count} layers {name!r} already")
    chain = {(u, v): cost for (u, v), cost in edges.items() if names[u] == names[v] == name}
    inner = [(u, v) for u, v in chain if any(head == u for _, head in chain)]
    if not inner:
        raise InputError(f"--layers {num_layers}: no layer {name!r} stands between two others")
    copied, after = max(inner, key=lambda edge: edge[1])
    before = next(u for u, v in chain if v == copied)
    fresh = max(nodes) + 1
    row = [copied, *range(fresh, fresh + num_layers - count), after]
    template, cost = nodes[copied], edges.pop((copied, after))
    for left, node, right in zip(row, row[1:], row[2:], strict=False):
        nodes[node] = {
            degree: [
                {
                    **variant,
                    "syncTimeFw": {str(left): variant["syncTimeFw"].get(str(before), 0.0)},
                    "syncTimeBw": {str(right): variant["syncTimeBw"].get(str(after), 0.0)},
                }
                for variant in variants
            ]
            for degree, variants in template.items()
        }
    _rename(nodes, copied, "syncTimeBw", after, row[1])
    _rename(nodes, after, "syncTimeFw", copied, row[-2])
    edges.update(dict.fromkeys(pairwise(row), cost))


def _rename(nodes: dict[int, Any], node: int, field: str, old: int, new: int) -> None:
    nodes[node] = {
        degree: [
            {**variant, field: {str(new) if k == str(old) else k: bytes_ for k, bytes_ in variant[field].items()}}
            for variant in variants
        ]
        for degree, variants in nodes[node].items()
    }


def _tabulate(nodes: dict[int, Any], edges: dict[tuple[int, int], float]) -> LayerGraph:
    order = _topological(list(nodes), list(edges))
    index = {node: layer for layer, node in enumerate(order)}
    place = {node: place for place, node in enumerate(nodes)}
    degrees = sorted({int(degree) for variants in nodes.values() for degree in variants})
    return LayerGraph(
        ids=tuple(order),
        place=np.array([place[node] for node in order], np.int64),
        tail=np.array([index[u] for u, _ in edges], np.int64),
        head=np.array([index[v] for _, v in edges], np.int64),
        degrees=tuple(degrees),
        variants=tuple(_variants(nodes, order, edges, str(degree)) for degree in degrees),
    )


def _variants(nodes: dict[int, Any], order: list[int], edges: dict[tuple[int, int], float], degree: str) -> Variants:
    rows, sync_in, sync_out = [], {}, {}
    for node in order:
        variants = sorted(nodes[node].get(degree, []), key=lambda variant: float(variant["timePerSample"]))
        if not variants:
            rows.append([0.0] * 8)
            continue
        fast, slow = variants[0], variants[-1]
        if len(variants) > 2:
            raise InputError(f"node {node}, degree {degree}: {len(variants)} variants, at most 2 are known")
        for field in ("parameterSize", "syncTimeFw", "syncTimeBw"):
            if fast[field] != slow[field]:
                raise InputError(f"node {node}, degree {degree}: variants of different {field}")
        sync_in[node], sync_out[node] = fast["syncTimeFw"], fast["syncTimeBw"]
        time, stash, static = (
            (float(fast[field]), float(slow[field])) for field in ("timePerSample", "memoryUsageA", "memoryUsageB")
        )
        rows.append([1.0, time[0], float(fast["parameterSize"]), stash[0], static[0],
                     time[1] - time[0], stash[0] - stash[1], static[0] - static[1]])  # fmt: skip
    columns = np.array(rows, np.float64).reshape(len(order), 8).T
    entering = [cost + float(sync_in.get(v, {}).get(str(u), 0.0)) for (u, v), cost in edges.items()]
    leaving = [cost + float(sync_out.get(u, {}).get(str(v), 0.0)) for (u, v), cost in edges.items()]
    return Variants(
        columns[0] > 0, columns[1], columns[2], columns[3], columns[4], columns[5], columns[6], columns[7],
        np.array(entering, np.float64), np.array(leaving, np.float64),
    )  # fmt: skip


def _topological(nodes: list[int], edges: list[tuple[int, int]]) -> list[int]:
    waiting = Counter(v for _, v in edges)
    followers: dict[int, list[int]] = {node: [] for node in nodes}
    for u, v in edges:
        followers[u].append(v)
    ready = [node for node in nodes if not waiting[node]]
    for node in ready:
        for follower in followers[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    if len(ready) < len(nodes):
        raise InputError("the graph has a cycle")
    return ready


def list_ideals(predecessors: Sequence[Sequence[int]], max_ideals: int) -> Mask | None:
    """[S, L]: all sets of layers closed under predecessors, by size; None if there are more than `max_ideals`."""
    needs = [sum(1 << p for p in set(before)) for before in predecessors]
    generation, found = {0}, [0]
    while generation:
        grown = set()
        for ideal in generation:
            for layer, need in enumerate(needs):
                if not ideal >> layer & 1 and not need & ~ideal:
                    grown.add(ideal | 1 << layer)
        found.extend(sorted(grown))
        if len(found) > max_ideals:
            return None
        generation = grown
    width = (len(needs) + 7) // 8
    packed = np.frombuffer(b"".join(ideal.to_bytes(width, "little") for ideal in found), np.uint8)
    bits = np.unpackbits(packed.reshape(-1, width), axis=1, count=len(needs), bitorder="little")
    return bits.astype(np.bool_)


def nested_pairs(member: Mask, starts: Integers) -> Iterator[tuple[Integers, Integers]]:
    """Blocks of (start, stop): ideals that hold all layers of another one, and more."""
    padded = np.packbits(member, axis=1)
    words = np.zeros((len(member), -(-padded.shape[1] // 8) * 8), np.uint8)
    words[:, : padded.shape[1]] = padded
    bits = words.view(np.uint64)
    size = member.sum(axis=1)
    block = max(1, (1 << 22) // len(member))
    for begin in range(0, len(starts), block):
        some = starts[begin : begin + block]
        first = int(some.min()) + 1
        inside = size[some][:, None] < size[None, first:]
        for word in range(bits.shape[1]):
            inside &= (bits[some, word][:, None] & ~bits[first:, word][None, :]) == 0
        row, column = np.nonzero(inside)
        yield some[row], column + first
