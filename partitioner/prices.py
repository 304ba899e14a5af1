"""What every stage costs in every way it can run: the cost model applied to all pairs of states at once.

A *segment* is a pair (start, stop) of nested states. Segments of equal cost have one *signature*, and only
signatures are priced: 126 equal blocks have some 500 where there are 8,128 segments. For a tensor-parallel degree,
a way of sharding, a number of replicas and a number of microbatches in flight it is known how many bytes are short,
and with that the cheapest choice of what to recompute::

    in flight        1      2      3      4
    short, GiB       -      -      4     12          recompute the cheapest regions that save as much
    again            0 ms   0 ms   4 ms  12 ms
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpart.partitioner.contraction import Contraction
from dpart.partitioner.cost import Place, Terms, best_place, forward_seconds, memory, stage_seconds, transfer_seconds
from dpart.partitioner.crossings import Edges, chained, edges, joint
from dpart.partitioner.evaluate import StageShape
from dpart.partitioner.options import Floats, Integers
from dpart.partitioner.quantities import Quantities, layer_costs, measure
from dpart.partitioner.recompute import Choices, Classes, Regions, choices, kept_bytes
from dpart.partitioner.topology import Level, Topology
from dpart.profiler.profile import Profile

_CHOICES = 1 << 32
_KEPT = 48
"""Tables of prices that are remembered: those of a few numbers of replicas."""

_BYTES = 1 << 44
"""More than any stage saves of one microbatch: 16 TiB."""


@dataclass(frozen=True)
class Freedom:
    """What a search may decide besides the cuts.

    Attributes:
        degrees: Tensor-parallel degrees.
        shardings: Stages of ZeRO; 0 is none.
        recompute: Whether it may recompute.
    """

    degrees: tuple[int, ...] = (1,)
    shardings: tuple[int, ...] = (0,)
    recompute: bool = False


@dataclass(frozen=True)
class Priced:
    """One degree, one sharding and one number of replicas: [N, G], for n = 1, 2, ... in flight and each signature.

    Attributes:
        latency_seconds: Infinite where the stage does not fit; never decreasing with n.
        busy_seconds: The same.
        choice: What is recomputed: ``row * CHOICES + place in the row``; -1 where the stage does not fit.
        pool: Where the stage stands.
        crossing: Whether what it receives comes from another pool.
    """

    degree: int
    sharding: int
    num_replicas: int
    latency_seconds: Floats
    busy_seconds: Floats
    choice: Integers
    pool: int = 0
    crossing: bool = False


@dataclass(frozen=True)
class Work:
    """What has to be computed for one microbatch, whatever the plan.

    Attributes:
        device_seconds: Of all layers, each at the degree that takes the least time of all its ranks together; on
            devices of the first pool.
        path_seconds: Of all layers, each where and at the degree at which it is fastest; 0 without a flush.
        largest_seconds: Of the largest layer at its fastest.
    """

    device_seconds: float
    path_seconds: float
    largest_seconds: float


@dataclass(frozen=True)
class _Rows:
    """The rows of choices of one degree under one room, one after the other.

    Attributes:
        room_bytes: The largest region of these rows needs it; 0 for the rows that recompute nothing.
        concerned: [G]: signatures that have such a region; rows with less room are as good for the others.
        choices: The distinct rows.
        of_signature: [G]: the row of each signature.
        first: [R]: where each row begins.
        keys: Every entry's saved bytes, behind its row's number in the higher bits.
        again_seconds: Of every entry, then one that is infinite.
    """

    room_bytes: float
    concerned: npt.NDArray[np.bool_]
    choices: tuple[Choices, ...]
    of_signature: Integers
    first: Integers
    keys: Integers
    again_seconds: Floats

    def place(self, wanted_bytes: Floats, signature: npt.NDArray[np.intp]) -> Integers:
        """The signatures' first entries that save as much; the infinite one where none does."""
        rows = self.of_signature[signature]
        wanted = np.clip(wanted_bytes, 0, _BYTES - 1).astype(np.int64) + rows * _BYTES
        found = np.searchsorted(self.keys, wanted)
        beyond = np.append(self.first[1:], len(self.keys))[rows]
        return np.where(found < beyond, found, len(self.keys)).astype(np.int64)


