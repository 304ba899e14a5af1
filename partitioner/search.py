"""The one interface between the cost model and the searchers: a `Problem` goes in, a `Found` comes out.

A searcher knows no seconds and no bytes of its own. It sees the *states* (ideals of the layer graph, from the
empty one to everything), and asks the problem what a stage, a pair of states, costs at a level of the
topology::

    level 1   |      stage A on 1 group       |  stage B on 3 groups  |     machines[1] = 4 groups
    level 0   | a0 | a1 on 2 devices |  a2    |  b0 on all 4 devices  |     machines[0] = 4 devices each

The value of a plan is its bottleneck, the largest value of its stages. Every searcher is one file with one
signature, ``search(problem, *, ...options) -> Found | None``, where None says that no plan fits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Problem(Protocol):
    """The costs of stages as a searcher sees them.

    States are ideals of the layer graph, 0 the empty one, the last one everything, in an order in which a
    subset stands before what holds it; a stage is a pair (i, j) of states with i inside j. All matrices are
    [S, S] in seconds per microbatch, and infinite where (i, j) is no stage or does not fit in memory.
    """

    @property
    def nested(self) -> Mask:
        """[S, S]: whether state i is a proper subset of state j."""
        ...

    @property
    def machines(self) -> tuple[int, ...]:
        """Machines per level, innermost first: level 0's are devices, level 1's groups of machines[0] devices."""
        ...

    @property
    def use_fewer(self) -> bool:
        """Whether a plan may leave machines of the outermost level unused."""
        ...

    def compute_seconds(self) -> Matrix:
        """Forward and backward of stage (i, j) on one device."""
        ...

    def unsplit_seconds(self, level: int, num_machines: int, after: int, inner: Matrix) -> Matrix:
        """Value of (i, j) as the first stage of its sub-pipeline at this level.

        Args:
            level: Of the topology; 0 is the innermost.
            num_machines: Machines of this level the stage is replicated over.
            after: Machines of this level that stand behind it in the same sub-pipeline.
            inner: The best value of (i, j) on one machine of this level; never decreasing an entry of it may
                lower the answer's entry.
        """
        ...

    def stage_seconds(self, level: int, num_machines: int, after: int, inner: Matrix) -> Matrix:
        """The same for a stage that follows a split: with its incoming transfer, and outgoing where it has one."""
        ...


@dataclass(frozen=True)
class FoundStage:
    """A stage: the layers of state `stop` that are not in state `start`, on `num_replicas` devices."""

    start: int
    stop: int
    num_replicas: int


@dataclass(frozen=True)
class LevelStage:
    """A stage as one level of the topology has it: states (start, stop) on `num_machines` machines of the level."""

    start: int
    stop: int
    num_machines: int
    after: int


@dataclass(frozen=True)
class Found:
    """The answer of a searcher.

    Attributes:
        stages: In the order of execution.
        bottleneck_seconds: The largest stage value, seconds per microbatch.
        optimal: Whether the searcher proved that no plan over the problem's states has a smaller bottleneck.
        lower_bound_seconds: Proved: no plan over the problem's states has a smaller bottleneck than this.
        search_seconds: What the search took.
        levels: The stages of each level of the topology, outermost level first; those of an inner level stand
            in order too, so that each outer stage covers a run of them. A stage with fewer machines behind it
            than its neighbour lies nearer the end of its sub-pipeline.
    """

    stages: tuple[FoundStage, ...]
    bottleneck_seconds: float
    optimal: bool
    lower_bound_seconds: float
    search_seconds: float
    levels: tuple[tuple[LevelStage, ...], ...]


def flatten(levels: Sequence[Sequence[LevelStage]]) -> tuple[FoundStage, ...]:
    """The innermost stages, each with its devices: the product of the machines at every level above it.

    An outer stage on R machines whose inner pipeline has a stage on r devices is a stage of r * R replicas.
    """
    return tuple(
        FoundStage(
            stage.start,
            stage.stop,
            math.prod(
                outer.num_machines
                for level in levels
                for outer in level
                if outer.start <= stage.start and stage.stop <= outer.stop
            ),
        )
        for stage in levels[-1]
    )
