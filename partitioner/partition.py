"""`partition`: Profile + Topology -> Plan.

Searchers and baselines propose plans, the cost model and the simulator give each its exact numbers, the fastest
step that fits wins, and the plan says what the others would have taken::

    candidates ─evaluate─> bottleneck, bytes ─play─> step_seconds ─least─> Plan
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from dpart.partitioner.candidates import (
    Searched,
    Space,
    Wanted,
    baselines,
    largest_layer,
    least_memory,
    search,
)
from dpart.partitioner.cost import OPTIMIZER_STATES, Terms
from dpart.partitioner.evaluate import Evaluator
from dpart.partitioner.notes import alternatives, notes
from dpart.partitioner.plan import Plan
from dpart.partitioner.ranking import Ranked, rank
from dpart.partitioner.topology import Topology, local_topology
from dpart.partitioner.units import format_bytes
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError
from dpart.runtime.schedule import SCHEDULES

DEFAULT_MEMORY_HEADROOM = 0.1
"""For what the model does not know of: the framework's own memory and fragmentation."""


def partition(
    profile: Profile,
    topology: Topology | None = None,
    *,
    method: Literal["pipedream", "ilp"] = "pipedream",
    schedule: Literal["1f1b", "gpipe"] = "1f1b",
    optimizer: Literal["sgd", "adam"] = "adam",
    batch_size: int | None = None,
    memory_limit_bytes: int | None = None,
    memory_headroom: float = DEFAULT_MEMORY_HEADROOM,
    num_devices: int | None = None,
    num_stages: int | None = None,
    max_stages: int | None = None,
    replicas: Sequence[int] | None = None,
    time_limit_seconds: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan with the smallest predicted step time that fits.

    Args:
        topology: None for the machine the profile was measured on.
        batch_size: Rows per step; None for the profile's.
        memory_limit_bytes: What a plan may use of each device; None for its memory less the headroom.
        memory_headroom: Share of each device's memory that is left free.
        num_devices: Use at most the first so many devices of the topology.
        num_stages: Exactly so many stages.
        max_stages: At most so many stages.
        replicas: Exactly these replicas per stage; only the cuts are chosen.
        time_limit_seconds: For the integer programme.
        progress: Called with a few words now and then.

    Raises:
        UserError: An option is impossible, or no plan fits; the message says by how much and what to do.
    """
    _check_choices(
        ("method", method, ("pipedream", "ilp")),
        ("schedule", schedule, tuple(SCHEDULES)),
        ("optimizer", optimizer, tuple(OPTIMIZER_STATES)),
    )
    topology = local_topology(profile.machine) if topology is None else topology
    if num_devices is not None:
        topology = topology.first(num_devices)
    if memory_limit_bytes is None:
        if not 0 <= memory_headroom < 1:
            raise UserError(f"memory headroom {memory_headroom}: expected a share from 0 up to 1, such as 0.1.")
        memory_limit_bytes = int(topology.device.memory_bytes * (1 - memory_headroom))
    if memory_limit_bytes < 1:
        raise UserError(f"memory limit {memory_limit_bytes} bytes: expected at least 1.")
    batch_size = profile.batch_size if batch_size is None else batch_size
    if batch_size < 1:
        raise UserError(f"batch size {batch_size}: expected at least 1.")
    num_microbatches = math.ceil(batch_size / profile.graph.microbatch_size)
    last_rows = batch_size - (num_microbatches - 1) * profile.graph.microbatch_size
    terms = Terms(num_microbatches, schedule, optimizer, memory_limit_bytes)
    wanted = Wanted(num_stages, max_stages, None if replicas is None else tuple(replicas))
    _check_profile(profile)
    _check_wanted(wanted, topology, terms, len(profile.graph.layers))

    space = Space(profile, topology, terms, progress or (lambda text: None))
    searched = search(space, wanted, method, time_limit_seconds)
    evaluator = Evaluator(profile, topology, terms, last_rows / profile.graph.microbatch_size)
    space.progress("evaluating the candidates")
    ranked = rank(evaluator, [*baselines(space), *searched.candidates], wanted)
    if ranked.winner is None:
        raise UserError(_nothing_fits(space, wanted))
    return _plan(space, wanted, searched, ranked)


def _plan(space: Space, wanted: Wanted, searched: Searched, ranked: Ranked) -> Plan:
    winner = ranked.winner
    assert winner is not None
    bottleneck = winner.evaluation.bottleneck_seconds
    return Plan(
        format="dpart.plan",
        version=1,
        model=space.profile.graph.model,
        fingerprint=space.profile.graph.fingerprint,
        topology=str(space.topology),
        num_devices=space.num_devices,
        memory_limit_bytes=space.terms.memory_limit_bytes,
        method=searched.method,
        schedule=space.terms.schedule,
        optimizer=space.terms.optimizer,
        microbatch_size=space.profile.graph.microbatch_size,
        num_microbatches=space.terms.num_microbatches,
        stages=winner.evaluation.stages,
        bottleneck_seconds=bottleneck,
        # Searcher and evaluation add up the same numbers in different orders.
        optimal=bottleneck <= searched.lower_bound_seconds * (1 + 1e-9),
        step_seconds=winner.timeline.step_seconds,
        bubble=winner.timeline.bubble,
        alternatives=alternatives(ranked),
        notes=(*searched.notes, *notes(space, wanted, ranked, searched.lower_bound_seconds)),
    )


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


def _check_wanted(wanted: Wanted, topology: Topology, terms: Terms, num_layers: int) -> None:
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
    if None not in (stages, wanted.max_stages) and (stages or 0) > (wanted.max_stages or 0):
        faults.append(f"{stages} stages asked for, but at most {wanted.max_stages} are allowed.")
    if faults:
        raise UserError("\n".join(faults))


def _nothing_fits(space: Space, wanted: Wanted) -> str:
    """Which layer is too large alone; or by how much the most frugal plan is too large."""
    limit = space.terms.memory_limit_bytes
    remedy = "use a smaller microbatch, an optimizer with less state (sgd), or devices with more memory"
    layer, needed = largest_layer(space)
    if needed > limit:
        return (
            f"No plan fits: layer {layer!r} alone needs {format_bytes(needed)} on a device, and a plan may use "
            f"{format_bytes(limit)}: {needed - limit} bytes too much. Split that layer, or {remedy}."
        )
    needed, replicas = least_memory(space, wanted)
    return (
        f"No plan fits: every layer fits alone, but the most frugal plan (replicas {_row(replicas)}) needs "
        f"{format_bytes(needed)} on its fullest device, and may use {format_bytes(limit)}: {needed - limit} bytes "
        f"too much. Give more than {space.num_devices} device(s), or {remedy}."
    )


def _row(replicas: Sequence[int]) -> str:
    return "-".join(map(str, replicas)) or "none"
