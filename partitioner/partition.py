"""`partition`: Profile + Topology -> Plan.

Searchers and baselines propose plans, the cost model and the simulator give each its exact numbers, the fastest
step that fits wins, and the plan says what the others would have taken::

    candidates ─evaluate─> bottleneck, bytes ─play─> step_seconds ─least─> Plan
"""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from dpart.partitioner import by_ilp, certified
from dpart.partitioner.candidates import (
    Space,
    Wanted,
    baselines,
    largest_layer,
    least_memory,
    search,
)
from dpart.partitioner.certificates import digest
from dpart.partitioner.certified import Certified
from dpart.partitioner.cost import OPTIMIZERS, Optimizer, ScheduleName, Terms
from dpart.partitioner.ilp_conflicts import conflict
from dpart.partitioner.ilp_options import SolverError
from dpart.partitioner.notes import alternatives, notes
from dpart.partitioner.plan import Pin, Plan, Question
from dpart.partitioner.prices import Freedom
from dpart.partitioner.ranking import Ranked, rank
from dpart.partitioner.runnable import not_runnable
from dpart.partitioner.setting import Setting, parameter_itemsize, setting
from dpart.partitioner.topology import Topology, local_topology, topology_text
from dpart.partitioner.units import format_bytes
from dpart.partitioner.unlike import allowed_degrees, memory_limits, refuse_unlike, with_speeds
from dpart.partitioner.warm_ups import best_schedule
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError
from dpart.runtime.schedule import EXECUTABLE_SCHEDULES

_SCHEDULES = {
    "dp": ("1f1b", "gpipe", "zb-h1", "pipedream", "2bw", "auto"),
    "pipedream": EXECUTABLE_SCHEDULES,
    "ilp": ("1f1b", "gpipe", "zb-h1", "pipedream", "2bw", "auto"),
}

_CONTEXT_BYTES = 512 * 2**20
"""What a process has on a GPU before it has allocated anything."""

_FEW_DEVICES, _FEW_STATES = 16, 200

DEFAULT_MEMORY_HEADROOM = 0.1
"""For what the model does not know of: the framework's own memory and fragmentation."""


class NoPlanError(UserError):
    """Nothing that was asked for is impossible, but no plan fits."""