class Prices:
    """Prices of all segments of one model on the devices of one pool.

    Attributes:
        degrees: Tensor-parallel degrees that the pool's hosts hold.
        pools: Of every pool those of it alone. Of unlike devices, the prices of the first pool stand for all.
    """

    def __init__(
        self,
        profile: Profile,
        contraction: Contraction,
        topology: Topology,
        terms: Terms,
        freedom: Freedom,
        *,
        is_outermost: bool = False,
        pool: int = 0,
    ) -> None:
        """
        Args:
            profile: Folded, so that equal layers have equal costs.
            is_outermost: Take what stages exchange to cross the outermost level always, not only where it must.
            pool: Of the topology.
        """
        self.profile, self.contraction, self.topology = profile, contraction, topology.alone(pool)
        self.pool, self._between, self._is_outermost = pool, topology.between, is_outermost
        self.terms, self.allowed = terms.of_pool(pool), freedom
        self.degrees = freedom.degrees if topology.between is None else topology.pools[pool].degrees(freedom.degrees)
        # A pool whose hosts hold none of the degrees has prices that nobody asks for.
        self.freedom = freedom = replace(freedom, degrees=self.degrees or (1,))
        member = contraction.member
        sizes = member.sum(axis=1)
        shared = member.astype(np.float32) @ member.astype(np.float32).T
        nested = (shared == sizes[:, None]) & (sizes[:, None] < sizes[None, :])
        self.start, self.stop = (index.astype(np.int64) for index in np.nonzero(nested))
        quantities = {t: measure(profile, member, t) for t in freedom.degrees}
        self.regions = {t: self._regions(t) for t in freedom.degrees}
        self.classes = {t: Classes(r) for t, r in self.regions.items()}
        counts = {t: self._counts(t) for t in freedom.degrees}
        self.signature, first = self._signatures(quantities, counts)
        self.least_seconds = self._in_order(quantities, first)
        first = first[self._order]
        self._quantities = {t: _at(q, self.start[first], self.stop[first]) for t, q in quantities.items()}
        self._counts_of = {t: c[first] for t, c in counts.items()}
        self._priced: dict[tuple[int, int, int, int, int, bool, int], Priced] = {}
        self.pools: tuple[Prices, ...] = (self,)
        if len(topology.pools) > 1 and pool == 0:
            alone = copy(self)
            alone.pools = (alone,)
            rest = (
                Prices(profile, contraction, topology, terms, self.allowed, is_outermost=is_outermost, pool=p)
                for p in range(1, len(topology.pools))
            )
            self.pools = (alone, *rest)

    @property
    def num_states(self) -> int:
        """States of the contracted graph."""
        return len(self.contraction.member)

    @property
    def num_signatures(self) -> int:
        """Segments that cost different things."""
        return len(self._counts_of[self.freedom.degrees[0]])

    def taken(self, degree: int, choice: int) -> npt.NDArray[np.int64]:
        """[C]: how many regions of each class a choice recomputes."""
        table, place = divmod(choice, _CHOICES)
        rows = self._rows[degree][table]
        row = int(np.searchsorted(rows.first, place, side="right")) - 1
        taken: npt.NDArray[np.int64] = rows.choices[row].counts[place - int(rows.first[row])]
        return taken

    def shardings(self, num_replicas: int) -> tuple[int, ...]:
        """Those worth a look: state that is shared out costs no time, so none is never better."""
        allowed = self.freedom.shardings
        if num_replicas == 1 or max(allowed) == 0:
            return (min(allowed),)
        return tuple(z for z in allowed if z or 1 not in allowed)

    def within(self, limit_seconds: float, num_replicas: int) -> int:
        """How many signatures, the first ones, can keep a device busy for no longer: no others can be needed."""
        own = self.terms.own_microbatches(num_replicas)
        return int(np.searchsorted((own - 1) * self.least_seconds, limit_seconds * (1 + 1e-12), side="right"))

    def budgets(self, num_devices: int) -> tuple[int, ...]:
        """Devices of each pool that a plan may use, so many in all."""
        if len(self.pools) == 1:
            return (num_devices,)
        sizes = tuple(prices.topology.num_devices for prices in self.pools)
        assert sum(sizes) == num_devices, f"{num_devices} of {sum(sizes)} unlike devices"
        return sizes

    def ways(
        self,
        num_replicas: int,
        depth: int,
        num_devices: int,
        *,
        degrees: Sequence[int] | None = None,
        limit_seconds: float = np.inf,
        sharers: int | None = None,
    ) -> list[Priced]:
        """All ways to run a stage on so many replicas that the devices allow, pool by pool.

        Args:
            sharers: Replicas that share state out; None for all there are. More: what all numbers of replicas up to
                that have in common, at the least.
            degrees: Of tensor parallelism; None for all.
            limit_seconds: Signatures that keep a device busy for longer in any of these ways may be left out.
        """
        found = []
        for prices, most in zip(self.pools, self.budgets(num_devices), strict=True):
            count = prices.within(limit_seconds, num_replicas)
            chosen = [t for t in prices.degrees if t * num_replicas <= most and (degrees is None or t in degrees)]
            found += [
                prices.price(t, sharding, num_replicas, depth, count, crossing=crossing, sharers=sharers)
                for crossing in ((False,) if len(self.pools) == 1 else (False, True))
                for t in chosen
                for sharding in prices.shardings(num_replicas)
            ]
        return found

    @cached_property
    def edges(self) -> Edges:
        """All segments in all pools."""
        start, stop, several = self.start, self.stop, len(self.pools) > 1
        known = chained(self.profile.graph, self.contraction.member, start, stop) if several else np.zeros(0, np.bool_)
        return edges(start, stop, self.num_states, len(self.pools), known, bound=not self._is_outermost)

    @cached_property
    def joint(self) -> tuple[npt.NDArray[np.intp], list[npt.NDArray[np.intp]]]:
        """One signature of each segment for all pools, and for each pool its own one of each of those."""
        return joint([prices.signature for prices in self.pools])

    def price(
        self,
        degree: int,
        sharding: int,
        num_replicas: int,
        depth: int,
        num_signatures: int | None = None,
        *,
        crossing: bool = False,
        sharers: int | None = None,
    ) -> Priced:
        """Signatures, all or the first so many, run so, with up to `depth` microbatches in flight.

        Args:
            crossing: Whether what they receive comes from another pool.
            sharers: Replicas that share state out; None for all there are.
        """
        count = self.num_signatures if num_signatures is None else num_signatures
        key = (degree, sharding, num_replicas, depth, count, crossing, sharers or num_replicas)
        if key not in self._priced:
            while len(self._priced) >= _KEPT:
                del self._priced[next(iter(self._priced))]
            self._priced[key] = self._price(*key)
        return self._priced[key]

    def _price(
        self, degree: int, sharding: int, num_replicas: int, depth: int, count: int, crossing: bool, sharers: int
    ) -> Priced:
        q, terms = _first(self._quantities[degree], count), self.terms
        if crossing and terms.is_synchronous:
            same = self.price(degree, sharding, num_replicas, depth, count)
            near, far = (self._place(degree, num_replicas, crosses).incoming for crosses in (False, True))
            more = transfer_seconds(q.received_bytes, q.returned_bytes, far)
            more = more - transfer_seconds(q.received_bytes, q.returned_bytes, near)
            busy = same.busy_seconds + (terms.own_microbatches(num_replicas) - 1) * more
            return replace(same, latency_seconds=same.latency_seconds + more, busy_seconds=busy, crossing=True)
        own = terms.own_microbatches(num_replicas)
        behind = np.ceil(terms.warm_up_depth * np.arange(depth)).astype(np.int64)
        held = np.full((1, 1), own) if terms.schedule == "gpipe" else np.minimum(1 + behind, own)[:, None]
        static = memory(q, terms, 0, num_replicas=sharers, sharding=sharding).total_bytes
        # Bytes are whole numbers, but their sums over a tensor-parallel group need not be; half a byte is none.
        short = held * (q.stash_bytes + q.received_bytes) + static - terms.memory_limit_bytes - 0.5
        if not terms.is_synchronous:
            short = short + (terms.weight_versions(held) - terms.weight_versions(0)) * q.parameter_bytes
        again = np.where(short <= 0, 0.0, np.inf)
        choice = np.where(short <= 0, self._nothing(degree)[:count], -1)
        if self.freedom.recompute and (lacking := np.nonzero(short > 0))[0].size:
            again[lacking], choice[lacking] = self._recomputed(degree, lacking, short, held)
        fits = np.isfinite(again)
        seconds = stage_seconds(
            q,
            terms,
            self.topology.ring_levels,
            self._place(degree, num_replicas, crossing),
            num_replicas=num_replicas,
            sharding=sharding,
            device=self.topology.device,
            again_seconds=np.where(fits, again, 0.0),
        )
        latency = np.where(fits, seconds.path_seconds(terms), np.inf)
        busy = np.where(fits, seconds.busy_seconds(terms, num_replicas), np.inf)
        shape = (depth, count)
        chosen = np.where(fits, choice, -1)
        latency, busy, chosen = (np.broadcast_to(values, shape) for values in (latency, busy, chosen))
        return Priced(degree, sharding, num_replicas, latency, busy, chosen, self.pool, crossing)

    @cached_property
    def work(self) -> Work:
        """Computation alone: no collective, no transfer."""
        costs = [layer_costs(self.profile, t) for t in self.allowed.degrees]
        seconds = np.array([c.forward_seconds + c.backward_seconds for c in costs])
        least = seconds.min(axis=0) / max(prices.topology.device.speed for prices in self.pools)
        ranks = np.array(self.allowed.degrees)[:, None] / self.topology.device.speed
        path = float(least.sum()) if self.terms.is_synchronous else 0.0
        return Work(float((ranks * seconds).min(axis=0).sum()), path, float(least.max()))

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of a device of each pool, against one of the first."""
        return tuple(prices.topology.device.speed / self.topology.device.speed for prices in self.pools)

    def power(self, num_devices: int) -> float:
        """So many devices of all pools, by their speeds, counted in devices of the first pool."""
        if len(self.pools) == 1:
            return num_devices
        return sum(speed * count for speed, count in zip(self.speeds, self.budgets(num_devices), strict=True))

    def _nothing(self, degree: int) -> Integers:
        """[G]: the choice that recomputes nothing."""
        rows = self._rows[degree][0]
        return rows.first[rows.of_signature]

    def _recomputed(
        self, degree: int, lacking: tuple[npt.NDArray[np.intp], ...], short: Floats, held: Integers
    ) -> tuple[Floats, Integers]:
        """For some (n, signature) that are short of memory: the cheapest choice that makes up for it."""
        bytes_short, microbatches = short[lacking], held[lacking[0], 0]
        again, choice = np.full(len(bytes_short), np.inf), np.full(len(bytes_short), -1)
        for number, rows in enumerate(self._rows[degree]):
            here = np.flatnonzero(rows.concerned[lacking[1]])
            if rows.room_bytes and len(here):
                wanted = np.ceil((bytes_short[here] + rows.room_bytes) / microbatches[here])
                place = rows.place(wanted, lacking[1][here])
                seconds = rows.again_seconds[place]
                better = seconds < again[here]
                again[here] = np.where(better, seconds, again[here])
                choice[here] = np.where(better, number * _CHOICES + place, choice[here])
        return again, choice

    @cached_property
    def _rows(self) -> dict[int, list[_Rows]]:
        """Per degree: rows that recompute nothing, then those of every room, if recomputing is allowed."""
        found: dict[int, list[_Rows]] = {}
        for t in self.freedom.degrees:
            counts, rooms = self._counts_of[t], self.classes[t].room_bytes
            found[t] = [_rows(self.classes[t], 0 * counts, 0.0)]
            if self.freedom.recompute:
                for room in np.unique(rooms):
                    found[t].append(_rows(self.classes[t], counts * (rooms <= room), float(room)))
        return found

    def _in_order(self, quantities: dict[int, Quantities], first: npt.NDArray[np.intp]) -> Floats:
        """Renumbers the signatures by the least they compute; what that is."""
        start, stop = self.start[first], self.stop[first]
        seconds = [(q.forward_seconds + q.backward_seconds)[start, stop] for q in quantities.values()]
        least = np.minimum.reduce(seconds) / self.topology.device.speed
        self._order = np.argsort(least, kind="stable")
        rank = np.empty_like(self._order)
        rank[self._order] = np.arange(len(rank))
        self.signature = rank[self.signature]
        in_order: Floats = least[self._order]
        return in_order

    def _regions(self, degree: int) -> Regions:
        units = self.contraction.units
        costs = layer_costs(self.profile, degree)
        place = best_place(self.topology, degree, 1)
        seconds = forward_seconds(costs, self.topology.ring_levels, place, self.topology.device)
        stash = units @ costs.stash_bytes
        saved = np.maximum(stash - kept_bytes(self.profile.graph, units), 0.0)
        return Regions(units, units @ seconds, saved, stash)

    def _place(self, degree: int, num_replicas: int, crossing: bool) -> Place:
        place = best_place(self.topology, degree, num_replicas)
        if crossing:
            assert self._between is not None, "there are several pools"
            return replace(place, incoming=self._between)
        if self._is_outermost:
            return replace(place, incoming=self.topology.levels[-1])
        return place if self._between is None else replace(place, incoming=_better(place.incoming, self._between))

    def _counts(self, degree: int) -> Integers:
        """[E, C]: regions of each class in each segment."""
        inside = self._units_in_states
        per_state = self.classes[degree].counts(inside)
        return per_state[self.stop] - per_state[self.start]

    @cached_property
    def _units_in_states(self) -> npt.NDArray[np.bool_]:
        """[S, R]: units all of whose layers are in the state; a state has all layers of a unit or none."""
        first = self.contraction.units.argmax(axis=1)
        return self.contraction.member[:, first]

    def _signatures(
        self, quantities: dict[int, Quantities], counts: dict[int, Integers]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """[E] the signature of each segment, and [G] one segment of each: equal to 11 digits of the largest."""
        columns: list[Floats] = []
        for t, q in quantities.items():
            for f in fields(q):
                values = getattr(q, f.name)[self.start, self.stop]
                largest = float(np.abs(values).max(initial=0.0))
                columns.append(np.round(values / largest * 1e11) if largest else values)
            columns += [column.astype(np.float64) for column in counts[t].T]
        keys = np.stack(columns, axis=1)
        weights = np.random.default_rng(0).integers(1, 2**62, keys.shape[1], dtype=np.int64) | 1
        with np.errstate(over="ignore"):
            digest = (keys.astype(np.int64) * weights).sum(axis=1)
        _, first, signature = np.unique(digest, return_index=True, return_inverse=True)
        assert (keys[first][signature] == keys).all(), "two signatures with one digest"
        return signature.ravel(), first


def stage_shape(prices: Prices, segment: int, priced: Priced, in_flight: int) -> StageShape:
    """A stage by the names of its layers; of equal regions the first ones are recomputed."""
    prices = prices.pools[priced.pool - prices.pool]
    units, names = prices.contraction.units, [layer.name for layer in prices.profile.graph.layers]
    inside = prices.contraction.member[prices.stop[segment]] & ~prices.contraction.member[prices.start[segment]]
    where = (in_flight - 1, int(prices.signature[segment]))
    priced = _needed(prices, priced, where)
    taken = prices.taken(priced.degree, int(priced.choice[where]))
    regions: list[list[int]] = []
    for members, count in zip(prices.classes[priced.degree].members, taken.tolist(), strict=True):
        here = [np.flatnonzero(units[r]).tolist() for r in members if inside[units[r]].all()]
        regions += here[:count]
    return StageShape(
        layers=tuple(names[i] for i in np.flatnonzero(inside)),
        num_replicas=priced.num_replicas,
        degree=priced.degree,
        sharding=priced.sharding,
        recompute=tuple(tuple(names[i] for i in region) for region in sorted(regions)),
        pool=priced.pool,
    )


def _needed(prices: Prices, priced: Priced, where: tuple[int, int]) -> Priced:
    """Sharding the optimizer's state costs no time in this model, but gains nothing where it is as fast without."""
    if priced.sharding != 1 or 0 not in prices.freedom.shardings:
        return priced
    without = prices.price(priced.degree, 0, priced.num_replicas, *priced.choice.shape)
    return without if without.latency_seconds[where] <= priced.latency_seconds[where] else priced


