"""``dpart topology``: what can be typed. What the commands do is loaded when one runs, torch only to measure."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click

_PATH = click.Path(path_type=Path)
_FORCE = click.option("--force", is_flag=True, help="Replace the output if it exists.")


@click.group()
def topology() -> None:
    """Shows, lists, imports and measures topologies: devices and the links between them.

    \b
    Example:
      dpart topology show 4xdgx-h100
      dpart partition profile.json --topology 4xdgx-h100 -o plan.json
    """


@topology.command()
@click.argument("word", metavar="WORD_OR_FILE")
def show(word: str) -> None:
    """Shows a topology file or a catalogue word.

    Its levels, its devices, where the figures are from, and what is hard to believe of them.

    \b
    Example:
      dpart topology show 2xdgx-h100+4xdgx-a100-80
      dpart topology show cluster.yaml
    """
    _commands().show(word)


@topology.command(name="list")
def list_() -> None:
    """Lists the hosts, devices and links known.

    \b
    Example:
      dpart topology list
    """
    _commands().list_catalogue()


@topology.command(name="import")
@click.argument("file", type=_PATH)
@click.option("--device", metavar="NAME", help="Kind of GPU, such as h100.  [default: told by the text, or guessed]")
@click.option("-o", "--output", type=_PATH, default=Path("topology.yaml"), show_default=True)
@_FORCE
def import_(file: Path, device: str | None, output: Path, force: bool) -> None:
    """Makes a topology file of nvidia-smi's text.

    FILE has the text of `nvidia-smi topo -m`; that of `nvidia-smi nvlink -s` and `nvidia-smi topo -p2p r` may
    stand there too, or alone. Memory and speeds are filled in from the catalogue, and every guess is said.

    \b
    Example:
      nvidia-smi topo -m > matrix.txt
      dpart topology import matrix.txt --device h100 -o topology.yaml
    """
    _commands().import_file(file, device, output, force=force)


@topology.command()
@click.option("-o", "--output", type=_PATH, default=Path("topology.yaml"), show_default=True)
@_FORCE
def measure(output: Path, force: bool) -> None:
    """Measures the links between torchrun's ranks.

    Latency and bandwidth inside hosts and between them, over NCCL where there are GPUs, else over gloo.

    \b
    Example:
      torchrun --standalone --nproc-per-node 2 -m dpart.cli topology measure -o topology.yaml
    """
    import_module("dpart.topology_measure").measure(output, force=force)


def _commands() -> Any:
    return import_module("dpart.topology_commands")
