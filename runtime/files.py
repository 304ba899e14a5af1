"""Files as plain data: JSON of frozen dataclasses, validated on the way in, written atomically.

A file type is a frozen dataclass whose first two fields are ``format: Literal["dpart.xyz"]`` and
``version: Literal[1]``. Reading one never runs code, refuses unknown and ill-typed fields, and lists all
faults found with their paths::

    plan.json: stages[2].devices[0]: expected an integer, got "gpu0"
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dpart.runtime.errors import UserError

T = TypeVar("T")

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
}


def to_json(value: Any) -> str:
    """The text of a dataclass as it stands in its file: fields in order, two-space indent, deterministic."""
    return json.dumps(dataclasses.asdict(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(cls: type[T], text: str, source: str) -> T:
    """The dataclass `cls` that `text` holds; `source` names the file in errors.

    Raises:
        UserError: The text is not JSON, or not such a dataclass; all faults are listed.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"{source}: not a JSON file: {error}.") from None
    return validated(cls, data, source)


def validated(cls: type[T], data: Any, source: str) -> T:
    """The dataclass `cls` made of plain `data` (what a JSON or YAML reader returns).

    Raises:
        UserError: The data does not fit; all faults are listed with their paths.
    """
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    wanted = {f.name: get_args(f.type)[0] for f in fields if f.name in ("format", "version")}
    if isinstance(data, dict) and "format" in wanted and data.get("format") != wanted["format"]:
        raise UserError(f"{source}: expected a {wanted['format']} file, got format {data.get('format')!r}.")
    if isinstance(data, dict) and "version" in wanted and data.get("version") != wanted["version"]:
        raise UserError(
            f"{source}: this dpart reads version {wanted['version']} of {wanted['format']}, "
            f"got {data.get('version')!r}; make the file again."
        )
    try:
        # JSON has no tuples: validating in JSON mode reads lists as tuples, and stays strict about the rest.
        return _adapter(cls).validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise UserError("\n".join(f"{source}: {_fault(e)}" for e in error.errors())) from None


def read_file(cls: type[T], path: str | os.PathLike[str]) -> T:
    """Reads the file of a dataclass.

    Raises:
        UserError: The file is missing or does not hold such a dataclass.
    """
    return from_json(cls, read_text(path), os.fspath(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a user's file, or a `UserError` that says why it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{os.fspath(path)}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{os.fspath(path)}: cannot be read: {error}.") from None


def write_file(value: Any, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Writes a dataclass to its file, atomically.

    Raises:
        UserError: The file exists and `force` is false, or its folder cannot be written.
    """
    write_text(to_json(value), path, force=force)


def write_text(text: str, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Writes a text file: either all of it is there afterwards, or nothing has changed."""
    target = Path(path)
    refuse_existing(target, force=force)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent or ".")
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}.") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def relative(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> str:
    """The path as seen from the folder of `file`, with forward slashes."""
    return Path(os.path.relpath(Path(path).resolve(), Path(file).resolve().parent)).as_posix()


def refuse_existing(path: str | os.PathLike[str], *, force: bool) -> None:
    """Raises a `UserError` if something stands at `path` and `force` is false."""
    if Path(path).exists() and not force:
        raise UserError(f"{os.fspath(path)}: exists already; give another name, or --force to replace it.")


@contextmanager
def new_folder(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """A folder to fill that takes its place at `path` only when the block ends well.

    Raises:
        UserError: Something stands at `path` and `force` is false. With `force`, only a folder that holds a
            ``program.json`` (one that dpart made) or nothing is replaced.
    """
    target = Path(path)
    refuse_existing(target, force=force)
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / "program.json").is_file())):
        raise UserError(f"{target}: --force replaces a folder that dpart made, and this is not one.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}.") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _adapter(cls: type[T]) -> TypeAdapter[T]:
    for part in _dataclasses_in(cls, set()):
        part.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    return TypeAdapter(cls)


def _dataclasses_in(annotation: Any, seen: set[Any]) -> set[Any]:
    if dataclasses.is_dataclass(annotation) and annotation not in seen:
        seen.add(annotation)
        for field in dataclasses.fields(annotation):
            _dataclasses_in(field.type, seen)
    for argument in getattr(annotation, "__args__", ()):
        _dataclasses_in(argument, seen)
    return seen


def _fault(error: Any) -> str:
    where = _path(error["loc"])
    kind, got = error["type"], json.dumps(error.get("input"), default=str, ensure_ascii=False)
    got = got if len(got) <= 60 else got[:57] + "..."
    if kind == "missing":
        return f"{where}: this field is missing."
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: no such field."
    if kind in _EXPECTED:
        return f"{where}: expected {_EXPECTED[kind]}, got {got}."
    if kind == "literal_error":
        return f"{where}: expected {error['ctx']['expected']}, got {got}."
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message[0].lower()}{message[1:]}, got {got}."


def _path(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the file"