def _rows(classes: Classes, counts: Integers, room: float) -> _Rows:
    distinct, of_signature = np.unique(counts, axis=0, return_inverse=True)
    found = tuple(choices(classes, row) for row in distinct.tolist())
    lengths = [len(row.saved_bytes) for row in found]
    row = np.repeat(np.arange(len(found)), lengths)
    saved = np.floor(np.concatenate([r.saved_bytes for r in found])).astype(np.int64)
    return _Rows(
        room_bytes=room,
        concerned=np.asarray((counts[:, classes.room_bytes == room] > 0).any(axis=1), dtype=np.bool_),
        choices=found,
        of_signature=of_signature.ravel().astype(np.int64),
        first=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
        keys=row * _BYTES + saved,
        again_seconds=np.concatenate([*(r.again_seconds for r in found), [np.inf]]),
    )


def _better(level: Level, other: Level) -> Level:
    """A link that is as fast as the faster of the two in each respect."""
    return Level(
        level.name,
        level.count,
        max(level.bandwidth_bytes_per_second, other.bandwidth_bytes_per_second),
        min(level.latency_seconds, other.latency_seconds),
    )


def _first(q: Quantities, count: int) -> Quantities:
    return Quantities(*(getattr(q, f.name)[:, :count] for f in fields(q)))


def _at(q: Quantities, start: Integers, stop: Integers) -> Quantities:
    """The quantities of some segments, as rows of one."""
    return Quantities(*(getattr(q, f.name)[start, stop][None, :] for f in fields(q)))
