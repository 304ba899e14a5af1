"""``train.py``: what torchrun starts; everything it does is in the runtime and in the files beside it."""

from dpart.codegen.names import plain
from dpart.runtime.program import Program

_TEMPLATE = '''\
"""Trains {model} over {stages} with the {schedule} schedule.

Start one process for each worker:

    torchrun --nproc-per-node {workers} train.py

`python train.py --help` lists the options.
"""

from pathlib import Path

from dpart.runtime.training import main

if __name__ == "__main__":
    main(Path(__file__).parent)
'''


def train_script(program: Program) -> str:
    """The text of ``train.py``."""
    replicas = [stage.num_replicas for stage in program.stages]
    stages = f"{len(replicas)} stage" + ("s" if len(replicas) > 1 else "")
    if max(replicas) > 1:
        stages += f" with {', '.join(map(str, replicas))} replicas"
    return _TEMPLATE.format(
        model=plain(program.model), stages=stages, schedule=program.schedule, workers=len(program.workers)
    )
