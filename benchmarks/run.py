"""Runs the benchmarks that need no cluster and writes their table (``-o docs/benchmarks.md``).

The searcher on the published PipeDream profiles, beside what the released program took when it was run on them
(``expected.json`` in the folder DPART_PEERS). The recorded times are CPU seconds of the whole program; ours run
from reading the file to the answer.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import shlex
import sys
from collections import defaultdict
from pathlib import Path

import peers


def main() -> int:
    """Runs all rows; returns 1 if a value differs, or the inputs are not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="write the table there, too")
    options = parser.parse_args()
    if "DPART_PEERS" not in os.environ:
        print("DPART_PEERS is unset: the published inputs are not here.", file=sys.stderr)
        return 1
    folder = Path(os.environ["DPART_PEERS"]) / "pipedream"
    rows = [r for r in json.loads((folder / "expected.json").read_text()) if r["seconds_per_minibatch"] is not None]
    ours: dict[str, float] = defaultdict(float)
    theirs: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    worst = 0.0
    for number, row in enumerate(rows, 1):
        print(f"\r{number}/{len(rows)} {row['input']} {row['args']}".ljust(100), end="", file=sys.stderr, flush=True)
        printed = io.StringIO()
        arguments = ["pipedream", str(folder / f"{row['input']}.graph.txt"), *shlex.split(row["args"]), "--json"]
        with contextlib.redirect_stdout(printed):
            peers.main(arguments)
        answer = json.loads(printed.getvalue())
        worst = max(worst, abs(answer["value"] / row["seconds_per_minibatch"] - 1))
        ours[row["input"]] += answer["seconds"]
        theirs[row["input"]] += row["program_cpu_seconds"]
        counts[row["input"]] += 1
    print(file=sys.stderr)
    text = _table(ours, theirs, counts, worst)
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    return 0 if worst <= 1e-9 else 1


def _table(ours: dict[str, float], theirs: dict[str, float], counts: dict[str, int], worst: float) -> str:
    lines = [
        "# Benchmarks",
        "",
        "## PipeDream's profiles",
        "",
        "`make bench` made this page. The searcher under the released program's conventions; seconds are summed over",
        f"the settings of each profile. Largest relative difference of a value: {worst:.1e}.",
        f"One thread, {platform.machine()}, Python {platform.python_version()}. The released program's times are the",
        "CPU seconds recorded with the published values, on another day and machine load.",
        "",
        "| profile | settings | dpart, s | released program, s | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in sorted(ours):
        ratio = theirs[name] / ours[name]
        lines.append(f"| {name} | {counts[name]} | {ours[name]:.2f} | {theirs[name]:.2f} | {ratio:.0f} |")
    total, recorded = sum(ours.values()), sum(theirs.values())
    lines.append(f"| all | {sum(counts.values())} | {total:.2f} | {recorded:.2f} | {recorded / total:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
