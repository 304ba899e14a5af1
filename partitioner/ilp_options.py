"""`method="ilp"`: the whole space of plans as an integer programme, a path through the ways to run stages.

Every arc of ``ilp_arcs.py`` is a stage with everything about it decided, in front of a node that knows the replicas
behind it; x(arc) is 1 where the plan has it. B is the bottleneck::

    minimise  B + sum of latency(a) x(a)
      path       x leaves state 0 once, and every node that it enters
      cuts       B >= sum of busy(a) x(a) over the arcs that cross a cut          state  0    1    2    3   last
      devices    sum of devices(a) x(a) <= K, kind by kind                        arc    |---------|----|----|
      work       sum of devices(a) busy(a) x(a) <= K B                            cut        :    :
      stages     sum of x(a) = or <= what is asked for
      pins       sum of x(a) = s over the arcs whose stage ends before a layer pinned to stage s

States are numbered so that a plan goes up, hence just one of its arcs crosses between a number and the next: a row
for each such cut bounds B by a whole sum. The row of the work adds nothing but to the relaxation. B starts at the
least bottleneck of any plan within the devices, which is found by halving, and arcs that no plan as good as one at
hand can have are no variables (``ilp_narrow.py``): of five million options a few hundred are.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dpart.partitioner.evaluate import Shape
from dpart.partitioner.ilp_arcs import Arcs, Mask
from dpart.partitioner.ilp_engine import TOLERANCE, Answer, Engine, SolverError, first_engine, minimise
from dpart.partitioner.ilp_narrow import SLACK, Asked, PinnedLayer, narrowed
from dpart.partitioner.ilp_rows import programme
from dpart.partitioner.options import Options
from dpart.partitioner.plan import Pin
from dpart.partitioner.prices import Prices
from dpart.partitioner.uneven import AllOptions

__all__ = ["Asked", "Engine", "Found", "Programmed", "SolverError", "check_size", "choose", "pinned", "search"]

Status = Literal["optimal", "gap", "stopped", "none"]

_UNITS = 1000.0
"""Of the limit of the objective: solvers have absolute tolerances, and CBC prints bounds with three decimals."""

_FIRST_LABELS = 200
"""Labels per state of the search for a plan at hand."""

_MAX_VARIABLES = 100_000

_MAX_PRICED = 40_000_000
_MAX_OPTIONS = 20_000_000
"""What would take more than a gigabyte or two."""


@dataclass(frozen=True)
class Programmed:
    """What the programme came to, in terms of options.

    Attributes:
        chosen: Per stage, first to last, an index into the options; None if no plan was found.
        objective_seconds: Of it; infinite if there is none.
        lower_bound_seconds: No plan has a smaller objective, or none has one below the upper bound, if this is that.
        status: ``optimal``, to the tolerance of solvers, 1e-6; ``gap``: as close as was asked for; ``stopped`` by the
            time limit; ``none``: there is no plan, or none up to the upper bound, to the same tolerance.
        num_variables: Of the programme; 0 if it was decided without a solver.
    """

    chosen: tuple[int, ...] | None
    objective_seconds: float
    lower_bound_seconds: float
    status: Status
    num_variables: int


@dataclass(frozen=True)
class Found:
    """What the search gave.

    Attributes:
        shape: The plan; None if none was found.
        objective_seconds: Of it; infinite if there is none.
        lower_bound_seconds: As in `Programmed`.
        status: As in `Programmed`.
        solver: Its name.
        seconds: That the whole search took.
        num_variables: As in `Programmed`.
    """

    shape: Shape | None
    objective_seconds: float
    lower_bound_seconds: float
    status: Status
    solver: str
    seconds: float
    num_variables: int

    @property
    def gap(self) -> float:
        """Of the objective to the bound, relative to the bound; infinite where there is no plan, or no bound."""
        if self.objective_seconds == 0.0:
            return 0.0
        return self.objective_seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds > 0 else np.inf


def search(
    prices: Prices,
    num_devices: int,
    *,
    upper_seconds: float = np.inf,
    num_stages: int | None = None,
    max_stages: int | None = None,
    replicas: Sequence[int] | None = None,
    pins: Sequence[Pin] = (),
    time_limit_seconds: float = 60.0,
    gap: float = 0.0,
    solver: Engine | None = None,
) -> Found:
    """The plan of least objective.

    Args:
        upper_seconds: Only plans up to it are looked for.
        num_stages: Exactly so many.
        max_stages: At most so many.
        replicas: Exactly these, stage by stage.
        pins: Layers that have to stand in a stage.
        time_limit_seconds: For the whole search; when it has passed, the best plan so far is returned.
        gap: Distance from the lower bound, relative to the objective, at which the solver may stop.
        solver: None for the first one installed.

    Raises:
        SolverError: No solver is installed, or it died, or the programme is too large.
    """
    began = time.perf_counter()
    solver = solver or first_engine()
    check_size(prices, num_devices)
    problem = AllOptions(prices, num_devices)
    options = problem.options(upper_seconds * SLACK)
    asked = Asked(
        num_devices,
        problem.budgets if len(problem.budgets) > 1 else (),
        num_stages,
        max_stages,
        None if replicas is None else tuple(replicas),
        tuple(pinned(prices, options.num_states, pin) for pin in pins),
    )
    left = time_limit_seconds - (time.perf_counter() - began)
    found = choose(options, asked, upper_seconds=upper_seconds, time_limit_seconds=left, gap=gap, solver=solver)
    return Found(
        None if found.chosen is None else tuple(problem.stage(options, index) for index in found.chosen),
        found.objective_seconds,
        found.lower_bound_seconds,
        found.status,
        solver.name,
        time.perf_counter() - began,
        found.num_variables,
    )


def choose(
    options: Options,
    asked: Asked,
    *,
    upper_seconds: float = np.inf,
    time_limit_seconds: float = 60.0,
    gap: float = 0.0,
    max_labels: int = _FIRST_LABELS,
    solver: Engine | None = None,
) -> Programmed:
    """The row of options of least objective, as `LabelSearch.exact` finds it.

    Args:
        max_labels: Per state, of the search for a plan at hand; 0 for no such search.

    Raises:
        SolverError: No solver is installed, or it died, or the programme is too large.
    """
    deadline = time.perf_counter() + time_limit_seconds
    nothing = Programmed(None, np.inf, upper_seconds, "none", 0)
    if not len(options.start):
        return nothing
    made, first = narrowed(options, asked, upper_seconds, max_labels)
    if not len(made):
        return nothing
    if len(made) > _MAX_VARIABLES:
        raise SolverError(f"the programme would have {len(made)} variables, more than {_MAX_VARIABLES}")
    limit = min(upper_seconds, first.value if first else np.inf)
    low = float(made.of(made.options.value).min()) + made.least(made.of(made.options.latency_seconds))
    unit = (limit if np.isfinite(limit) else low) / _UNITS or 1.0
    model, variables = programme(made, asked, unit)
    answer = minimise(model, time_limit_seconds=deadline - time.perf_counter(), gap=gap, engine=solver)
    chosen, objective = (first.chosen, first.value) if first else (None, np.inf)
    if answer.values is not None:
        found = _path(made, np.array([answer.values.get(v.name, 0.0) > 0.5 for v in variables]))
        value = _objective(options, found)
        # Bounds leave arcs out one by one, and what is left may have other plans above the limit.
        if value < min(objective, upper_seconds * SLACK):
            chosen, objective = found, value
    answer = replace(answer, bound=max(low, answer.bound * unit * (1 - TOLERANCE)))
    return _proved(answer, chosen, objective, upper_seconds, len(made))


def _proved(
    answer: Answer, chosen: tuple[int, ...] | None, objective: float, upper_seconds: float, num_variables: int
) -> Programmed:
    """What is known by a solver's answer, its bound in seconds, and of the best plan."""
    status: Status = "gap" if answer.status == "optimal" else "stopped"
    if chosen is None:
        if answer.status == "infeasible" or answer.bound >= upper_seconds * (1 - TOLERANCE):
            status = "none"
        return Programmed(None, np.inf, upper_seconds if status == "none" else answer.bound, status, num_variables)
    bound = min(answer.bound, objective * (1 - TOLERANCE))
    if objective <= bound * (1 + 3 * TOLERANCE):
        status = "optimal"
    return Programmed(chosen, objective, bound, status, num_variables)


