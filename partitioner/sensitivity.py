"""Sensitivity: over which bandwidths, and under how wrong a profile, the same plan stays the best.

A plan stays the best where planning again gives the same decisions, or none that is faster by more than what the
search tolerates. The bandwidths at which it does are taken to be one stretch, whose ends are found by halving on a
logarithmic scale::

    1/8 ------------|=========== 1 =======|------------------- 8
         another    low       as it is    high      another
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from dpart.partitioner.answers import BandwidthRange, Robustness
from dpart.partitioner.case import Case, is_as_good, same_decisions
from dpart.partitioner.folding import fold
from dpart.partitioner.plan import Plan
from dpart.partitioner.plan_words import in_words
from dpart.partitioner.variants import LevelPlace, level_places, with_bandwidth
from dpart.profiler.profile import LayerCost, Profile
from dpart.runtime.errors import UserError

_WIDEST = 8.0


def bandwidth_ranges(
    case: Case, plan: Plan, precision: float, progress: Callable[[str], None]
) -> tuple[BandwidthRange, ...]:
    """For every level, the bandwidths between an eighth and eight times its own over which the plan stays the best.

    Args:
        precision: Relative, of the ends.

    Raises:
        UserError: The precision is not positive.
    """
    if not precision > 0:
        raise UserError(f"precision {precision:g}: expected a share above zero, such as 0.05.")
    return tuple(_range(case, plan, place, precision, progress) for place in level_places(case.topology))


def _range(
    case: Case, plan: Plan, place: LevelPlace, precision: float, progress: Callable[[str], None]
) -> BandwidthRange:
    low, below = _end(case, plan, place, 1 / _WIDEST, precision, progress)
    high, above = _end(case, plan, place, _WIDEST, precision, progress)
    own = place.bandwidth_bytes_per_second
    return BandwidthRange(place.name, own, own * low, own * high, below, above)


def _end(
    case: Case, plan: Plan, place: LevelPlace, end: float, precision: float, progress: Callable[[str], None]
) -> tuple[float, str | None]:
    """The last factor towards `end` at which the plan stays the best, and what wins a little beyond it."""
    inside, outside = 0.0, math.log(end)
    winner = _winner(case, plan, place, end, progress)
    if winner is None:
        return end, None
    while abs(outside - inside) > math.log1p(precision):
        middle = (inside + outside) / 2
        found = _winner(case, plan, place, math.exp(middle), progress)
        if found is None:
            inside = middle
        else:
            outside, winner = middle, found
    return math.exp(inside), winner


def _winner(case: Case, plan: Plan, place: LevelPlace, factor: float, progress: Callable[[str], None]) -> str | None:
    """The plan that beats the given one at so many times the bandwidth, in words; None if none does."""
    progress(f"a plan at {factor:.2f} times the bandwidth of {place.name!r}")
    topology = with_bandwidth(case.topology, place, factor)
    best = case.plan(topology=topology)
    if same_decisions(plan, best):
        return None
    kept = case.keep(plan, topology=topology).step_seconds
    if is_as_good(kept, best.step_seconds, case.margin):
        return None
    return in_words(best.stages)


def robustness(
    case: Case, plan: Plan, relative_error: float, draws: int, seed: int, progress: Callable[[str], None]
) -> Robustness:
    """How a plan stands if the times of layers are wrong by a random factor each.

    Raises:
        UserError: The error is negative, or there is no draw.
    """
    if not relative_error >= 0 or draws < 1:
        raise UserError(f"{draws} draws with relative error {relative_error:g}: expected at least 1, and at least 0.")
    rng, losses, same = random.Random(seed), [], 0
    for draw in range(draws):
        progress(f"a plan for wrong profile {draw + 1} of {draws}")
        wrong = perturbed(case.profile, relative_error, rng)
        best = case.plan(profile=wrong)
        kept = case.keep(plan, profile=wrong).step_seconds
        wins = same_decisions(plan, best) or is_as_good(kept, best.step_seconds, case.margin)
        same += wins
        losses.append(0.0 if wins else kept / best.step_seconds - 1)
    return Robustness(relative_error, draws, seed, same / draws, max(losses), sum(losses) / draws)


def perturbed(profile: Profile, relative_error: float, rng: random.Random) -> Profile:
    """The profile with its times multiplied, forward and backward apart, each by the exponential of a normal number.

    Layers that cost the same, as the repeated blocks of a model do, are wrong by the same factor: they do the same
    work, and what is wrong about one is wrong about all. So is one layer at all tensor-parallel degrees.
    """
    profile = fold(profile)
    factors: dict[object, tuple[float, float]] = {}
    costs = []
    for layer, cost in zip(profile.graph.layers, profile.costs, strict=True):
        key = layer.kind, replace(cost, layer="", forward_spread_seconds=0.0, backward_spread_seconds=0.0)
        if key not in factors:
            factors[key] = math.exp(rng.gauss(0, relative_error)), math.exp(rng.gauss(0, relative_error))
        costs.append(_scaled(cost, *factors[key]))
    return replace(profile, costs=tuple(costs))


def _scaled(cost: LayerCost, forward: float, backward: float) -> LayerCost:
    splits = tuple(
        replace(
            split,
            forward_seconds=split.forward_seconds * forward,
            backward_seconds=split.backward_seconds * backward,
            weight_backward_seconds=split.weight_backward_seconds * backward,
        )
        for split in cost.splits
    )
    return replace(
        cost,
        forward_seconds=cost.forward_seconds * forward,
        backward_seconds=cost.backward_seconds * backward,
        weight_backward_seconds=cost.weight_backward_seconds * backward,
        splits=splits,
    )
