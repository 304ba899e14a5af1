"""What a plan says about the plans it beat, and what a person should know before trusting it."""

from collections.abc import Callable, Iterable

from dpart.partitioner.candidates import Space, Wanted
from dpart.partitioner.plan import Alternative
from dpart.partitioner.ranking import Entry, Ranked
from dpart.partitioner.topology import Device
from dpart.partitioner.units import format_bytes, format_seconds
from dpart.partitioner.unlike import known_kind
from dpart.profiler.profile import Machine

_FREE = 1e-3
"""Communication below this share of the bottleneck is called free."""

_MAX_LISTED = 8


def alternatives(ranked: Ranked) -> tuple[Alternative, ...]:
    """The baselines, then the best other plan of every count of stages and of devices, the fastest first."""
    winner = ranked.winner
    assert winner is not None
    entries = [e for e in ranked.others if e.candidate.baseline]
    found = [e for e in ranked.others if not e.candidate.baseline]
    firsts = [
        *_first_of_each(found, lambda e: len(e.evaluation.stages)),
        *_first_of_each(found, lambda e: e.evaluation.num_devices),
    ]
    entries += [e for e in found if any(e is first for first in firsts)]
    listed = [
        Alternative(e.candidate.name, e.evaluation.replicas, e.step_seconds, _why_lost(e, winner)) for e in entries
    ]
    by_shortage = sorted(ranked.rejected, key=lambda pair: (not pair[0].baseline, pair[1].short_bytes))
    for candidate, evaluation in by_shortage[:_MAX_LISTED]:
        note = f"does not fit: {evaluation.short_bytes} bytes ({format_bytes(evaluation.short_bytes)}) too much"
        listed.append(Alternative(candidate.name, evaluation.replicas, None, f"{note} on its fullest device"))
    return tuple(listed)


def notes(space: Space, wanted: Wanted, ranked: Ranked, lower_bound_seconds: float | None) -> tuple[str, ...]:
    """A sentence for everything about the winner that would surprise.

    Args:
        lower_bound_seconds: Of the bottleneck; None where a certificate says what was searched.
    """
    winner = ranked.winner
    assert winner is not None
    return tuple(
        note
        for note in (
            _on_measurement(space),
            _on_states(space) if lower_bound_seconds is not None else "",
            _on_one_stage(space, wanted, ranked, winner),
            _on_idle_devices(space, ranked, winner),
            _on_communication(space, winner),
            _on_bound(lower_bound_seconds, winner),
        )
        if note
    )


def _why_lost(entry: Entry, winner: Entry) -> str:
    if entry is winner:
        return "this plan"
    ratio = entry.step_seconds / winner.step_seconds if winner.step_seconds else 1.0
    if ratio < 1:
        return f"faster by {_percent(1 - ratio)}, but not what was asked for"
    if ratio < 1 + 1e-6:
        return f"as fast, on {entry.evaluation.num_devices} devices in {len(entry.evaluation.stages)} stages"
    return f"slower by {_percent(ratio - 1)}" if ratio < 2 else f"takes {ratio:.1f} times as long"


def _on_measurement(space: Space) -> str:
    machine = space.profile.machine
    if space.topology.note:
        if machine.device == "cpu" and machine.threads > 1:
            return (
                f"Layers were measured with {machine.threads} threads, and a worker has one core: profile with "
                "one thread to predict a step."
            )
        return ""
    # A speed that is told says how the times are taken.
    others = [p.device.name for p in space.topology.pools if p.device.speed == 1 and not _is_of(machine, p.device)]
    if others:
        names = ", ".join(dict.fromkeys(others))
        made = "estimated for" if machine.estimated else "measured on"
        return f"Layers were {made} {machine.device}, and their times are taken as they are for {names}."
    return ""


def _is_of(machine: Machine, device: Device) -> bool:
    """Whether a profile's machine has devices of this kind: by the catalogue, or by their names."""
    kinds = [known_kind(name) for name in (machine.device, device.name)]
    if None not in kinds:
        return kinds[0] == kinds[1]
    here, there = machine.device.lower(), device.name.lower()
    return here in there or there in here


def _on_states(space: Space) -> str:
    if space.states.complete:
        return ""
    return (
        "The model branches too widely to look at every cut: only the cuts of one order of its layers were "
        "searched, and a better plan may exist."
    )


def _on_one_stage(space: Space, wanted: Wanted, ranked: Ranked, winner: Entry) -> str:
    if len(winner.evaluation.stages) > 1 or space.num_devices == 1 or not wanted.is_any:
        return ""
    what = "one device" if winner.evaluation.num_devices == 1 else "data parallelism alone"
    split = _fastest(e for e in ranked.others if len(e.evaluation.stages) == 2)
    if split is None:
        return f"One stage wins: {what} takes {format_seconds(winner.step_seconds)}; no plan with two stages fits."
    bubble = f"its devices wait {split.timeline.bubble:.0%} of the time"
    return (
        f"One stage wins: {what} takes {format_seconds(winner.step_seconds)}; the best 2-stage plan (replicas "
        f"{'-'.join(map(str, split.evaluation.replicas))}) would take {format_seconds(split.step_seconds)}, as "
        f"{bubble}."
    )


def _on_idle_devices(space: Space, ranked: Ranked, winner: Entry) -> str:
    used, given = winner.evaluation.num_devices, space.num_devices
    if used == given:
        return ""
    idle = f"{given - used} of {given} devices stay idle"
    more = _fastest(e for e in ranked.others if e.evaluation.num_devices == given)
    if more is None:
        return f"{idle}: no plan on all of them was found that fits or could be faster."
    if more.step_seconds < winner.step_seconds:
        return f"{idle}, as asked for."
    with_all, with_some = format_seconds(more.step_seconds), format_seconds(winner.step_seconds)
    return f"{idle}: the best plan found on all {given} would take {with_all}, not {with_some}."


def _on_communication(space: Space, winner: Entry) -> str:
    evaluation = winner.evaluation
    if evaluation.num_devices == 1:
        return ""
    carried = max(
        2 * space.terms.num_microbatches * stage.receive_seconds + stage.all_reduce_seconds
        for stage in evaluation.stages
    )
    if carried > _FREE * winner.step_seconds:
        return ""
    return (
        "Communication is free in this plan (less than 0.1 % of the step): if that surprises you, look at the "
        "units of the topology's bandwidths."
    )


def _on_bound(lower_bound_seconds: float | None, winner: Entry) -> str:
    bottleneck = winner.evaluation.bottleneck_seconds
    if not lower_bound_seconds or bottleneck <= lower_bound_seconds * (1 + 1e-9):
        return ""
    return (
        f"Chosen by the time of its step; its bottleneck is {_percent(bottleneck / lower_bound_seconds - 1)} above "
        f"{format_seconds(lower_bound_seconds)}, the least that any such plan could have."
    )


def _first_of_each(entries: Iterable[Entry], count: Callable[[Entry], int]) -> list[Entry]:
    """The fastest of each count; at most a screenful."""
    first: dict[int, Entry] = {}
    for entry in entries:
        first.setdefault(count(entry), entry)
    return list(first.values())[:_MAX_LISTED]


def _fastest(entries: Iterable[Entry]) -> Entry | None:
    return min(entries, key=lambda e: e.step_seconds, default=None)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