def partition(
    profile: Profile,
    topology: Topology | None = None,
    *,
    method: Literal["dp", "pipedream", "ilp"] = "dp",
    schedule: ScheduleName | Literal["auto"] = "1f1b",
    optimizer: Optimizer = "adam",
    batch_size: int | None = None,
    memory_limit_bytes: int | Sequence[int] | None = None,
    memory_headroom: float = DEFAULT_MEMORY_HEADROOM,
    num_devices: int | None = None,
    num_stages: int | None = None,
    max_stages: int | None = None,
    replicas: Sequence[int] | None = None,
    tensor_parallel: Sequence[int] | None = None,
    sharding: Sequence[int] | None = None,
    recompute: bool = True,
    together: Sequence[Sequence[str]] = (),
    pins: Mapping[str, int] | None = None,
    reduce_buckets: int = 1,
    tolerance: float = 5e-4,
    time_limit_seconds: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan with the smallest predicted step time that fits.

    Args:
        topology: None for the machine the profile was measured on.
        batch_size: Rows per step; None for the profile's.
        memory_limit_bytes: What a plan may use of each device, or of each of every pool of unlike ones; None for its
            memory less the headroom.
        memory_headroom: Share of each device's memory that is left free.
        num_devices: Use at most the first so many devices of the topology.
        num_stages: Exactly so many stages.
        max_stages: At most so many stages.
        replicas: Exactly these replicas per stage; only the cuts are chosen.
        tensor_parallel: Degrees to choose from; None for all that the profile knows and a host holds.
        sharding: Stages of ZeRO to choose from, 0 being none; None for all.
        recompute: Whether layers may be recomputed in the backward where memory is short.
        together: Sets of layers that no cut may separate.
        pins: Stages of some layers, counted from 0.
        reduce_buckets: In so many parts gradients are all-reduced while the last backward runs; the runtime has 1.
        tolerance: Relative gap of the certificate that is good enough.
        time_limit_seconds: For the integer programme, and for the proof of the default method.
        progress: Called with a few words now and then.

    Raises:
        UserError: An option is impossible.
        NoPlanError: No plan fits; the message says by how much and what to do.
    """
    _check_choices(
        ("method", method, ("dp", "pipedream", "ilp")),
        ("schedule", schedule, _SCHEDULES.get(method, _SCHEDULES["dp"])),
        ("optimizer", optimizer, OPTIMIZERS),
    )
    topology = local_topology(profile.machine) if topology is None else topology
    if num_devices is not None:
        topology = topology.first(num_devices)
    limits = memory_limits(topology, memory_limit_bytes, memory_headroom)
    topology, on_speeds = with_speeds(topology, profile)
    batch_size = profile.batch_size if batch_size is None else batch_size
    if batch_size < 1:
        raise UserError(f"batch size {batch_size}: expected at least 1.")
    _check_profile(profile)
    question = Question(
        profile="",
        profile_digest=digest(profile),
        topology=topology_text(topology),
        schedule=schedule,
        batch_size=batch_size,
        degrees=allowed_degrees(profile, topology, tensor_parallel),
        shardings=(0,) if method == "pipedream" else _shardings(sharding, schedule),
        recompute=recompute and method != "pipedream",
        num_stages=num_stages,
        max_stages=max_stages,
        replicas=None if replicas is None else tuple(replicas),
        together=tuple(tuple(names) for names in together),
        pins=tuple(Pin(layer, stage) for layer, stage in sorted((pins or {}).items())),
        reduce_buckets=reduce_buckets,
        context_bytes=0 if profile.machine.device == "cpu" else _CONTEXT_BYTES,
    )
    _check_layers(profile, question)
    _check_optimizer(profile, optimizer)
    made = setting(
        profile,
        topology,
        question,
        optimizer=optimizer,
        memory_limit_bytes=limits[0],
        pool_limits_bytes=limits if len(limits) > 1 else (),
        progress=progress,
    )
    _check_wanted(made.wanted, topology, made.space.terms, len(profile.graph.layers), question.degrees)
    if method == "ilp" or (method == "dp" and _has_equal(made.wanted)):
        plan = _certified(made, method, schedule, time_limit_seconds, tolerance)
    else:
        plan = _bottleneck(made)
    missing = not_runnable(plan)
    note = f"The runtime does not execute {', nor '.join(missing)} yet: this plan cannot be emitted."
    said = [on_speeds] * bool(on_speeds) + [note] * bool(missing)
    return replace(plan, question=question, notes=(*plan.notes, *said))


def _certified(
    made: Setting,
    method: Literal["dp", "pipedream", "ilp"],
    schedule: str,
    time_limit_seconds: float,
    tolerance: float,
) -> Plan:
    """By the searches over the whole space. With few devices the plans of smallest bottleneck are candidates, too."""
    space, wanted = made.space, made.wanted
    found, why = None, ""
    if method == "ilp":
        try:
            found = by_ilp.search(made, time_limit_seconds=time_limit_seconds, gap=tolerance)
        except SolverError as error:
            method, why = "dp", f"The integer programme gave no plan ({error}); the default search was used instead."
    if found is None:
        if not _has_equal(wanted):
            raise UserError(f"Replicas that differ are for the methods ilp and pipedream. {why}")
        found = certified.search(made, time_limit_seconds=time_limit_seconds, tolerance=tolerance)
        found = replace(found, notes=(*found.notes, *([why] if why else [])))
    small = _is_small(space) and not wanted.pins and not space.together and not space.topology.others
    extra = search(space, wanted).candidates if small else ()
    space.progress("playing the steps of the candidates")
    ranked = rank(made.evaluator, [*found.candidates, *extra], wanted)
    if ranked.winner is None:
        equal = method == "dp" and (space.num_devices > _FEW_DEVICES or bool(wanted.pins))
        named = conflict(made, equal=equal)
        raise NoPlanError(_nothing_fits(made) + (f" {named.sentence}" if named else ""))
    evaluator = made.evaluator
    if schedule == "auto":
        space.progress("playing other schedules")
        fitting = [e for e in (ranked.winner, *ranked.others) if wanted.allows(e.evaluation.stages)]
        evaluator, winner = best_schedule(evaluator, fitting)
        ranked = replace(ranked, winner=winner)
    plan = _plan(space, wanted, ranked, method, None, found.notes, found)
    return replace(plan, schedule=evaluator.terms.schedule, warm_up_depth=evaluator.terms.warm_up_depth)


def _bottleneck(made: Setting) -> Plan:
    """By the searches that minimise the bottleneck, without tensor parallelism or recomputation."""
    space, wanted = made.space, made.wanted
    refuse_unlike(space.topology, "The search that minimises the bottleneck")
    if wanted.pins or space.together:
        raise UserError("Pins and layers kept together are for the default method (dp), with equal replicas.")
    searched = search(space, wanted)
    space.progress("playing the steps of the candidates")
    ranked = rank(made.evaluator, [*baselines(space), *searched.candidates], wanted)
    if ranked.winner is None:
        raise NoPlanError(_nothing_fits(replace(made, freedom=Freedom())))
    return _plan(space, wanted, ranked, "pipedream", searched.lower_bound_seconds, searched.notes, None)


def _plan(
    space: Space,
    wanted: Wanted,
    ranked: Ranked,
    method: Literal["dp", "pipedream", "ilp"],
    lower_bound_seconds: float | None,
    search_notes: Sequence[str],
    found: Certified | None,
) -> Plan:
    winner = ranked.winner
    assert winner is not None
    bottleneck = winner.evaluation.bottleneck_seconds
    certificate = None
    if found is not None:
        certificate = found.certificate(winner.evaluation.objective_seconds, ranked.best_objective_seconds)
    return Plan(
        format="dpart.plan",
        version=1,
        model=space.profile.graph.model,
        fingerprint=space.profile.graph.fingerprint,
        topology=str(space.topology),
        num_devices=space.num_devices,
        memory_limit_bytes=space.terms.memory_limit_bytes,
        method=method,
        schedule=space.terms.schedule,
        optimizer=space.terms.optimizer,
        microbatch_size=space.profile.graph.microbatch_size,
        num_microbatches=space.terms.num_microbatches,
        stages=winner.evaluation.stages,
        bottleneck_seconds=bottleneck,
        # Searcher and evaluation add up the same numbers in different orders.
        optimal=lower_bound_seconds is not None and bottleneck <= lower_bound_seconds * (1 + 1e-9),
        step_seconds=winner.step_seconds,
        bubble=winner.timeline.bubble,
        alternatives=alternatives(ranked),
        certificate=certificate,
        notes=(*search_notes, *notes(space, wanted, ranked, lower_bound_seconds)),
        pool_limits_bytes=space.terms.pool_limits_bytes,
    )


def _has_equal(wanted: Wanted) -> bool:
    return wanted.replicas is None or len(set(wanted.replicas)) == 1


def _is_small(space: Space) -> bool:
    """Whether the searches by bottleneck take no time to speak of."""
    return space.num_devices <= _FEW_DEVICES and len(space.contraction.member) <= _FEW_STATES


def _shardings(wanted: Sequence[int] | None, schedule: str) -> tuple[int, ...]:
    # Versions of weights are kept whole.
    allowed = (0, 1) if schedule in ("pipedream", "2bw") else (0, 1, 2, 3)
    if wanted is None:
        return allowed
    if any(z not in allowed for z in wanted) and len(allowed) == 2:
        raise UserError(f"The {schedule} schedule keeps versions of whole parameters: choose sharding from 0 and 1.")
    wrong = [z for z in wanted if z not in (0, 1, 2, 3)]
    if wrong or not wanted:
        raise UserError(f"sharding {', '.join(map(str, wanted)) or 'none'}: expected stages of ZeRO, 0 to 3.")
    return tuple(sorted(set(wanted)))


def _check_optimizer(profile: Profile, optimizer: str) -> None:
    bits = 8 * parameter_itemsize(profile)
    if optimizer == "adam-mixed" and bits > 16:
        raise UserError(
            f"optimizer 'adam-mixed' keeps float32 copies of parameters in 16 bits; those of this model have {bits}: "
            "use adam."
        )


def _check_layers(profile: Profile, question: Question) -> None:
    known = {layer.name for layer in profile.graph.layers}
    named = [name for names in question.together for name in names] + [pin.layer for pin in question.pins]
    faults = [
        f"layer {name!r}: the model has no layer of this name{_closest(name, known)}."
        for name in dict.fromkeys(named)
        if name not in known
    ]
    most = question.num_stages or question.max_stages
    faults += [
        f"layer {pin.layer!r} pinned to stage {pin.stage}: there are at most {most} stages, counted from 0."
        for pin in question.pins
        if most is not None and pin.stage >= most
    ]
    if faults:
        raise UserError("\n".join(faults))


def _closest(name: str, known: Collection[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _check_choices(*choices: tuple[str, str, tuple[str, ...]]) -> None:
    faults = [
        f"{what} {given!r}: expected one of {', '.join(known)}." for what, given, known in choices if given not in known
    ]
    if faults:
        raise UserError("\n".join(faults))


def _check_profile(profile: Profile) -> None:
    layers = [layer.name for layer in profile.graph.layers]
    if not layers:
        raise UserError("The profile has no layers: there is nothing to partition.")
    if [cost.layer for cost in profile.costs] != layers:
        raise UserError("The profile's costs are not those of its layers, one each in order: profile it again.")


def _check_wanted(wanted: Wanted, topology: Topology, terms: Terms, num_layers: int, degrees: Sequence[int]) -> None:
    """Lists everything impossible that was asked for."""
    devices, m, faults = topology.num_devices, terms.num_microbatches, []
    for name, value in (("number of stages", wanted.num_stages), ("most stages", wanted.max_stages)):
        if value is not None and value < 1:
            faults.append(f"{name} {value}: expected at least 1.")
    replicas = wanted.replicas
    stages = wanted.num_stages if replicas is None else len(replicas)
    if replicas is not None:
        if not replicas or min(replicas) < 1:
            faults.append(f"replicas {_row(replicas)}: expected at least one stage, and one replica of each.")
        if wanted.num_stages not in (None, len(replicas)):
            faults.append(f"replicas {_row(replicas)} are for {len(replicas)} stages, not {wanted.num_stages}.")
        if sum(replicas) > devices:
            faults.append(f"replicas {_row(replicas)} need {sum(replicas)} devices; there are {devices}.")
        if replicas and max(replicas) > m:
            faults.append(
                f"replicas {_row(replicas)}: {max(replicas)} replicas share {m} microbatches, so some would "
                f"have none; use a larger batch, a smaller microbatch, or at most {m} replicas."
            )
    if stages is not None and stages > num_layers:
        faults.append(f"{stages} stages asked for; the model has {num_layers} layers, and each needs one.")
    elif replicas is None and stages is not None and stages > devices:
        faults.append(f"{stages} stages need {stages} devices; there are {devices}.")
    least = min(degrees) * (sum(replicas) if replicas is not None else stages or 1)
    if least > devices and min(degrees) > 1:
        faults.append(
            f"tensor-parallel degree {min(degrees)} and more for what was asked needs {least} devices; there are "
            f"{devices}."
        )
    if None not in (stages, wanted.max_stages) and (stages or 0) > (wanted.max_stages or 0):
        faults.append(f"{stages} stages asked for, but at most {wanted.max_stages} are allowed.")
    if faults:
        raise UserError("\n".join(faults))


def _nothing_fits(made: Setting) -> str:
    """Which layer is too large alone; or by how much the most frugal plan is too large."""
    space, wanted, freedom = made.space, made.wanted, made.freedom
    limit = max(space.terms.pool_limits_bytes, default=space.terms.memory_limit_bytes)
    remedy = "use a smaller microbatch, an optimizer with less state (sgd), or devices with more memory"
    layer, needed = largest_layer(space, freedom)
    if needed > limit:
        return (
            f"No plan fits: layer {layer!r} alone needs {format_bytes(needed)} on a device, and a plan may use "
            f"{format_bytes(limit)}: {needed - limit} bytes too much. Split that layer, or {remedy}."
        )
    if wanted.pins or space.together:
        return (
            f"No plan fits in {format_bytes(limit)} of each device with these pins and layers kept together, though "
            f"every layer fits alone. Leave some of them out, or {remedy}."
        )
    if not _is_small(space) or space.topology.others:
        return (
            f"No plan on {space.num_devices} devices fits in {format_bytes(limit)} of each, though every layer fits "
            f"alone. Give more devices, or {remedy}."
        )
    if freedom != Freedom():
        needed = certified.least_memory(space, freedom, wanted)
        return (
            f"No plan fits: every layer fits alone, but the most frugal plan, recomputation and sharding included as "
            f"far as they are allowed, needs {format_bytes(needed)} on its fullest device, and may use "
            f"{format_bytes(limit)}: {needed - limit} bytes too much. Give more than {space.num_devices} device(s), "
            f"or {remedy}."
        )
    needed, replicas = least_memory(space, wanted)
    return (
        f"No plan fits: every layer fits alone, but the most frugal plan (replicas {_row(replicas)}) needs "
        f"{format_bytes(needed)} on its fullest device, and may use {format_bytes(limit)}: {needed - limit} bytes "
        f"too much. Give more than {space.num_devices} device(s), or {remedy}."
    )


def _row(replicas: Sequence[int]) -> str:
    return "-".join(map(str, replicas)) or "none"
