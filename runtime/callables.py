"""Loads the callable that ``file.py:callable`` or ``package.module:callable`` names."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dpart.runtime.errors import UserError


def load_callable(spec: str) -> Callable[..., Any]:
    """The callable that `spec` names; its file or module is imported.

    Raises:
        UserError: The form is another, there is no such file, module or name, or importing it fails.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise UserError(f"{spec!r}: expected file.py:callable or package.module:callable.")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    found = getattr(module, name, None)
    if found is None:
        raise UserError(f"{spec}: {place} has no {name}.")
    if not callable(found):
        raise UserError(f"{spec}: {name} is no function, but {type(found).__qualname__}.")
    result: Callable[..., Any] = found
    return result


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    folder = os.fspath(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # As `python file.py` does, so that the file finds its neighbours.
    name = f"_dpart_{path.stem}"
    loading = importlib.util.spec_from_file_location(name, path)
    assert loading is not None
    assert loading.loader is not None
    module = importlib.util.module_from_spec(loading)
    sys.modules[name] = module
    try:
        loading.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(_explain(str(path), error)) from error
    return module


def _from_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise UserError(f"{name}: no such module.") from None
        raise UserError(_explain(name, error)) from error
    except Exception as error:
        raise UserError(_explain(name, error)) from error


def _explain(source: str, error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else source
    return f"{source}: importing it failed at {where}: {type(error).__name__}: {error}"
