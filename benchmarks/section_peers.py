"""The published planners: our searches on their inputs, under their conventions, beside what their programs returned.

Ours run through ``benchmarks/peers.py``, each input in a process of its own with one thread.
"""

import json
import os
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from section import Say, Section, expected

HERE = Path(__file__).resolve().parent

_SAME = 1e-6
"""Relative; published values have as many digits."""

_CERTIFIED = 1e-3
_LARGE_DEVICES = 2048
_TIME_LIMIT_SECONDS = 60


def peer(*arguments: object) -> dict[str, Any]:
    """What ``peers.py`` prints; ``{"error": ...}`` where it fails."""
    command = [sys.executable, str(HERE / "peers.py"), *map(str, arguments), "--json"]
    ran = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or ["no reason given"])[-1]}
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def pipedream(say: Say) -> Section:
    """The released optimizer's own profiles, under its own conventions."""
    folder, rows = expected("pipedream")
    rows = [row for row in rows if row["seconds_per_minibatch"] is not None]
    ours, theirs, counts, worst = _zeros(), _zeros(), _zeros(), 0.0
    for row in rows:
        say(f"{row['input']} {row['args']}")
        answer = peer("pipedream", folder / f"{row['input']}.graph.txt", *shlex.split(row["args"]))
        worst = max(worst, abs(_difference(row["seconds_per_minibatch"], answer)))
        for name in (row["input"], "all"):
            ours[name] += answer.get("seconds", 0.0)
            theirs[name] += row["program_cpu_seconds"]
            counts[name] += 1
    lines = [
        "The paper's search (`dpart partition --method pipedream`) under the released program's conventions. Seconds",
        "are summed over the settings of each profile. Those of the released program are the CPU seconds of the whole",
        "of it.",
        "",
        "| profile | settings | dpart, s | released program, s | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in [*sorted(set(ours) - {"all"}), "all"]:
        ratio = _ratio(theirs[name], ours[name])
        lines.append(f"| {name} | {counts[name]:.0f} | {ours[name]:.2f} | {theirs[name]:.2f} | {ratio:.0f} |")
    least = min(_ratio(theirs[name], ours[name]) for name in ours)
    targets = [
        ("equal values", f"largest relative difference {worst:.1e}, {len(rows)} settings", worst <= 1e-9),
        ("a tenth of the released program's time", f"{least:.0f} times less at least", least >= 10),
    ]
    return Section(lines, targets, worst <= 1e-9)


@dataclass(frozen=True)
class _Way:
    """A way to solve the workloads, and the mode of the published program to hold it against."""

    title: str
    flags: tuple[str, ...]
    mode: str
    recorded: str


_WAYS = (
    _Way("Contiguous pieces", (), "(DP)", "exact program"),
    _Way("Contiguous pieces, as an integer programme", ("--method", "ilp"), "(DP)", "exact program"),
    _Way("Any sets of layers", ("--non-contiguous",), "-localSearch", "local search"),
)


def tarnawski(say: Say) -> Section:
    """Device placement: the exact programme, the integer programme, and sets that need not be contiguous."""
    folder, rows = expected("dnn-partitioning")
    inputs = list(dict.fromkeys(row["input"] for row in rows))
    lines = [
        "Largest load of the accelerators and the processor of each file, in its own units. The recorded program is",
        "the authors' exact one over contiguous pieces; where a device may take any set of layers it is the best of",
        f"their local searches, which does not heed memory. Ours stop after {_TIME_LIMIT_SECONDS} s. Value, lower",
        "bound and the gap between them are ours.",
    ]
    answers = {}
    for way in _WAYS:
        recorded = _least(rows, way.mode)
        lines += [
            "",
            f"{way.title} (`{' '.join(('peers.py tarnawski', *way.flags))}`):",
            "",
            f"| input | value | lower bound | gap | dpart, s | {way.recorded} | its s |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name in inputs:
            say(f"{name} {' '.join(way.flags)}")
            answer = peer("tarnawski", folder / f"{name}.json", *way.flags, "--time-limit", _TIME_LIMIT_SECONDS)
            lines.append(_tarnawski_line(name, answer, recorded.get(name, {})))
            answers[way, name] = answer
    exact = {name: answers[_WAYS[0], name] for name in inputs}
    return Section(lines, *_tarnawski_targets(exact, _least(rows, "(DP)")))


def _tarnawski_targets(
    exact: Mapping[str, Mapping[str, Any]], recorded: Mapping[str, Mapping[str, Any]]
) -> tuple[list[tuple[str, str, bool]], bool]:
    """Of the contiguous answers; and whether none is worse than the authors' optimum by more than what is certified."""
    gaps = {name: _gap(answer) for name, answer in exact.items()}
    wide = [
        f"{name}: {'no value' if gap is None else f'{100 * gap:.3f} %'}"
        for name, gap in gaps.items()
        if gap is None or gap > _CERTIFIED
    ]
    known = {name: row for name, row in recorded.items() if row["max_load"] is not None}
    off = {name: abs(_difference(row["max_load"], exact[name])) for name, row in known.items()}
    ratios = {
        name: row["program_cpu_seconds"] / exact[name]["seconds"]
        for name, row in recorded.items()
        if (row["program_cpu_seconds"] or 0) > 1 and "seconds" in exact[name]
    }
    slow = [f"{name}: {1 / ratio:.1f} times theirs" for name, ratio in ratios.items() if ratio < 1]
    least = f"{min(ratios.values()):.1f} times less at least" if ratios else "none takes so long"
    largest = max(off.values(), default=0.0)
    targets = [
        ("contiguous: exact, or certified within 0.1 %, on every input", "; ".join(wide) or "on every one", not wide),
        (
            "contiguous: the authors' optimum, where they have one",
            f"off by {largest:.1e} at most",
            largest <= _CERTIFIED,
        ),
        ("less time than the authors' C++ where that takes more than a second", "; ".join(slow) or least, not slow),
    ]
    return targets, largest <= _CERTIFIED


def _tarnawski_line(name: str, answer: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    theirs = "none recorded" if not row else _number(row.get("max_load"), "not finished")
    seconds = _number(row.get("program_cpu_seconds"), "")
    if "error" in answer:
        return f"| {name} | failed: {answer['error']} | | | | {theirs} | {seconds} |"
    gap = _gap(answer)
    return (
        f"| {name} | {_number(answer['value'], 'none')} | {_number(answer['lower_bound'], 'none')} "
        f"| {'' if gap is None else f'{100 * gap:.3f} %'} | {answer['seconds']:.2f} | {theirs} | {seconds} |"
    )


def _least(rows: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Mapping[str, Any]]:
    """By input, the run of this mode with the smallest load."""
    least: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        best = least.get(row["input"], {}).get("max_load")
        if row["mode"] == mode and (best is None or (row["max_load"] is not None and row["max_load"] < best)):
            least[row["input"]] = row
    return least


def _gap(answer: Mapping[str, Any]) -> float | None:
    if answer.get("value") is None or not answer.get("lower_bound"):
        return None
    return max(0.0, float(answer["value"] / answer["lower_bound"] - 1))


def _number(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.6g}"


def piper(say: Say) -> Section:
    """Data, tensor and pipeline parallelism with recomputation, under Piper's conventions."""
    folder, rows = expected("piper")
    rows = [row for row in rows if row["mode"] == "piper" and not row["note"].startswith("NOT RUN")]
    groups: dict[tuple[str, int], list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for row in rows:
        name = row["input"].split()[0]
        say(f"{name} on {row['devices']} devices")
        arguments = ["piper", folder / ("gnmt.json" if name == "gnmt" else "bert32a100.json"),
                     "--devices", row["devices"], "--microbatches", row["microbatches"],
                     "--memory", row["memory_bytes"], "--bandwidth", row["bandwidth_bytes_per_second"]]  # fmt: skip
        if name.startswith("bert") and name != "bert32":
            arguments += ["--layers", name.removeprefix("bert")]
        groups[name, row["devices"]].append((row, peer(*arguments), peer(*arguments, "--exact-recompute")))
    lines = [
        "Time per microbatch under Piper's conventions, with its rule of what recomputes, and with that chosen exactly",
        "(`--exact-recompute`). Seconds are summed over the settings of a row and are those with Piper's rule; Piper's",
        "are CPU seconds of the authors' program. Where nothing fits and both say so, they count as equal.",
        "",
        "| input | devices | settings | largest difference | best gain, exact | dpart, s | Piper, s | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    differences, worse, large = [], [], []
    for (name, devices), answers in sorted(groups.items()):
        off = [_difference(row["time_per_microbatch"], ours) for row, ours, _ in answers]
        gains = [_difference(row["time_per_microbatch"], exact) for row, _, exact in answers]
        ours = sum(answer.get("seconds", 0.0) for _, answer, _ in answers)
        theirs = sum(row["program_cpu_seconds"] or 0.0 for row, _, _ in answers)
        differences += off
        worse += [gain for gain in gains if gain > _SAME]
        if devices == _LARGE_DEVICES:
            large.append(_ratio(theirs, ours))
        gain = max(0.0, *(-gain for gain in gains))
        lines.append(
            f"| {name} | {devices:,} | {len(answers)} | {max(map(abs, off)):.1e} | {100 * gain:.2f} % "
            f"| {ours:.2f} | {theirs:.2f} | {_ratio(theirs, ours):.1f} |"
        )
    most = max(map(abs, differences))
    targets = [
        ("equal under Piper's rule of recomputation, 1e-6 relative", f"largest difference {most:.1e}", most <= _SAME),
        ("never worse with exact recomputation", f"worse in {len(worse)} of {len(rows)} settings", not worse),
        (f"a tenth of the authors' time at {_LARGE_DEVICES:,} devices",
         f"{min(large):.0f} times less" if large else "not among the inputs", bool(large) and min(large) >= 10),
    ]  # fmt: skip
    return Section(lines, targets, most <= _SAME and not worse)


def _difference(published: float | None, answer: Mapping[str, Any]) -> float:
    """Relative, negative where ours is less; 0 where both have no plan, infinite where one has."""
    value = answer.get("value")
    if published is None or value is None:
        return 0.0 if published is None and value is None and "error" not in answer else float("inf")
    return float(value / published - 1)


def _ratio(theirs: float, ours: float) -> float:
    """How many times less ours is; 0 where nothing of ours ran."""
    return theirs / ours if ours else 0.0


def _zeros() -> dict[str, float]:
    return defaultdict(float)
