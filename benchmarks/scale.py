"""What a plan for thousands of GPUs costs to find: seconds, memory, gap, by model and number of devices.

    python benchmarks/scale.py [--json] [--models llama3-405b ...] [--devices 1024 4096 16384] [--profile FILE]

A row is ``dpart partition PROFILE -t NxHOST -o plan.json --optimizer adam-mixed`` in a process of its own with one
thread. Its seconds go from the first line of Python to the plan on disk, so the imports, reading the profile, the
tables and writing are in them, and the interpreter's own start is not. Memory is the peak of that process. The table
has the seconds of the processor, too: on a loaded machine they are what the row would take on a quiet one, nearly.

Profiles are estimated (``dpart profile --estimate``) from the models in ``examples/``, which takes up to a few minutes
a model and is no part of a row; they are kept in ``build/bench`` until the code they come from changes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

MODELS: Mapping[str, str] = MappingProxyType(
    {
        "llama3-405b": "examples/llama3.py:llama3_405b",
        "llama3-70b": "examples/llama3.py:llama3_70b",
        "gpt3-175b": "examples/gpt3.py:gpt3_175b",
        "mixtral-8x7b": "examples/mixtral.py:mixtral_8x7b",
    }
)
"""A step has the sequences of the published training runs: 2,048 of Llama 3, 1,536 of GPT-3, 1,024 of Mixtral."""

DEVICES = (1024, 4096, 16384)

_DEVICE, _HOST, _PER_HOST = "h100", "dgx-h100", 8

_MAX_SECONDS = 1200.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the rows; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["llama3-405b"], metavar="MODEL",
                        help=f"of {', '.join(MODELS)} (default: llama3-405b)")  # fmt: skip
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), metavar="N",
                        help="any counts (default: 1024 4096 16384)")  # fmt: skip
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of this one instead of --models")
    parser.add_argument("--batch-size", type=int, metavar="ROWS", help="of a step (default: the profile's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    if min(args.devices) < 1 or (args.batch_size or 1) < 1:
        parser.error("--devices and --batch-size: expected at least 1")
    profiles = {"": args.profile} if args.profile is not None else {name: estimated(name) for name in args.models}
    rows = []
    for name, profile in profiles.items():
        for devices in args.devices:
            print(f"{name or profile} on {devices} devices", file=sys.stderr)
            rows.append(row(name, profile, devices, args.batch_size))
    printed = [{key: value for key, value in made.items() if key != "cpu_seconds"} for made in rows]
    print(json.dumps({"rows": printed}) if args.json else "\n".join(table(rows)))
    return int(any("error" in made for made in rows))


def topology_word(devices: int) -> str:
    """So many GPUs in DGX hosts; the last host is smaller where they do not fill it."""
    return f"{devices // _PER_HOST}x{_HOST}" if devices % _PER_HOST == 0 else f"{devices}x{_DEVICE}"


def row(model: str, profile: Path, devices: int, batch_size: int | None = None) -> dict[str, Any]:
    """One plan, made in a fresh process. With ``error``, and nothing else known, where that failed.

    Args:
        model: Empty for what the profile says.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["partition", str(profile.resolve()), "-t", topology_word(devices), "-o", "plan.json",
                   "--optimizer", "adam-mixed"]  # fmt: skip
        command += [] if batch_size is None else ["--batch-size", str(batch_size)]
        ran = _python([str(HERE / "scale_row.py"), *command], cwd=folder)
        if ran.returncode:
            unknown = dict.fromkeys(("seconds", "peak_rss_bytes", "gap", "predicted_step_seconds"))
            return {"model": model or profile.stem, "devices": devices, **unknown, "error": ran.stderr.strip()}
        measured = json.loads(ran.stdout.splitlines()[-1])
        plan = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))
    return {
        "model": model or plan["model"],
        "devices": devices,
        **measured,
        "gap": None if plan["certificate"] is None else plan["certificate"]["gap"],
        "predicted_step_seconds": plan["step_seconds"],
    }


def _python(arguments: Sequence[str], cwd: Path | str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        return subprocess.run(
            [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True,
            timeout=_MAX_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(error.cmd, 1, "", f"stopped after {_MAX_SECONDS:.0f} s")


def estimated(model: str) -> Path:
    """The estimated profile of one of `MODELS`, made anew where it is older than what it is made from.

    Raises:
        SystemExit: It cannot be made.
    """
    path = ROOT / "build" / "bench" / f"{model}.json"
    sources = [file for folder in ("examples", "profiler", "compiler") for file in (ROOT / folder).glob("*.py")]
    if path.exists() and path.stat().st_mtime > max(file.stat().st_mtime for file in sources):
        return path
    print(f"estimating the profile of {model}", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["profile", "--estimate", _DEVICE, MODELS[model], "--microbatch-size", "1", "-o", str(path), "--force"]
    ran = _python(["-m", "dpart.cli", *command], cwd=ROOT)
    if ran.returncode:
        raise SystemExit(
            f"{model} could not be profiled: {(ran.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    return path


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of markdown."""
    lines = [
        "| model | devices | seconds | of the processor | peak memory, MB | gap | predicted step, s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for made in rows:
        head = f"| {made['model']} | {made['devices']:,} "
        if "error" in made:
            lines.append(f"{head}| failed: {(made['error'].splitlines() or ['no reason given'])[-1]} | | | | |")
            continue
        gap = "none stated" if made["gap"] is None else f"{100 * made['gap']:.4f} %"
        lines.append(
            f"{head}| {made['seconds']:.1f} | {made['cpu_seconds']:.1f} | {made['peak_rss_bytes'] / 1e6:.0f} | {gap} "
            f"| {made['predicted_step_seconds']:.2f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
