"""Which arcs a programme over options needs: those of plans that can be the best, given a good plan at hand.

Step by step the ways to run stages become fewer: those within the limit, those that no other one makes superfluous,
those on a path as good as the plan at hand; only then are nodes told apart by the replicas behind them. What was
asked of a plan's shape beyond its devices is left to the programme, apart from the replicas: which arcs have them
is known by what stands behind.
"""

from dataclasses import dataclass, replace

import numpy as np

from dpart.partitioner.ilp_arcs import Arcs, Mask, arcs, cheap, least_busy_seconds, relaxed, within, worthwhile
from dpart.partitioner.labels import LabelSearch, Path
from dpart.partitioner.options import Options
from dpart.partitioner.pareto import Column
from dpart.partitioner.sorted_options import SortedOptions

SLACK = 1 + 1e-9
"""An upper bound computed in another order may differ in its last digits."""


@dataclass(frozen=True)
class PinnedLayer:
    """A layer that has to stand in a stage.

    Attributes:
        holds: [S]: states that hold the layer.
        stage: Counted from 0.
    """

    holds: Mask
    stage: int


@dataclass(frozen=True)
class Asked:
    """What a plan may use, and what its shape has to be; None where nothing is asked for.

    Attributes:
        num_devices: At most.
        budgets: Devices of each kind at most, where options take unlike ones.
        num_stages: Exactly so many.
        max_stages: At most so many.
        replicas: Exactly these, stage by stage.
    """

    num_devices: int
    budgets: tuple[int, ...] = ()
    num_stages: int | None = None
    max_stages: int | None = None
    replicas: tuple[int, ...] | None = None
    pins: tuple[PinnedLayer, ...] = ()

    @property
    def exact_stages(self) -> tuple[int, ...]:
        """How many stages a plan has, as it is asked for in one way or in both."""
        counts = (self.num_stages, None if self.replicas is None else len(self.replicas))
        return tuple(count for count in counts if count is not None)

    def allows(self, options: Options, path: Path) -> bool:
        """Whether the path of a search that knows of devices and stages has the replicas and keeps the pins."""
        rows = list(path.chosen)
        if any(count != len(rows) for count in self.exact_stages) or len(rows) > (self.max_stages or len(rows)):
            return False
        if self.replicas is not None and options.replicas[rows].tolist() != list(self.replicas):
            return False
        starts, stops = options.start[rows], options.stop[rows]
        return all(
            pin.stage < len(rows) and pin.holds[stops[pin.stage]] and not pin.holds[starts[pin.stage]]
            for pin in self.pins
        )


def narrowed(options: Options, asked: Asked, upper_seconds: float, max_labels: int) -> tuple[Arcs, Path | None]:
    """The arcs of all plans that can be the best, with values no less than the least bottleneck; and a good plan.

    Args:
        max_labels: Per state, of the search for the good plan; 0 for none.
    """
    num_devices, limit = asked.num_devices, upper_seconds * SLACK
    ordered = SortedOptions.sort(options)
    if asked.replicas is not None:
        ordered = ordered.only(np.isin(ordered.replicas, asked.replicas))
    ordered = _only(ordered, cheap(relaxed(replace(ordered, value=ordered.busy_seconds)), limit))
    ordered = _useful(ordered, asked, least_busy_seconds(relaxed(ordered), num_devices))
    ordered = _only(ordered, worthwhile(relaxed(ordered), num_devices, limit))
    first = _at_hand(options, ordered, asked, limit, max_labels)
    if first is not None:
        limit = min(limit, first.value * SLACK)
        ordered = _only(ordered, worthwhile(relaxed(ordered), num_devices, limit))
    made = _arcs(ordered, asked)
    # Below the least bottleneck busy times make no difference, so more options are no better than others.
    floor = least_busy_seconds(made, num_devices)
    if floor > float(ordered.value.min(initial=np.inf)):
        made = _arcs(_useful(ordered, asked, floor), asked)
    return worthwhile(made, num_devices, limit), first


def _useful(ordered: SortedOptions, asked: Asked, floor: float) -> SortedOptions:
    """Values are busy seconds, no less than the floor; without options that others make superfluous."""
    valued = replace(ordered, value=np.maximum(ordered.busy_seconds, floor))
    needs: list[Column] = [*map(valued.devices_of, range(max(1, len(asked.budgets)))), valued.latency_seconds]
    if asked.replicas is not None:
        # Fewer replicas are no better than those asked for.
        needs.append(-valued.replicas)
    return valued.trimmed(valued.value, *needs)


def _only(ordered: SortedOptions, made: Arcs) -> SortedOptions:
    """The options of relaxed arcs."""
    mask = np.zeros(len(ordered.start), np.bool_)
    mask[made.option] = True
    return ordered.only(mask)


def _arcs(ordered: SortedOptions, asked: Asked) -> Arcs:
    """All of them; where replicas are asked for, those with one of these in front of all that come later."""
    made = arcs(ordered, asked.num_devices, apart=asked.replicas is not None)
    if asked.replicas is None:
        return made
    behind = np.cumsum(asked.replicas[::-1])[::-1] - asked.replicas
    pairs = np.stack([made.of(ordered.replicas), made.behind], axis=1)
    wanted = np.stack([asked.replicas, behind], axis=1)
    made = made.only((pairs[:, None, :] == wanted[None, :, :]).all(axis=2).any(axis=1))
    return within(made, asked.num_devices)


def _at_hand(options: Options, ordered: SortedOptions, asked: Asked, limit: float, max_labels: int) -> Path | None:
    """A good plan, often the best."""
    if not max_labels or not len(ordered.start):
        return None
    found = LabelSearch(options.take(ordered.index)).exact(
        asked.num_devices,
        upper_bound=limit,
        least_busy_seconds=float(ordered.value.min()),
        num_stages=asked.exact_stages[0] if asked.exact_stages else None,
        max_stages=None if asked.exact_stages else asked.max_stages,
        max_labels=max_labels,
        budgets=asked.budgets,
    )
    if found.path is None:
        return None
    path = replace(found.path, chosen=tuple(ordered.index[list(found.path.chosen)].tolist()))
    return path if asked.allows(options, path) else None
