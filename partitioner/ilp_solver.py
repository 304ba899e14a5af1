"""Runs a mixed-integer solver through pulp, silently, and says what it proved.

pulp reports ``Optimal`` also when a solver stopped at its gap or its time limit, so the lower bound is read
from the solver itself: HiGHS is asked, CBC prints it in its log.
"""

import re
import tempfile
from pathlib import Path
from typing import Literal

import pulp

SolverName = Literal["highs", "cbc"]


class SolverError(RuntimeError):
    """The solver is not installed, died, or came to no answer."""


def solve(programme: pulp.LpProblem, *, time_limit_seconds: float, gap: float, solver: SolverName | None) -> float:
    """Minimise, leave the values in the programme's variables, and return the proved lower bound.

    Args:
        time_limit_seconds: After which the solver returns the best it has.
        gap: Relative distance from the bound at which it may stop.
        solver: None for HiGHS where it is installed, else CBC.

    Raises:
        SolverError: There is no answer; the message says why.
    """
    if time_limit_seconds <= 0:
        raise SolverError("the time limit passed before the solver started")
    name: SolverName = solver or ("highs" if pulp.HiGHS().available() else "cbc")
    with tempfile.TemporaryDirectory(prefix="dpart-ilp-") as folder:
        log = Path(folder) / "log"
        if name == "highs":
            engine = pulp.HiGHS(msg=False, timeLimit=time_limit_seconds, gapRel=gap, threads=1)
        else:
            engine = pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_seconds, gapRel=gap, logPath=str(log))
        if not engine.available():
            raise SolverError(f"the solver {name} is not installed")
        try:
            programme.solve(engine)
        except (pulp.PulpSolverError, OSError) as error:
            raise SolverError(f"the solver {name} died: {error}") from error
        if programme.status != pulp.LpStatusOptimal:
            status = pulp.LpStatus[programme.status]
            raise SolverError(f"the solver {name} found no plan in {time_limit_seconds:.0f} s ({status})")
        value = float(pulp.value(programme.objective))
        bound = float(programme.solverModel.getInfo().mip_dual_bound) if name == "highs" else _cbc_bound(log, value)
    return min(value, bound)


def _cbc_bound(log: Path, value: float) -> float:
    """CBC prints a bound where it stopped early, rounded to three decimals, and none where it closed the gap."""
    text = log.read_text(encoding="utf-8", errors="replace")
    bounds = re.findall(r"^Lower bound:\s+(\S+)", text, re.MULTILINE)
    if bounds:
        return float(bounds[-1]) - 0.0005
    solved = re.search(r"Optimal (solution found|objective|- objective value)", text)
    return value if solved else float("-inf")
