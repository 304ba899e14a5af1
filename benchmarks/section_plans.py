"""Our own plans: beside those that a paper published, and for thousands of GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

import published_plans
import scale
from section import MissingError, Say, Section, expected


def published(say: Say) -> Section:
    """The plans of PipeDream's paper."""
    folder, _ = expected("pipedream")
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
        "replicas only, so each published plan has the best cuts for its replicas. The even split has as many layers",
        "and replicas in every stage, and the best number of stages. Memory is not checked: the profiles do not say",
        "what a backward keeps. These are predictions of one cost model, not runs.",
        "",
        *published_plans.table(rows),
    ]
    targets = [
        ("never worse than a published plan", "never" if agrees else "worse", agrees),
        ("never worse than the even split", "never" if even else "worse", even),
    ]
    return Section(lines, targets, agrees and even)


def scaling(say: Say) -> Section:
    """Plans for thousands of GPUs."""
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(scale.MODELS, scale.DEVICES)
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
        "not. Steps are predicted from profiles estimated by operation counts, of 2,048 sequences for Llama 3, 1,536",
        "for GPT-3, 1,024 for Mixtral: nothing ran on a GPU. On a loaded machine a row waits for others: the seconds",
        "of the processor are what it works.",
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
        _worst("the same in seconds of the processor", big, "cpu_seconds", 10, "{:.1f} s"),
        _worst("Llama-3-405B in at most 2 GB", big, "peak_rss_bytes", 2e9, "{:.3g} bytes"),
        _worst("Llama-3-405B with a gap of at most 0.1 %", big, "gap", 1e-3, "{:.3%}"),
        ("Llama-3-405B: time within 2x between 1,024 and 16,384 devices", f"{flat:.2f}x", flat <= 2),
        _worst("every row with a gap of at most 0.1 %", good, "gap", 1e-3, "{:.3%}"),
        _worst("every row in at most 10 s", good, "seconds", 10, "{:.1f} s"),
        _worst("the same in seconds of the processor", good, "cpu_seconds", 10, "{:.1f} s"),
    ]
    if not complete:
        targets.append(("every row has a plan", f"{len(rows) - len(good)} failed", False))
    return Section(lines, targets)


def _worst(what: str, rows: Sequence[Mapping[str, Any]], key: str, limit: float, form: str) -> tuple[str, str, bool]:
    """The target that no row is above a limit; says how many are, and the worst."""
    over = [row for row in rows if row[key] is None or row[key] > limit]
    if not rows:
        return what, "no row", False
    if not over:
        return what, f"at most {form.format(max(row[key] for row in rows))}", True
    worst = max(over, key=lambda row: float("inf") if row[key] is None else row[key])
    most = "none" if worst[key] is None else form.format(worst[key])
    said = f"missed by {len(over)} of {len(rows)} rows, most by {worst['model']} on {worst['devices']:,}: {most}"
    return what, said, False