def _path(made: Arcs, taken: Mask) -> tuple[int, ...]:
    """The options of the arcs that a solver took, first to last."""
    rows = made.option[taken]
    rows = rows[np.argsort(made.options.start[rows])]
    ends = [0, *made.options.stop[rows].tolist()]
    if ends != [*made.options.start[rows].tolist(), made.options.last]:
        raise SolverError("the solver's answer is no path from the first to the last state")
    return tuple(made.options.index[rows].tolist())


def _objective(options: Options, chosen: tuple[int, ...]) -> float:
    rows = list(chosen)
    return float(options.busy_seconds[rows].max() + options.latency_seconds[rows].sum())


def pinned(prices: Prices, num_nodes: int, pin: Pin) -> PinnedLayer:
    """A pin by states, or by the nodes of options: states, each once for every pool, but for the first and last."""
    layer = [layer.name for layer in prices.profile.graph.layers].index(pin.layer)
    pools = 1 if num_nodes == prices.num_states else len(prices.pools)
    states = (np.arange(num_nodes) + pools - 1) // pools
    return PinnedLayer(prices.contraction.member[states, layer], pin.stage)


def check_size(prices: Prices, num_devices: int) -> None:
    """Refuse what would not fit in memory here, before it is priced.

    Raises:
        SolverError: There are too many options.
    """
    most, pools = min(num_devices, prices.terms.num_microbatches), len(prices.pools)
    ways = len(prices.freedom.degrees) * len(prices.shardings(2)) * (1 if pools == 1 else 2 * pools)
    depths = sum(-(-num_devices // replicas) for replicas in range(1, most + 1))
    if depths * ways * prices.num_signatures > _MAX_PRICED or most * ways * len(prices.start) > _MAX_OPTIONS:
        raise SolverError(f"{len(prices.start)} stages on {num_devices} devices have too many options to list")
