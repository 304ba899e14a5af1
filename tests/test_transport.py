"""Messages let go of what they carried as soon as it has arrived, and not at the end of the step."""

import os
import subprocess
import sys
from pathlib import Path

_DRIVER = """
import gc, os, sys, time, weakref
import torch
import torch.distributed as dist
from dpart.runtime.transport import Expected, Transport

dist.init_process_group("gloo")
expected = Expected("hidden", (1000,), torch.float32)
transport = Transport()
if dist.get_rank() == 0:
    alive = []
    for tag in range(8):
        tensor = torch.full((1000,), float(tag))
        alive.append(weakref.ref(tensor.untyped_storage()))
        transport.send(tensor, expected, 1, tag)
        del tensor
    dist.barrier()
    end = time.monotonic() + 10
    while any(ref() is not None for ref in alive) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    print("KEPT", sum(ref() is not None for ref in alive), flush=True)
else:
    for tag in reversed(range(8)):
        assert transport.receive(expected, 0, tag).wait()[0] == tag
    dist.barrier()
dist.barrier()
os._exit(0)
"""


def test_sent_tensors_are_freed_once_they_have_arrived(tmp_path: Path) -> None:
    """Field case: outputs pinned until the end of the step. A send on gloo never says by itself that it is done."""
    (tmp_path / "driver.py").write_text(_DRIVER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "driver.py")], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "KEPT 0" in done.stdout
