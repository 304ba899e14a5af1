"""The sections of docs/benchmarks.md: each runs its inputs and gives its lines, with what was aimed at and what came.

Inputs of published planners are in the folder DPART_PEERS with what their own programs returned (``expected.json``).
Ours run through ``benchmarks/peers.py``, each input in a process of its own with one thread.
"""

import json
import os
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import published_plans
import scale

HERE = Path(__file__).resolve().parent

_SAME = 1e-6
"""Relative; published values have as many digits."""

_LARGE_DEVICES = 2048
_TIME_LIMIT_SECONDS = 60


class MissingError(Exception):
    """The inputs of a section are not there."""


@dataclass(frozen=True)
class Section:
    """What a section shows.

    Attributes:
        lines: Of markdown.
        targets: What was aimed at, what came, and whether it was met.
        agrees: Whether no value is worse than the published one.
    """

    lines: Sequence[str]
    targets: Sequence[tuple[str, str, bool]]
    agrees: bool = True


Say = Callable[[str], None]


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


def _expected(folder: str) -> tuple[Path, list[dict[str, Any]]]:
    if "DPART_PEERS" not in os.environ:
        raise MissingError("DPART_PEERS is unset, and the published inputs are not part of this project.")
    path = Path(os.environ["DPART_PEERS"]) / folder
    if not (path / "expected.json").exists():
        raise MissingError(f"the folder DPART_PEERS has no {folder}/expected.json.")
    return path, json.loads((path / "expected.json").read_text(encoding="utf-8"))


def pipedream(say: Say) -> Section:
    """The released optimizer's own profiles, under its own conventions."""
    folder, rows = _expected("pipedream")
    rows = [row for row in rows if row["seconds_per_minibatch"] is not None]
    ours, theirs, counts, worst = _zeros(), _zeros(), _zeros(), 0.0
    for row in rows:
        say(f"{row['input']} {row['args']}")
        answer = peer("pipedream", folder / f"{row['input']}.graph.txt", *shlex.split(row["args"]))
        if answer.get("value") is None:
            raise RuntimeError(f"{row['input']} {row['args']}: {answer.get('error', 'no plan')}")
        worst = max(worst, abs(answer["value"] / row["seconds_per_minibatch"] - 1))
        for name in (row["input"], "all"):
            ours[name] += answer["seconds"]
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
    for name in sorted(set(ours) - {"all"}) + ["all"]:
        ratio = theirs[name] / ours[name]
        lines.append(f"| {name} | {counts[name]:.0f} | {ours[name]:.2f} | {theirs[name]:.2f} | {ratio:.0f} |")
    least = min(theirs[name] / ours[name] for name in ours)
    targets = [
        ("equal values", f"largest relative difference {worst:.1e}, {len(rows)} settings", worst <= 1e-9),
        ("a tenth of the released program's time", f"{least:.0f} times less at least", least >= 10),
    ]
    return Section(lines, targets, worst <= 1e-9)


