"""A user's callable by name: ``file.py:callable`` or ``package.module:callable``."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dpart.runtime.errors import UserError

_IS_OURS = str(Path(__file__).parent)


def load_callable(spec: str, *, folder: Path | None = None) -> Callable[..., Any]:
    """The callable that `spec` names. Runs the user's file, as importing it would.

    Args:
        spec: ``path/to/file.py:callable`` or ``package.module:callable``.
        folder: What a relative path starts from; the current one by default.

    Raises:
        UserError: There is no such file, module or callable, or it cannot be imported.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{spec!r}: expected file.py:callable or package.module:callable.")
    module = _from_file(place, folder) if place.endswith(".py") else _from_path(place)
    value = getattr(module, name, None)
    if value is None:
        others = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise UserError(f"{place} has no {name!r}; it has: {', '.join(others) or 'no callable'}.")
    if not callable(value):
        raise UserError(f"{spec}: expected something to call, got {type(value).__qualname__}.")
    found: Callable[..., Any] = value
    return found


def _from_file(place: str, folder: Path | None) -> ModuleType:
    path = (folder or Path()) / place
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    path = path.resolve()
    name = f"dpart_user_{path.stem}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # A script finds the files beside it, and so must a file that runs as one.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise user_fault(f"{place} cannot be imported", error) from error
    return module


def _from_path(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise user_fault(f"{place} cannot be imported", error) from error


def user_fault(what: str, error: BaseException) -> UserError:
    """An error that the user's own code raised, as one message with the place in that code.

    Args:
        what: What failed, as in ``model.py cannot be imported``.
    """
    if isinstance(error, UserError):
        return error
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if _IS_OURS not in frame.filename and "importlib" not in frame.filename and "/torch/" not in frame.filename:
            place = f" at {frame.filename}:{frame.lineno}, in {frame.name}"
    if isinstance(error, SyntaxError) and error.filename:
        place = f" at {error.filename}:{error.lineno}"
    return UserError(f"{what}: {type(error).__name__}{place}: {error}")
