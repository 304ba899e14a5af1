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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import yaml
from pydantic import AfterValidator, BeforeValidator

from dpart.partitioner.hosts import find_topology
from dpart.partitioner.partition import partition
from dpart.partitioner.topology import Topology, parse_topology
from dpart.partitioner.units import parse_size, parse_time
from dpart.profiler.devices import DeviceKind, device_kind
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_text, validated

EXTRAS = ("profile", "trace")
"""What a build folder may keep beside what it needs: the profiles, and the predicted step for ui.perfetto.dev."""


@dataclass(frozen=True)
class Job:
    """What is to be compiled.

    Attributes:
        source: The file, for messages.
        model: ``file.py:callable`` as seen from the current folder, or ``package.module:callable``.
        topology: None for the machine at hand.
        profiles: Profiles to plan with, made before; none to make them.
        estimate: The kind of device that costs are estimated for; None to measure them here.
        microbatch_sizes: Rows of a microbatch, to choose from; none for an eighth of the batch.
        repeats: How often each layer is timed; None for as often as is useful.
        options: Of `partition`.
        keep: Of `EXTRAS`.
    """

    source: str
    model: str
    topology: Topology | None
    profiles: tuple[Path, ...]
    estimate: DeviceKind | None
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
    known, faults = _without_unknown(_JobFile, data, "")
    faults = [f"{source}: {fault}" for fault in faults]
    read: _JobFile | None = None
    try:
        read = validated(_JobFile, known, source)
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


def _as_list(value: Any) -> Any:
    """One item is a list of one."""
    if value is None:
        return None
    return tuple(value) if isinstance(value, list) else (value,)


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError("expected at least 1")
    return number


def _stage_of_zero(number: int) -> int:
    if number not in (0, 1, 2, 3):
        raise ValueError("expected a stage of ZeRO, 0 to 3")
    return number


def _stage_number(number: int) -> int:
    if number < 0:
        raise ValueError("expected the number of a stage, from 0")
    return number


def _share(number: float) -> float:
    if not 0 <= number < 1:
        raise ValueError("expected a share from 0 up to 1, such as 0.1")
    return number


def _seconds(value: Any) -> float:
    seconds = parse_time(value)
    if not seconds:
        raise ValueError("expected a time above zero")
    return seconds


def _spec(text: str) -> str:
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ValueError("expected file.py:callable or package.module:callable")
    return text


def _kind(name: str) -> str:
    try:
        return device_kind(name).name
    except UserError as error:
        raise ValueError(str(error).rstrip(".")) from None


def _several(names: Sequence[str]) -> Sequence[str]:
    if len(names) < 2:
        raise ValueError("expected two layers or more that no cut may separate")
    return names


def _one_of(choices: Sequence[str], name: str) -> str:
    if name not in choices:
        match = difflib.get_close_matches(name, choices, n=1)
        hint = f" (did you mean {match[0]!r}?)" if match else ""
        raise ValueError(f"expected one of {', '.join(choices)}{hint}")
    return name


def _choice(option: str) -> AfterValidator:
    """Of what an option of `partition` may be."""
    return AfterValidator(partial(_one_of, get_args(get_type_hints(partition)[option])))


_COUNT = Annotated[int, AfterValidator(_positive)]
_COUNTS = Annotated[tuple[_COUNT, ...], BeforeValidator(_as_list)]
_NAMES = Annotated[tuple[str, ...], BeforeValidator(_as_list)]


@dataclass(frozen=True)
class _Memory:
    limit: Annotated[int | None, BeforeValidator(parse_size)] = None
    headroom: Annotated[float, AfterValidator(_share)] | None = None


@dataclass(frozen=True)
class _Constraints:
    """Each is an option of `partition`; None for what `partition` does by itself."""

    devices: _COUNT | None = None
    stages: _COUNT | None = None
    max_stages: _COUNT | None = None
    replicas: tuple[_COUNT, ...] | None = None
    tensor_parallel: _COUNTS | None = None
    sharding: (
        Annotated[tuple[Annotated[int, AfterValidator(_stage_of_zero)], ...], BeforeValidator(_as_list)] | None
    ) = None
    recompute: bool | None = None
    together: tuple[Annotated[tuple[str, ...], AfterValidator(_several)], ...] | None = None
    pins: dict[str, Annotated[int, AfterValidator(_stage_number)]] | None = None

    def options(self) -> dict[str, Any]:
        """Under the names that `partition` has for them."""
        renamed = {"devices": "num_devices", "stages": "num_stages"}
        return {renamed.get(f.name, f.name): getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True)
class _JobFile:
    """The fields of a job file, read strictly; what they mean stands at `Job` and `partition`."""

    model: Annotated[str, AfterValidator(_spec)]
    topology: Any = None
    estimate: Annotated[str, AfterValidator(_kind)] | None = None
    profile: _NAMES = ()
    batch_size: _COUNT | None = None
    microbatch_size: _COUNTS = ()
    repeats: _COUNT | None = None
    method: Annotated[str, _choice("method")] | None = None
    schedule: Annotated[str, _choice("schedule")] | None = None
    optimizer: Annotated[str, _choice("optimizer")] | None = None
    memory: _Memory = field(default_factory=_Memory)
    constraints: _Constraints = field(default_factory=_Constraints)
    time_limit: Annotated[float | None, BeforeValidator(_seconds)] = None
    keep: Annotated[tuple[Annotated[str, AfterValidator(partial(_one_of, EXTRAS))], ...], BeforeValidator(_as_list)] = (
        "profile",
    )

    def options(self) -> dict[str, Any]:
        """Of `partition`, those that the file says."""
        said = {
            "batch_size": self.batch_size,
            "method": self.method,
            "schedule": self.schedule,
            "optimizer": self.optimizer,
            "memory_limit_bytes": self.memory.limit,
            "memory_headroom": self.memory.headroom,
            "time_limit_seconds": self.time_limit,
            **self.constraints.options(),
        }
        return {name: value for name, value in said.items() if value is not None}

    def contradictions(self) -> list[str]:
        """Fields that make no sense beside each other."""
        faults = []
        if self.estimate is not None and self.topology is None:
            faults.append("estimate: say in topology which devices there are, such as 4xdgx-h100.")
        if self.estimate is not None and self.repeats is not None:
            faults.append("repeats: nothing is timed where costs are estimated.")
        for name in ("estimate", "microbatch_size", "repeats"):
            if self.profile and getattr(self, name):
                faults.append(f"{name}: profile names what is planned with, so nothing is profiled: leave out one.")
        if self.memory.limit is not None and self.memory.headroom is not None:
            faults.append("memory: limit and headroom say the same: leave out one.")
        if len(set(self.microbatch_size)) < len(self.microbatch_size):
            faults.append(f"microbatch_size: {', '.join(map(str, self.microbatch_size))} has one twice.")
        return faults
