"""`Job`: what dpart.yaml declares: a model, the devices, the batch, and what a plan must keep to. No torch.

::

    model: gpt2.py:workload              # the only field that has to be there; paths start from the file's folder
    topology: 4xdgx-h100                 # a word, a file, or device and levels written here
    batch_size: 64
    constraints: {max_stages: 4, pins: {transformer.wte: 0}}

A file is checked whole before anything runs: every fault is listed with its path, and a field that is not known with
the closest one that is. ``docs/job-file.md`` has all fields.
"""

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dpart.job_file import JobFile
from dpart.partitioner.hosts import find_topology
from dpart.partitioner.topology import Topology, parse_topology
from dpart.profiler.devices import DeviceKind, device_kind
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_text, validated


@dataclass(frozen=True)
class Job:
    """What is to be compiled.

    Attributes:
        source: The file, for messages.
        model: ``file.py:callable`` as seen from the current folder, or ``package.module:callable``.
        topology: None for the machine at hand.
        profiles: Profiles to plan with, made before; none to make them.
        estimate: The kind of device that costs are estimated for; None to measure them here.
        degrees: Tensor-parallel degrees to estimate; none for the usual ones.
        microbatch_sizes: Rows of a microbatch, to choose from; none for an eighth of the batch.
        repeats: How often each layer is timed; None for as often as is useful.
        options: Of `partition_for`.
        keep: Of `dpart.job_file.EXTRAS`.
    """

    source: str
    model: str
    topology: Topology | None
    profiles: tuple[Path, ...]
    estimate: DeviceKind | None
    degrees: tuple[int, ...]
    microbatch_sizes: tuple[int, ...]
    repeats: int | None
    options: Mapping[str, Any]
    keep: tuple[str, ...]


def read_job(path: str | os.PathLike[str]) -> Job:
    """Reads a job file, and the topology file it names.

    Raises:
        UserError: A file is missing or faulty; all faults of the job are listed with their paths.
    """
    return parse_job(read_text(path), os.fspath(path), Path(path).parent)


def parse_job(text: str, source: str, folder: Path) -> Job:
    """The job that YAML `text` declares.

    Args:
        source: Names the text in errors.
        folder: What its paths start from.

    Raises:
        UserError: It is not YAML, or has faults; all are listed with their paths.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not a YAML file: {' '.join(str(error).split())}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{source}: expected fields such as model: file.py:callable.")
    known, faults = _without_unknown(JobFile, data, "")
    faults = [f"{source}: {fault}" for fault in faults]
    read: JobFile | None = None
    try:
        read = validated(JobFile, known, source)
    except UserError as error:
        faults += str(error).splitlines()
    topology = None
    try:
        topology = _topology(known.get("topology"), source, folder)
    except UserError as error:
        faults += str(error).splitlines()
    if read is not None:
        faults += [f"{source}: {fault}" for fault in read.contradictions()]
    if faults or read is None:
        raise UserError("\n".join(faults))
    return Job(
        source=source,
        model=_from_here(read.model, folder),
        topology=topology,
        profiles=tuple(folder / name for name in read.profile),
        estimate=device_kind(read.estimate) if read.estimate is not None else None,
        degrees=read.degrees,
        microbatch_sizes=read.microbatch_size,
        repeats=read.repeats,
        options=read.options(),
        keep=read.keep,
    )


def _without_unknown(cls: type, data: Any, where: str) -> tuple[Any, list[str]]:
    """The data without fields that the dataclass does not have, and a fault for each, with the closest it has."""
    if not isinstance(data, dict):
        return data, []
    hints = {f.name: f.type for f in dataclasses.fields(cls)}
    known: dict[Any, Any] = {}
    faults = []
    for name, value in data.items():
        if name not in hints:
            match = difflib.get_close_matches(str(name), hints, n=1)
            hint = f"; did you mean {match[0]!r}?" if match else f"; the fields are {', '.join(hints)}."
            faults.append(f"{where}{name}: no such field{hint}")
            continue
        inner = hints[name]
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            value, more = _without_unknown(inner, value, f"{where}{name}.")
            faults += more
        known[name] = value
    return known, faults


def _topology(value: Any, source: str, folder: Path) -> Topology | None:
    """A topology written in place, or the one that a file (as seen from the job's folder) or a word names."""
    if value is None:
        return None
    if isinstance(value, dict):
        return parse_topology(json.dumps(value, default=str), f"{source}: topology")
    if not isinstance(value, str):
        raise UserError(f"{source}: topology: expected a word, a file, or device and levels, got {json.dumps(value)}.")
    beside = folder / value
    try:
        return find_topology(beside if beside.exists() or Path(value).suffix in (".yaml", ".yml") else value)
    except UserError as error:
        raise UserError("\n".join(f"{source}: topology: {line}" for line in str(error).splitlines())) from None


def _from_here(model: str, folder: Path) -> str:
    place, colon, name = model.rpartition(":")
    return f"{folder / place}:{name}" if colon and place.endswith(".py") else model
