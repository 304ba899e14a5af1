"""Other things to want than the fastest step: the cheapest one, or the fewest devices that are fast enough.

Both ask the same question of several clusters, the first 1, 2, 3, ... devices of the one given. More devices never
make a step slower, since a plan may leave some idle; so the fewest that meet a target are found by halving::

    devices        1     2     4     8    16                        target 3 s: between 4 and 8, then 6, 5
    step, s       12    6.3   3.4   1.9   1.2
    cost         1.0   1.05  1.13   1.3   1.6   of one device       cheapest: 1 device
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from dpart.partitioner.partition import NoPlanError, partition
from dpart.partitioner.plan import Plan
from dpart.partitioner.topology import Topology, local_topology
from dpart.partitioner.units import format_seconds
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError

Objective = Literal["time", "cost", "devices"]

_EVERY_COUNT = 16


def partition_for(
    profile: Profile,
    topology: Topology | None = None,
    *,
    objective: Objective = "time",
    target_step_seconds: float | None = None,
    **options: Any,
) -> Plan:
    """The plan that is best by an objective.

    Args:
        objective: ``time``: the fastest step. ``cost``: the least dollars per step, by the prices of the devices
            used. ``devices``: the fewest devices whose step takes at most `target_step_seconds`.
        options: Of `partition`.

    Raises:
        UserError: The objective lacks a target or prices, or no plan meets the target.
    """
    if objective == "devices":
        if target_step_seconds is None:
            raise UserError("The objective 'devices' needs a target for the time of a step.")
    elif target_step_seconds is not None:
        raise UserError(f"A target for the time of a step is for the objective 'devices', not {objective!r}.")
    if objective == "time":
        return partition(profile, topology, **options)
    topology = local_topology(profile.machine) if topology is None else topology
    most = options.pop("num_devices", None) or topology.num_devices
    if objective == "cost":
        return _cheapest(profile, topology, most, options)
    assert target_step_seconds is not None
    return _fewest(profile, topology, most, target_step_seconds, options)


def dollars_per_step(plan: Plan, topology: Topology) -> float:
    """What the devices that a plan uses cost for the time of a step."""
    used = (device for stage in plan.stages for device in stage.devices)
    return sum(topology.device_of(device).price_dollars_per_hour for device in used) * plan.step_seconds / 3600


def _cheapest(profile: Profile, topology: Topology, most: int, options: dict[str, Any]) -> Plan:
    unpriced = sorted({p.device.name for p in topology.pools if not p.device.price_dollars_per_hour})
    if unpriced:
        raise UserError(
            f"The objective 'cost' needs a price of every device; there is none for {', '.join(unpriced)}: give "
            "dollars_per_hour in the topology."
        )
    found: list[tuple[float, int, Plan]] = []
    for count in _counts(most):
        plan = _on(profile, topology, count, options)
        if plan is not None:
            found.append((dollars_per_step(plan, topology), count, plan))
    if not found:
        return partition(profile, topology, num_devices=most, **options)
    dollars, count, plan = min(found, key=lambda item: item[:2])
    fastest = min(found, key=lambda item: item[2].step_seconds)
    note = (
        f"Cheapest of the plans for {len(found)} counts of devices: ${dollars:.4g} a step. The fastest takes "
        f"{format_seconds(fastest[2].step_seconds)} for ${fastest[0]:.4g}."
    )
    return replace(plan, notes=(note, *plan.notes))


def _fewest(profile: Profile, topology: Topology, most: int, target: float, options: dict[str, Any]) -> Plan:
    plans = {most: _on(profile, topology, most, options)}
    best = plans[most]
    if best is None:
        return partition(profile, topology, num_devices=most, **options)
    if best.step_seconds > target:
        raise UserError(
            f"No plan on up to {most} devices has a step of {format_seconds(target)}: the fastest takes "
            f"{format_seconds(best.step_seconds)}. Give more devices, or a larger target."
        )
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        plan = _on(profile, topology, middle, options)
        if plan is not None and plan.step_seconds <= target:
            high, best = middle, plan
        else:
            low = middle
    note = f"The fewest devices found for a step of {format_seconds(target)}: {high} of {most}."
    return replace(best, notes=(note, *best.notes))


def _on(profile: Profile, topology: Topology, count: int, options: dict[str, Any]) -> Plan | None:
    """The plan for the first so many devices; None if none fits."""
    try:
        return partition(profile, topology, num_devices=count, **options)
    except NoPlanError:
        return None


def _counts(most: int) -> Sequence[int]:
    """Every count up to some, then the powers of two."""
    powers = (1 << i for i in range(most.bit_length()))
    return sorted({*range(1, min(most, _EVERY_COUNT) + 1), *powers, most})
