"""Runs a mixed-integer solver on a programme of pulp's, silently and within its time, and says what it proved.

HiGHS is called through pulp in this process, or as a program; CBC is a program. A program reads the rows from a
file, and is ended where it goes on past its time limit, as CBC may in its first relaxation::

    programme ─mps─> cbc | highs ─solution, log─> Answer: status, values, bound

pulp itself says ``Optimal`` also where a solver stopped at its gap or its time limit. So the lower bound is read from
the solver: HiGHS has it, CBC prints it.
"""

import math
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pulp

from dpart.partitioner.ilp_solver import SolverError

__all__ = ["Answer", "Engine", "EngineName", "SolverError", "engines", "first_engine", "minimise"]

EngineName = Literal["highs", "highs-cmd", "cbc"]
"""HiGHS in this process, HiGHS as a program, CBC as a program."""

TOLERANCE = 1e-6
"""Relative to the value: solvers prove no closer."""

_GRACE = 1.1
_GRACE_SECONDS = 2.0
"""So much longer than its time limit a program may take to write down what it has."""

_NUMBER = r"([-+]?(?:inf|\d[\d.]*(?:e[-+]?\d+)?))"


@dataclass(frozen=True)
class Engine:
    """A solver.

    Attributes:
        path: The program; empty for HiGHS in this process.
    """

    name: EngineName
    path: str = ""


@dataclass(frozen=True)
class Answer:
    """What a solver came to.

    Attributes:
        status: ``optimal`` to the gap asked for and the solver's tolerance; ``stopped`` by the time limit;
            ``infeasible``, proved.
        values: Of the variables by name, those that are not 0; None where there is no solution.
        bound: No solution has a smaller objective; infinite where none is feasible.
    """

    status: Literal["optimal", "stopped", "infeasible"]
    values: Mapping[str, float] | None
    bound: float


def engines() -> tuple[Engine, ...]:
    """The solvers that are installed, the better ones first."""
    found = []
    if pulp.HiGHS().available():
        found.append(Engine("highs"))
    command = pulp.HiGHS_CMD()
    if command.available():
        found.append(Engine("highs-cmd", str(command.path)))
    for bundled in (pulp.PULP_CBC_CMD(), pulp.COIN_CMD()):
        if bundled.available():
            found.append(Engine("cbc", str(bundled.path)))
            break
    return tuple(found)


def first_engine() -> Engine:
    """The best solver that is installed.

    Raises:
        SolverError: There is none.
    """
    installed = engines()
    if not installed:
        raise SolverError("no solver is installed: install HiGHS (the package highspy), or a pulp with its CBC")
    return installed[0]


def minimise(
    programme: pulp.LpProblem, *, time_limit_seconds: float, gap: float = 0.0, engine: Engine | None = None
) -> Answer:
    """Minimise; variables and rows of the programme need distinct names of letters, digits and underscores.

    Args:
        time_limit_seconds: After which the solver stops with what it has.
        gap: Relative distance from the bound at which it may stop.
        engine: None for the first one installed.

    Raises:
        SolverError: No solver is installed, or it died.
    """
    engine = engine or first_engine()
    if time_limit_seconds <= 0:
        return Answer("stopped", None, -math.inf)
    if engine.name == "highs":
        return _in_process(programme, time_limit_seconds, gap)
    with tempfile.TemporaryDirectory(prefix="dpart-ilp-") as name:
        folder = Path(name)
        began = time.perf_counter()
        programme.writeMPS(str(folder / "model.mps"))
        left = time_limit_seconds - (time.perf_counter() - began)
        if left <= 0:
            return Answer("stopped", None, -math.inf)
        in_time = _run(engine, folder, left, gap)
        read = _read_cbc if engine.name == "cbc" else _read_highs
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")
        return read(folder / "solution", log, in_time)


def _in_process(programme: pulp.LpProblem, seconds: float, gap: float) -> Answer:
    engine = pulp.HiGHS(msg=False, timeLimit=seconds, gapRel=gap, threads=1)
    if not engine.available():
        raise SolverError("the solver highs is not installed")
    try:
        programme.solve(engine)
    except pulp.PulpSolverError as error:
        raise SolverError(f"the solver highs died: {error}") from error
    if programme.status == pulp.LpStatusInfeasible:
        return Answer("infeasible", None, math.inf)
    bound = float(programme.solverModel.getInfo().mip_dual_bound)
    if programme.status != pulp.LpStatusOptimal:
        return Answer("stopped", None, bound)
    values = {v.name: float(v.varValue) for v in programme.variables() if v.varValue}
    finished = programme.sol_status == pulp.LpSolutionOptimal
    return Answer("optimal" if finished else "stopped", values, bound)


