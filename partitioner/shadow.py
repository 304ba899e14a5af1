"""Shadow prices: the seconds of a step that a little more of one thing saves, and what binds now.

For each thing the plan is made again with more of it. The old plan can always be kept, so nothing has a negative
price; with faster links it is played again as it is, and counts if it beats what the search finds.
"""

from collections.abc import Callable

from dpart.partitioner.answers import Binding, PriceKind, Resource, ShadowPrice, ShadowPrices
from dpart.partitioner.case import Case, is_as_good, same_decisions
from dpart.partitioner.plan import Plan
from dpart.partitioner.plan_words import in_words
from dpart.partitioner.topology import Topology
from dpart.partitioner.units import format_bytes
from dpart.partitioner.variants import growths, level_places, with_bandwidth
from dpart.runtime.errors import UserError

_NO_LIMIT_BYTES = 2**50


def prices(
    case: Case, plan: Plan, memory_bytes: int, bandwidth_share: float, progress: Callable[[str], None]
) -> ShadowPrices:
    """What binds a plan of a case, and the prices.

    Raises:
        UserError: More of nothing was asked for.
    """
    if memory_bytes < 1:
        raise UserError(f"{memory_bytes} bytes more memory: expected at least 1.")
    if not bandwidth_share > 0:
        raise UserError(f"{bandwidth_share:g} more bandwidth: expected a share above zero, such as 0.1.")
    found = [*_of_devices(case, plan, progress), _of_memory(case, plan, memory_bytes, progress)]
    found += _of_bandwidths(case, plan, bandwidth_share, progress)
    return ShadowPrices(binding(case, plan, progress), tuple(found))


def binding(case: Case, plan: Plan, progress: Callable[[str], None]) -> Binding:
    """The stage and resource that a plan waits for, and whether memory binds."""
    kept = case.keep(plan)
    s = max(range(len(kept.stages)), key=lambda i: kept.stage_seconds[i])
    stage, m = kept.stages[s], plan.num_microbatches
    own = -(-m // stage.num_replicas)
    compute = own / m * (stage.forward_seconds + stage.backward_seconds)
    all_reduce = stage.all_reduce_seconds / m
    resource: Resource = "compute" if compute >= all_reduce else "all-reduce"
    if kept.stage_seconds[s] > (compute + all_reduce) * (1 + 1e-9):
        resource = "transfer"
    fullest = max(range(len(kept.stages)), key=lambda i: kept.stages[i].memory.total_bytes)
    progress("a plan without a limit of memory")
    unlimited = case.plan(memory_limit_bytes=_NO_LIMIT_BYTES)
    return Binding(
        stage=s,
        resource=resource,
        stage_seconds=kept.stage_seconds[s],
        compute_seconds=compute,
        all_reduce_seconds=all_reduce,
        fullest_stage=fullest,
        fullest_bytes=kept.stages[fullest].memory.total_bytes,
        memory_limit_bytes=plan.memory_limit_bytes,
        unlimited_step_seconds=min(unlimited.step_seconds, plan.step_seconds),
    )


def _of_devices(case: Case, plan: Plan, progress: Callable[[str], None]) -> list[ShadowPrice]:
    """The next device of the topology, if the options leave one out; else one of every kind."""
    used, there = case.topology.num_devices, case.whole.num_devices
    if used < there:
        name = case.whole.device_of(used).name
        ways: list[tuple[int, str, tuple[Topology, ...]]] = [
            (1, f"one more device ({name})", (case.whole.first(used + 1),))
        ]
    else:
        ways = [(growth.added, growth.what, growth.topologies) for growth in growths(case.topology)]
    found = []
    for added, what, topologies in ways:
        progress(f"a plan with {what}")
        plans = [_planned(case, topology) for topology in topologies]
        best = min((p for p in plans if p is not None), key=lambda p: p.step_seconds, default=plan)
        found.append(_price("device", what, added, plan, plan.step_seconds, best))
    return found


def _of_memory(case: Case, plan: Plan, more: int, progress: Callable[[str], None]) -> ShadowPrice:
    what = f"{format_bytes(more)} more memory of each device"
    progress(f"a plan with {what}")
    limits = plan.pool_limits_bytes or (plan.memory_limit_bytes,)
    larger = tuple(limit + more for limit in limits)
    again = case.plan(memory_limit_bytes=larger if len(larger) > 1 else larger[0])
    return _price("memory", what, more, plan, plan.step_seconds, again)


def _of_bandwidths(case: Case, plan: Plan, share: float, progress: Callable[[str], None]) -> list[ShadowPrice]:
    found = []
    for place in level_places(case.topology):
        what = f"{share:.0%} more bandwidth of level {place.name!r}"
        progress(f"a plan with {what}")
        faster = with_bandwidth(case.topology, place, 1 + share)
        kept = case.keep(plan, topology=faster).step_seconds
        added = share * place.bandwidth_bytes_per_second
        found.append(_price("bandwidth", what, added, plan, kept, case.plan(topology=faster)))
    return found


def _price(kind: PriceKind, what: str, added: float, old: Plan, kept_seconds: float, new: Plan) -> ShadowPrice:
    """The price by the better of the old plan, kept, and the new one.

    Args:
        kept_seconds: What a step of the old plan takes with more of it.
    """
    keeps = is_as_good(kept_seconds, new.step_seconds)
    seconds = min(kept_seconds, new.step_seconds, old.step_seconds)
    return ShadowPrice(
        kind=kind,
        what=what,
        added=added,
        step_seconds=seconds,
        saved_seconds=old.step_seconds - seconds,
        stages=in_words((old if keeps else new).stages),
        same_plan=keeps or same_decisions(old, new),
    )


def _planned(case: Case, topology: Topology) -> Plan | None:
    """The plan on more devices; None where the options do not go with them."""
    try:
        return case.plan(topology=topology)
    except UserError:
        return None
