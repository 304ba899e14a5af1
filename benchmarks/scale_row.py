"""One row of `scale`: runs a command of dpart in this process, and prints as JSON what it took.

    python benchmarks/scale_row.py partition profile.json -t 128xdgx-h100 -o plan.json

The clock starts before anything of dpart is imported.
"""

import time

BEGAN = time.perf_counter(), time.process_time()

import contextlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from dpart.cli import main as dpart  # noqa: E402


def peak_bytes() -> int:
    """The most memory that this process has had, without that of the process it was forked from where that is known."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Exits as the command does; prints only where it succeeds."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            dpart(sys.argv[1:], prog_name="dpart")
        except SystemExit as done:
            if done.code:
                raise
    took = {"seconds": time.perf_counter() - BEGAN[0], "cpu_seconds": time.process_time() - BEGAN[1]}
    print(json.dumps({**took, "peak_rss_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
