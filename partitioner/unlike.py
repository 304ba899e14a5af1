"""What unlike devices change about a question: a limit of memory and a speed for every kind of them.

The pools of a topology are the kinds. A stage stands in one pool, so degrees are those that some pool's hosts hold,
and searches that know of one kind of device only are refused.
"""

from collections.abc import Sequence
from dataclasses import replace

from dpart.partitioner.quantities import degrees
from dpart.partitioner.topology import Device, Pool, Topology
from dpart.profiler.devices import DeviceKind, device_kind
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError


def memory_limits(topology: Topology, given: int | Sequence[int] | None, headroom: float) -> tuple[int, ...]:
    """Bytes that a plan may use of each device of each pool.

    Args:
        given: For every device, or for those of each pool; None for their memory less the headroom.
        headroom: Share of each device's memory that is left free.

    Raises:
        UserError: There is no such limit.
    """
    if given is None:
        if not 0 <= headroom < 1:
            raise UserError(f"memory headroom {headroom}: expected a share from 0 up to 1, such as 0.1.")
        given = [int(pool.device.memory_bytes * (1 - headroom)) for pool in topology.pools]
    limits = (given,) * len(topology.pools) if isinstance(given, int) else tuple(given)
    if len(limits) != len(topology.pools):
        raise UserError(f"{len(limits)} memory limits for {len(topology.pools)} kinds of devices: give one for each.")
    for limit in limits:
        if limit < 1:
            raise UserError(f"memory limit {limit} bytes: expected at least 1.")
    return limits


def allowed_degrees(profile: Profile, topology: Topology, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Tensor-parallel degrees that the profile knows, and that fill a part of some host.

    Raises:
        UserError: A degree that was asked for does not.
    """
    known = degrees(profile)
    held = tuple(t for t in known if any(pool.degrees((t,)) for pool in topology.pools))
    if wanted is None:
        return held
    hosts = " or ".join(str(n) for n in dict.fromkeys(_host(pool) for pool in topology.pools))
    faults = []
    for t in wanted:
        if t not in known:
            faults.append(f"tensor-parallel degree {t}: the profile has {', '.join(map(str, known))}.")
        elif t not in held:
            faults.append(f"tensor-parallel degree {t}: a host has {hosts} devices, which are no groups of {t}.")
    if faults or not wanted:
        raise UserError("\n".join(faults) or "No tensor-parallel degree is allowed: give at least 1.")
    return tuple(sorted(set(wanted)))


def refuse_unlike(topology: Topology, what: str) -> None:
    """For searches that know of one kind of device.

    Raises:
        UserError: There are several.
    """
    if len(topology.pools) > 1:
        kinds = ", ".join(f"{pool.num_devices} x {pool.device.name}" for pool in topology.pools)
        raise UserError(
            f"{what} needs hosts that are all alike, and these are several kinds ({kinds}): use the method dp, which "
            "takes as many replicas of every stage where they are given, or ilp, or the devices of one kind."
        )


def with_speeds(topology: Topology, profile: Profile) -> tuple[Topology, str]:
    """The topology with the speeds of unlike devices from the catalogue, where it tells none; and a note of them.

    A kind counts by its peak rate for numbers as wide as the model's, against the device that the profile is for, or
    against the first pool's if no pool has that one.
    """
    devices = [pool.device for pool in topology.pools]
    kinds = [known_kind(device.name) for device in devices]
    if len({device.name for device in devices}) == 1 or any(device.speed != 1 for device in devices):
        return topology, ""
    if any(kind is None for kind in kinds):
        return topology, "The topology tells no speeds of its unlike devices: all are taken to be equally fast."
    measured = known_kind(profile.machine.device)
    reference = measured if measured in kinds else kinds[0]
    # Parameters of a model in mixed precision are narrow, and so are its products.
    dtype = "bfloat16" if profile.graph.parameters and _is_narrow(profile) else "float32"
    speeds = [_rate(kind, dtype) / _rate(reference, dtype) for kind in kinds]
    listed = ", ".join(f"{device.name} {speed:.3g}" for device, speed in zip(devices, speeds, strict=True))
    pools = [_faster(pool, speed) for pool, speed in zip(topology.pools, speeds, strict=True)]
    first, *others = pools
    changed = replace(topology, device=first.device, others=tuple(others))
    return changed, f"Speeds of unlike devices are by their peak rates in {dtype} ({listed}): give speeds to be sure."


def known_kind(name: str) -> DeviceKind | None:
    """What the catalogue has under a name that a person or a driver gives a device; None for nothing."""
    try:
        return device_kind(name)
    except UserError:
        return None


def _rate(kind: DeviceKind | None, dtype: str) -> float:
    assert kind is not None, "the catalogue has it"
    return kind.flops.of(dtype)


def _is_narrow(profile: Profile) -> bool:
    return all(p.dtype in ("bfloat16", "float16") for p in profile.graph.parameters if p.trainable)


def _faster(pool: Pool, speed: float) -> Pool:
    device: Device = replace(pool.device, speed=speed)
    return replace(pool, device=device)


def _host(pool: Pool) -> int:
    return min(pool.group_sizes[0], pool.num_devices)
