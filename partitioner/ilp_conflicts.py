"""Which of the user's constraints cannot hold together, where no plan fits.

One after the other every constraint is left out for good if still no plan fits without it (deletion filtering). What
remains is a smallest set: each of its constraints is needed for the conflict::

    memory limit    at most 2 stages    no recomputation    8 devices    l3 in stage 0       no plan
    memory limit    at most 2 stages    no recomputation        -        l3 in stage 0       no plan
    memory limit    at most 2 stages    no recomputation        -              -             no plan
         -          at most 2 stages    no recomputation        -              -             a plan fits: needed

Whether any plan fits is asked of the search for equal replicas first, which is quick for any number of devices, and
then of a search for the fewest devices, with replicas that differ. Where neither can tell, a constraint is kept.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dpart.partitioner import dp, uneven
from dpart.partitioner.ilp_arcs import Arcs, arcs, relaxed
from dpart.partitioner.ilp_narrow import Asked
from dpart.partitioner.ilp_options import check_size, pinned
from dpart.partitioner.ilp_solver import SolverError
from dpart.partitioner.pareto import Column
from dpart.partitioner.prices import Prices
from dpart.partitioner.setting import Setting
from dpart.partitioner.sorted_options import SortedOptions
from dpart.partitioner.topology import Topology
from dpart.partitioner.units import format_bytes
from dpart.partitioner.unlike import allowed_degrees

_NO_LIMIT = 1 << 50
_MANY = 256
"""Devices that stand for any number of them; or four times as many as there are, if that is more."""

_MAX_ARCS = 20_000_000

_Relax = Callable[[Setting], Setting]


@dataclass(frozen=True)
class Conflict:
    """Constraints that cannot hold together.

    Attributes:
        constraints: In words.
        minimal: Whether each of them is known to be needed for the conflict.
        cures: Those of them of which each alone is known to be enough to leave out for some plan to fit.
    """

    constraints: tuple[str, ...]
    minimal: bool
    cures: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """For people."""
        listed = "; ".join(self.constraints)
        if len(self.constraints) == 1:
            said = f"This cannot hold for any plan: {listed}."
        elif self.minimal:
            said = f"These cannot hold together: {listed}."
        else:
            said = f"These, or some of them, cannot hold together: {listed}."
        if len(self.constraints) == 1 or not self.cures:
            return said
        which = "any one of them" if len(self.cures) == len(self.constraints) else " or ".join(self.cures)
        return f"{said} Without {which} there are plans."


@dataclass(frozen=True)
class _Constraint:
    words: str
    relaxed: _Relax


def conflict(made: Setting, *, equal: bool = False, time_limit_seconds: float = 20.0) -> Conflict | None:
    """A smallest set of constraints that no plan keeps; None if some plan keeps all of them.

    Args:
        equal: Whether plans have as many replicas of every stage; else of each as many as it likes.
        time_limit_seconds: Past it no more constraints are left out.
    """
    deadline = time.perf_counter() + time_limit_seconds

    def possible(of: Setting) -> bool | None:
        return _fits(of, equal, deadline) if time.perf_counter() < deadline else None

    if possible(made):
        return None
    kept = _constraints(made)
    minimal = True
    for constraint in tuple(kept):
        rest = [other for other in kept if other is not constraint]
        answer = possible(_only(made, rest))
        if answer is False:
            kept = rest
        minimal &= answer is not None
    alone = [c for c in kept if possible(c.relaxed(made))]
    return Conflict(tuple(c.words for c in kept), minimal, tuple(c.words for c in alone))


def _only(made: Setting, kept: list[_Constraint]) -> Setting:
    """The setting with these constraints alone."""
    words = {constraint.words for constraint in kept}
    for constraint in _constraints(made):
        if constraint.words not in words:
            made = constraint.relaxed(made)
    return made


def _constraints(made: Setting) -> list[_Constraint]:
    """All there are, in the order in which they are tried to be left out: what cannot be helped comes first."""
    space, freedom, wanted = made.space, made.freedom, made.wanted
    limits = space.terms.pool_limits_bytes or (space.terms.memory_limit_bytes,)
    found = [_Constraint(f"memory limit {', '.join(map(format_bytes, limits))}", _without_limit)]
    if len(space.topology.pools) == 1:
        count = space.num_devices
        found.append(_Constraint(f"{count} device{'s' * (count > 1)}", _with_many_devices))
    if space.terms.schedule == "gpipe":
        found.append(_Constraint("schedule gpipe", _with_1f1b))
    shardings = (0, 1, 2, 3) if space.terms.is_synchronous else (0, 1)
    if freedom.shardings != shardings:
        listed = ", ".join(f"ZeRO-{z}" if z else "none" for z in freedom.shardings)
        words = "no sharding" if freedom.shardings == (0,) else f"sharding {listed}"
        found.append(_Constraint(words, lambda of: _freed(of, shardings=shardings)))
    degrees = allowed_degrees(space.profile, space.topology, None)
    if freedom.degrees != degrees:
        words = f"tensor-parallel degree{'s' * (len(freedom.degrees) > 1)} {', '.join(map(str, freedom.degrees))}"
        found.append(_Constraint(words, lambda of: _freed(of, degrees=degrees)))
    if not freedom.recompute:
        found.append(_Constraint("no recomputation", lambda of: _freed(of, recompute=True)))
    for names in space.together:
        found.append(_Constraint(f"{' and '.join(names)} kept together", partial(_without_group, names=names)))
    for pin in wanted.pins:
        found.append(_Constraint(f"{pin.layer} in stage {pin.stage}", partial(_without_pin, pin=pin)))
    if wanted.replicas is not None:
        words = f"replicas {'-'.join(map(str, wanted.replicas))}"
        found.append(_Constraint(words, lambda of: _wanting(of, replicas=None)))
    if wanted.max_stages is not None:
        words = f"at most {wanted.max_stages} stage{'s' * (wanted.max_stages > 1)}"
        found.append(_Constraint(words, lambda of: _wanting(of, max_stages=None)))
    if wanted.num_stages is not None:
        words = f"exactly {wanted.num_stages} stage{'s' * (wanted.num_stages > 1)}"
        found.append(_Constraint(words, lambda of: _wanting(of, num_stages=None)))
    return found


def _without_limit(made: Setting) -> Setting:
    terms = replace(made.space.terms, memory_limit_bytes=_NO_LIMIT, pool_limits_bytes=())
    return replace(made, space=replace(made.space, terms=terms))


def _with_many_devices(made: Setting) -> Setting:
    return replace(made, space=replace(made.space, topology=_grown(made.space.topology)))


def _with_1f1b(made: Setting) -> Setting:
    return replace(made, space=replace(made.space, terms=replace(made.space.terms, schedule="1f1b")))


def _freed(made: Setting, **changes: object) -> Setting:
    return replace(made, freedom=replace(made.freedom, **changes))  # type: ignore[arg-type]


def _wanting(made: Setting, **changes: object) -> Setting:
    return replace(made, wanted=replace(made.wanted, **changes))  # type: ignore[arg-type]


def _without_group(made: Setting, names: tuple[str, ...]) -> Setting:
    together = tuple(group for group in made.space.together if group != names)
    return replace(made, space=replace(made.space, together=together))


def _without_pin(made: Setting, pin: object) -> Setting:
    return _wanting(made, pins=tuple(other for other in made.wanted.pins if other != pin))


def _grown(topology: Topology) -> Topology:
    """With more groups of the outermost level, all full."""
    *inner, last = topology.levels
    group = int(np.prod([level.count for level in inner], dtype=np.int64))
    wanted = max(_MANY, 4 * topology.num_devices)
    return replace(topology, levels=(*inner, replace(last, count=-(-wanted // group))), missing=0)


def _fits(made: Setting, equal: bool, deadline: float) -> bool | None:
    """Whether any plan fits; None if that is not known."""
    space, wanted = made.space, made.wanted
    prices = space.prices(made.freedom)
    if not _counts(made, space.num_devices) or max(wanted.replicas or (1,)) > space.terms.num_microbatches:
        return False
    if not _some_row(made, prices):
        return False
    different = wanted.replicas is not None and len(set(wanted.replicas)) > 1
    if not different:
        free = wanted.num_stages is None and wanted.max_stages is None and wanted.replicas is None
        found = dp.search(
            prices,
            space.num_devices,
            stages=None if free else _counts(made, space.num_devices),
            replicas=None if wanted.replicas is None else wanted.replicas[:1],
            pins=wanted.pins,
            tolerance=1.0,
            deadline=deadline,
        )
        if found.plans:
            return True
        if equal:
            return None if found.timed_out else False
    if len(prices.pools) > 1:
        if wanted.replicas is not None or wanted.pins:
            return None
        unlike = uneven.search(prices, space.num_devices, num_stages=wanted.num_stages, max_stages=wanted.max_stages)
        return unlike.plan is not None or (None if not unlike.complete else False)
    try:
        check_size(prices, space.num_devices)
    except SolverError:
        return None
    if wanted.replicas is None and not wanted.pins:
        return uneven.fits(prices, space.num_devices, num_stages=wanted.num_stages, max_stages=wanted.max_stages)
    return _row_fits(made, prices)


def _counts(made: Setting, most: int) -> range:
    """Numbers of stages that are allowed, all at once."""
    wanted = made.wanted
    exact = [wanted.num_stages, None if wanted.replicas is None else len(wanted.replicas)]
    known = [count for count in exact if count is not None]
    return range(max(known, default=1), min([*known, most, wanted.max_stages or most]) + 1)


def _some_row(made: Setting, prices: Prices) -> bool:
    """Whether there is a row of stages as it is asked for, whatever it takes."""
    start, stop, last = prices.start, prices.stop, prices.num_states - 1
    counts = _counts(made, min(made.space.num_devices, last))
    pins = [pinned(prices, prices.num_states, pin) for pin in made.wanted.pins]
    reached = np.arange(last + 1) == 0
    for stage in range(counts.stop - 1):
        here = reached[start]
        for pin in pins:
            here &= (pin.holds[stop] & ~pin.holds[start]) == (pin.stage == stage)
        reached = np.zeros(last + 1, np.bool_)
        reached[stop[here]] = True
        if stage + 1 in counts and reached[last]:
            return True
    return False


def _row_fits(made: Setting, prices: Prices) -> bool | None:
    """Whether some row of stages fits whose replicas, or the stages of some layers, are given."""
    num_devices, wanted = made.space.num_devices, made.wanted
    options = uneven.AllOptions(prices, num_devices).options(np.inf)
    if not len(options.start):
        return False
    asked = Asked(
        num_devices, replicas=wanted.replicas, pins=tuple(pinned(prices, options.num_states, p) for p in wanted.pins)
    )
    ordered = SortedOptions.sort(options)
    columns: list[Column] = [ordered.devices]
    if asked.replicas is not None:
        ordered = ordered.only(np.isin(ordered.replicas, asked.replicas))
        columns = [ordered.devices, -1 * ordered.replicas]
    ordered = ordered.trimmed(*columns)
    counts = _counts(made, min(num_devices, options.num_states - 1))
    # Without a word about memory behind there are few arcs.
    if not _stage_by_stage(relaxed(ordered), asked, counts):
        return False
    if len(ordered.start) * num_devices > _MAX_ARCS:
        return None
    return _stage_by_stage(arcs(ordered, num_devices, apart=True), asked, counts)


def _stage_by_stage(every: Arcs, asked: Asked, counts: range) -> bool:
    """The fewest devices in front of every node, by the number of stages there."""
    start, stop = every.of(every.options.start), every.of(every.options.stop)
    replicas, devices = every.of(every.options.replicas), every.of(every.options.devices)
    last = every.options.last * every.span
    fewest = np.full(every.options.num_states * every.span, np.inf)
    fewest[: every.span] = 0.0
    for stage in range(counts.stop - 1):
        here = np.ones(len(every), np.bool_)
        if asked.replicas is not None:
            here &= replicas == asked.replicas[stage]
        for pin in asked.pins:
            here &= (pin.holds[stop] & ~pin.holds[start]) == (pin.stage == stage)
        behind = np.full_like(fewest, np.inf)
        np.minimum.at(behind, every.head[here], fewest[every.tail[here]] + devices[here])
        fewest = behind
        if stage + 1 in counts and fewest[last] <= asked.num_devices:
            return True
    return False