def tarnawski(say: Say) -> Section:
    """Device placement: the exact programme, sets that need not be contiguous, and the integer programme."""
    folder, rows = _expected("dnn-partitioning")
    inputs = list(dict.fromkeys(row["input"] for row in rows))
    recorded = {(row["input"], row["mode"]): row for row in rows}
    found = _least(rows, "-localSearch")
    lines = [
        "Largest load of 6 accelerators and a processor (3 for BERT-3), in the inputs' own units. The recorded program",
        "is the authors' exact dynamic programme over contiguous pieces; where devices may take any set of layers the",
        f"recorded value is the best of its local searches. Limit: {_TIME_LIMIT_SECONDS} s. The gap is that between",
        "value and lower bound, both ours.",
    ]
    agrees, certified, faster = True, [], []
    for title, flags in (("Contiguous", ()), ("Any sets", ("--non-contiguous",)), ("ILP", ("--method", "ilp"))):
        theirs = "recorded local search" if flags[:1] == ("--non-contiguous",) else "recorded program"
        lines += ["", f"{title}{': `' + ' '.join(flags) + '`' if flags else ''}", ""]
        lines += [
            f"| input | value | lower bound | gap | dpart, s | {theirs} | its s |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name in inputs:
            say(f"{name} {' '.join(flags)}")
            limit = ("--time-limit", _TIME_LIMIT_SECONDS)
            answer = peer("tarnawski", folder / f"{name}.json", *flags, *limit)
            row = found.get(name, {}) if "search" in theirs else recorded.get((name, "(DP)"), {})
            lines.append(_tarnawski_line(name, answer, row))
            value, gap = answer.get("value"), _gap(answer)
            if "search" not in theirs and row.get("max_load") is not None:
                agrees &= value is not None and value <= row["max_load"] * (1 + max(_SAME, 0.0 if not flags else 1.0))
            if not flags:
                certified.append((name, gap))
                if (row.get("program_cpu_seconds") or 0) > 1 and "seconds" in answer:
                    faster.append((name, row["program_cpu_seconds"] / answer["seconds"]))
    wide = [
        f"{name} {'no value' if gap is None else f'{100 * gap:.2f} %'}" for name, gap in certified if not _small(gap)
    ]
    slow = [f"{name} {ratio:.2f} times" for name, ratio in faster if ratio < 1]
    targets = [
        ("exact or within 0.1 % on every input, contiguous", ", ".join(wide) or "on every one", not wide),
        ("less time than the authors' C++ where that takes more than a second",
         ", ".join(slow) or f"{min((ratio for _, ratio in faster), default=0):.1f} times less at least", not slow),
    ]  # fmt: skip
    return Section(lines, targets, agrees)


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
        if row["mode"] == mode and row["max_load"] is not None:
            if row["input"] not in least or row["max_load"] < least[row["input"]]["max_load"]:
                least[row["input"]] = row
    return least


def _gap(answer: Mapping[str, Any]) -> float | None:
    if answer.get("value") is None or not answer.get("lower_bound"):
        return None
    return max(0.0, float(answer["value"] / answer["lower_bound"] - 1))


def _small(gap: float | None) -> bool:
    return gap is not None and gap <= 1e-3


def _number(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.6g}"


def piper(say: Say) -> Section:
    """Data, tensor and pipeline parallelism with recomputation, under Piper's conventions."""
    folder, rows = _expected("piper")
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
        "Time per microbatch under Piper's conventions, with its rule of what recomputes and with what recomputes chosen",
        "exactly. Seconds are summed over the settings of a row and are those with Piper's rule; the recorded ones are",
        "CPU seconds of the authors' program. A setting in which nothing fits counts as equal where both say so.",
        "",
        "| input | devices | settings | largest difference | best gain, exact | dpart, s | recorded program, s | ratio |",
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
            large.append(theirs / ours)
        lines.append(
            f"| {name} | {devices:,} | {len(answers)} | {max(map(abs, off)):.1e} | {-100 * min(0.0, *gains, 0.0):.2f} % "
            f"| {ours:.2f} | {theirs:.2f} | {theirs / ours if ours else 0:.0f} |"
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


def published(say: Say) -> Section:
    """The plans of PipeDream's paper."""
    folder, _ = _expected("pipedream")
    absent = [name for name in published_plans.PUBLISHED if not (folder / f"{name}.graph.txt").exists()]
    if absent:
        raise MissingError(f"the folder DPART_PEERS has no profile of {', '.join(absent)}.")
    say("published plans")
    rows = published_plans.rows_of(folder, list(published_plans.PUBLISHED))
    agrees = all(row.ours_seconds <= row.published_seconds * (1 + 1e-9) for row in rows)
    even = all(row.ours_seconds <= row.even_seconds * (1 + 1e-9) for row in rows)
    lines = [
        "The plans of Table 1 of the PipeDream paper (SOSP 2019) on its cluster A, four hosts of four V100 with PCIe",
        "inside and 10 Gbit/s between, under our cost conventions with the published profiles and the asynchronous",
        "schedule. A plan's value is its period: the milliseconds from one minibatch to the next. The paper names",
        "replicas only, so each published plan has the best cuts for its replicas. The even split has as many layers in",
        "every stage, and the best number of stages. Memory is not checked: the profiles do not say what a backward",
        "keeps. These are predictions of one cost model, not runs.",
        "",
        *published_plans.table(rows),
    ]
    targets = [
        ("never worse than a published plan", "never" if agrees else "worse", agrees),
        ("never worse than the even split", "never" if even else "worse", even),
    ]
    return Section(lines, targets, agrees and even)


def _zeros() -> dict[str, float]:
    return defaultdict(float)


def scaling(say: Say) -> Section:
    """Plans for thousands of GPUs."""
    wanted = {name: scale.DEVICES for name in scale.MODELS}
    wanted["llama3-405b"] = (1000, 1021, 1024, 4096, 16381, 16384)
    rows = []
    for model, counts in wanted.items():
        say(f"profile of {model}")
        try:
            profile = scale.estimated(model)
        except SystemExit as error:
            raise MissingError(str(error)) from error
        for devices in counts:
            say(f"{model} on {devices} devices")
            rows.append(scale.row(model, profile, devices))
    lines = [
        "`dpart partition PROFILE -t NxHOST -o plan.json --optimizer adam-mixed` for H100 in DGX hosts, each row in a",
        "process of its own with one thread. Seconds go from the first line of Python to the plan on disk: imports,",
        "reading the profile and writing are in them, the interpreter's own start and the estimate of the profile are",
        "not. Steps are predicted from profiles estimated by operation counts, of 2,048 sequences for Llama 3, 1,536 for",
        "GPT-3, 1,024 for Mixtral: nothing ran on a GPU.",
        "",
        *scale.table(rows),
    ]
    good = [row for row in rows if "error" not in row]
    big = [row for row in good if row["model"] == "llama3-405b"]
    span = [row["seconds"] for row in big if row["devices"] in (min(scale.DEVICES), max(scale.DEVICES))]
    complete = len(good) == len(rows)
    flat = max(span) / min(span) if len(span) == 2 else float("inf")
    targets = [
        _worst("Llama-3-405B in at most 10 s", big, "seconds", 10, "{:.1f} s"),
        _worst("Llama-3-405B in at most 2 GB", big, "peak_rss_bytes", 2e9, "{:.3g} bytes"),
        _worst("Llama-3-405B with a gap of at most 0.1 %", big, "gap", 1e-3, "{:.5f}"),
        ("Llama-3-405B: time within 2x between 1,024 and 16,384 devices", f"{flat:.2f}x", flat <= 2),
        _worst("every row with a gap of at most 0.1 %", good, "gap", 1e-3, "{:.5f}"),
        _worst("every row in at most 10 s", good, "seconds", 10, "{:.1f} s"),
    ]
    if not complete:
        targets.append(("every row has a plan", f"{len(rows) - len(good)} failed", False))
    return Section(lines, targets)


def _worst(
    what: str, rows: Sequence[Mapping[str, Any]], key: str, limit: float, form: str
) -> tuple[str, str, bool]:  # fmt: skip
    over = [row for row in rows if row[key] is None or row[key] > limit]
    if not rows:
        return what, "no row", False
    if not over:
        return what, f"at most {form.format(max(row[key] for row in rows))}", True
    said = (
        f"{row['model']} on {row['devices']:,}: {'none' if row[key] is None else form.format(row[key])}" for row in over
    )
    return what, "; ".join(said), False
