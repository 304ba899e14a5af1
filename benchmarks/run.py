"""Runs the benchmarks and writes their page: ``python benchmarks/run.py -o docs/benchmarks.md [--only SECTION ...]``.

Sections: pipedream, tarnawski, piper (held against the published planners, whose inputs are in the folder
DPART_PEERS), published (the plans of a paper), scale (Llama-3-405B on thousands of GPUs). A section whose inputs are
not there says so. With ``--only`` the other sections of the page stay as they are.
"""

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import section_peers
import section_plans
from section import MissingError, Say, Section

SECTIONS: Mapping[str, tuple[str, Callable[[Say], Section]]] = MappingProxyType(
    {
        "pipedream": ("PipeDream's profiles", section_peers.pipedream),
        "tarnawski": ("Device placement (Tarnawski et al., 2020)", section_peers.tarnawski),
        "piper": ("Piper's inputs", section_peers.piper),
        "published": ("PipeDream's published plans", section_plans.published),
        "scale": ("Thousands of GPUs", section_plans.scaling),
    }
)

_HEAD = """# Benchmarks

`make bench` made this page. The searches are held against three published planners on their own inputs and under
their own cost conventions, and against themselves on models and clusters that those do not reach. What the published
programs returned and took was recorded once, on a machine of two cores, on another day and under another load than
ours: ratios of seconds are rough. Ours run on one thread, from reading the file to the answer.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections; returns 1 where a value is worse than the published one, whatever the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="write the page there; else it is printed")
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=f"of {', '.join(SECTIONS)}"
    )
    options = parser.parse_args(arguments)
    known = _read(options.output) if options.output is not None and options.output.exists() else {}
    agrees = True
    for name, (title, run) in SECTIONS.items():
        if options.only is None or name in options.only:
            lines, fine = _section(name, run)
            known[title] = "\n".join(lines)
            agrees &= fine
            if options.output is not None:
                options.output.write_text(_page(known), encoding="utf-8")
    if options.output is None:
        print(_page(known))
    return 0 if agrees else 1


def _section(name: str, run: Callable[[Say], Section]) -> tuple[list[str], bool]:
    load = os.getloadavg()[0]
    try:
        found = run(lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True))
    except MissingError as missing:
        return [f"Not run: {missing}"], True
    targets = [f"| {what} | {came} | {'met' if met else '**missed**'} |" for what, came, met in found.targets]
    ran = [
        f"Ran on {_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}. Load of the machine",
        f"{load:.1f} before and {os.getloadavg()[0]:.1f} at the end; this run is 1 of it.",
    ]
    return [*found.lines, "", "| target | measured | |", "|---|---|---|", *targets, "", *ran], found.agrees


def _processor() -> str:
    """Its name where the system says it, else its architecture."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8")) if info.exists() else None
    return named[1].strip() if named else platform.machine()


def _page(known: Mapping[str, str]) -> str:
    parts = [f"## {title}\n\n{known[title].strip()}\n" for title, _ in SECTIONS.values() if title in known]
    return "\n".join([_HEAD, *parts])


def _read(path: Path) -> dict[str, str]:
    """The sections of a page by title."""
    parts = re.split(r"^## (.+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


if __name__ == "__main__":
    sys.exit(main())
