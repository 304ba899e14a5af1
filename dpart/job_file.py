"""`JobFile`: the fields of dpart.yaml as they are written, checked one by one and against each other. No torch.

A field is read strictly: no number where a text is expected, units with every size and time. What may be chosen is
what `partition` has, and one item may stand where a list is expected.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import AfterValidator, BeforeValidator

from dpart.partitioner.objectives import partition_for
from dpart.partitioner.partition import partition
from dpart.partitioner.units import parse_size, parse_time
from dpart.profiler.devices import device_kind
from dpart.runtime.errors import UserError

EXTRAS = ("profile", "trace")
"""What a build folder may keep beside what it needs: the profiles, and the predicted step for ui.perfetto.dev."""


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
    """Of what an option of `partition` or `partition_for` may be."""
    hints = get_type_hints(partition) | get_type_hints(partition_for)
    return AfterValidator(partial(_one_of, _literals(hints[option])))


def _literals(hint: Any) -> tuple[str, ...]:
    """The values of a literal type, or of a union of them."""
    return tuple(value for arg in get_args(hint) for value in ((arg,) if isinstance(arg, str) else _literals(arg)))


_COUNT = Annotated[int, AfterValidator(_positive)]
_COUNTS = Annotated[tuple[_COUNT, ...], BeforeValidator(_as_list)]
_NAMES = Annotated[tuple[str, ...], BeforeValidator(_as_list)]


@dataclass(frozen=True)
class MemoryEntry:
    """What a plan may use of each device, in one of two ways."""

    limit: Annotated[int | None, BeforeValidator(parse_size)] = None
    headroom: Annotated[float, AfterValidator(_share)] | None = None


@dataclass(frozen=True)
class ConstraintsEntry:
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
class JobFile:
    """All fields; what they mean stands at `dpart.job.Job` and `partition`."""

    model: Annotated[str, AfterValidator(_spec)]
    topology: Any = None
    estimate: Annotated[str, AfterValidator(_kind)] | None = None
    degrees: _COUNTS = ()
    profile: _NAMES = ()
    batch_size: _COUNT | None = None
    microbatch_size: _COUNTS = ()
    repeats: _COUNT | None = None
    objective: Annotated[str, _choice("objective")] | None = None
    target_step: Annotated[float | None, BeforeValidator(_seconds)] = None
    method: Annotated[str, _choice("method")] | None = None
    schedule: Annotated[str, _choice("schedule")] | None = None
    optimizer: Annotated[str, _choice("optimizer")] | None = None
    memory: MemoryEntry = field(default_factory=MemoryEntry)
    constraints: ConstraintsEntry = field(default_factory=ConstraintsEntry)
    time_limit: Annotated[float | None, BeforeValidator(_seconds)] = None
    keep: Annotated[tuple[Annotated[str, AfterValidator(partial(_one_of, EXTRAS))], ...], BeforeValidator(_as_list)] = (
        "profile",
    )

    def options(self) -> dict[str, Any]:
        """Of `partition_for`, those that the file says."""
        said = {
            "objective": self.objective,
            "target_step_seconds": self.target_step,
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
        if self.degrees and self.estimate is None:
            faults.append("degrees: what is measured is measured at degree 1: this goes with estimate.")
        if (self.objective == "devices") != (self.target_step is not None):
            faults.append("target_step: the objective 'devices' needs one, and no other does.")
        for name in ("estimate", "microbatch_size", "repeats"):
            if self.profile and getattr(self, name):
                faults.append(f"{name}: profile names what is planned with, so nothing is profiled: leave out one.")
        if self.memory.limit is not None and self.memory.headroom is not None:
            faults.append("memory: limit and headroom say the same: leave out one.")
        if len(set(self.microbatch_size)) < len(self.microbatch_size):
            faults.append(f"microbatch_size: {', '.join(map(str, self.microbatch_size))} has one twice.")
        return faults