def _run(engine: Engine, folder: Path, seconds: float, gap: float) -> bool:
    """Run the program on the model in the folder; whether it ended by itself."""
    model, solution = str(folder / "model.mps"), str(folder / "solution")
    if engine.name == "cbc":
        command = [engine.path, model, "-sec", f"{seconds:.3f}", "-timeMode", "elapsed", "-ratio", repr(gap)]
        command += ["-branch", "-solution", solution]
    else:
        options = folder / "options"
        options.write_text(
            f"solution_file={solution}\nwrite_solution_to_file=true\nwrite_solution_style=0\n"
            f"mip_rel_gap={gap!r}\nthreads=1\nlog_file={folder / 'highs_log'}\n",
            encoding="utf-8",
        )
        command = [engine.path, model, f"--options_file={options}", f"--time_limit={seconds:.3f}"]
    try:
        with (folder / "log").open("wb") as log:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                timeout=seconds * _GRACE + _GRACE_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return False
    except OSError as error:
        raise SolverError(f"the solver {engine.name} does not run: {error}") from error
    # HiGHS ends with 1 after a warning, of which its time limit is one.
    if done.returncode not in ((0,) if engine.name == "cbc" else (0, 1)):
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        raise SolverError(f"the solver {engine.name} died ({how})")
    return True


def _read_cbc(solution: Path, log: str, in_time: bool) -> Answer:
    """CBC prints bounds where it stopped early, rounded, and none where it closed the gap."""
    proved = [bound - 0.0005 for bound in _numbers(r"Lower bound:\s+", log)]
    proved += [
        bound - 1e-5 * abs(bound)
        for pattern in (r"Continuous objective value is ", r"best possible ")
        for bound in _numbers(pattern, log)
    ]
    bound = max(proved, default=-math.inf)
    if not in_time:
        return Answer("stopped", None, bound)
    if not solution.exists():
        raise SolverError(f"the solver cbc ended without an answer: {_last_line(log)}")
    first, _, rest = solution.read_text(encoding="utf-8", errors="replace").partition("\n")
    if first.startswith("Optimal"):
        values = _columns(rest)
        objective = _numbers(r"objective value\s+", first)
        early = [b - 0.0005 for b in _numbers(r"Lower bound:\s+", log)]
        return Answer("optimal", values, max(early) if early else objective[0])
    if "nfeasible" in first.partition(" - ")[0]:
        return Answer("infeasible", None, math.inf)
    if first.startswith("Stopped") and "no integer solution" not in first:
        return Answer("stopped", _columns(rest), bound)
    if first.startswith("Stopped"):
        return Answer("stopped", None, bound)
    raise SolverError(f"the solver cbc came to no answer: {first}")


def _columns(text: str) -> dict[str, float]:
    """The rows ``[**] number name value reduced-cost`` of a solution file."""
    rows = (line.replace("**", " ").split() for line in text.splitlines())
    return {row[1]: float(row[2]) for row in rows if len(row) >= 3}


def _read_highs(solution: Path, log: str, in_time: bool) -> Answer:
    """The solution file begins with the status; the log ends with a report that has the bound."""
    bound = max(_numbers(r"Dual bound\s+", log), default=-math.inf)
    if not in_time:
        return Answer("stopped", None, bound)
    if not solution.exists():
        raise SolverError(f"the solver highs ended without an answer: {_last_line(log)}")
    lines = solution.read_text(encoding="utf-8", errors="replace").splitlines()
    status = lines[1].strip() if len(lines) > 1 else ""
    if status == "Infeasible":
        return Answer("infeasible", None, math.inf)
    if status not in ("Optimal", "Time limit reached"):
        raise SolverError(f"the solver highs came to no answer: {status or _last_line(log)}")
    values: dict[str, float] | None = None
    if "Feasible" in lines[:8]:
        begin = next(n for n, line in enumerate(lines) if line.startswith("# Columns")) + 1
        pairs = (line.split() for line in lines[begin : begin + int(lines[begin - 1].split()[-1])])
        values = {pair[0]: float(pair[1]) for pair in pairs}
    return Answer("optimal" if status == "Optimal" else "stopped", values, bound)


def _numbers(before: str, text: str) -> list[float]:
    """All numbers that follow a pattern, but infinite ones and 1e50, which stands for that."""
    found = (float(number) for number in re.findall(before + _NUMBER, text))
    return [number for number in found if abs(number) < 1e49]


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
