"""Models that a command line names: `model.py`, `model.py:build`, `package.module:build`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import nn

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type

# What is looked for where no name is given, in this order.
DEFAULT_NAMES = ("build_model", "model", "Model")


def load_source(source: str) -> tuple[ModuleType, str]:
    """Imports the file or module of a source.

    A file is imported, not run: what stands behind `if __name__ == "__main__":` stays out.

    Args:
        source: "FILE.py", "FILE.py:NAME", "MODULE" or "MODULE:NAME"; NAME may have dots.

    Returns:
        The module, and the name: one of DEFAULT_NAMES where none was given.

    Raises:
        InvalidUsage: there is no such file, module or name, or importing it failed.
    """
    place, _, name = source.partition(":")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    if name:
        return module, name
    for default in DEFAULT_NAMES:
        if hasattr(module, default):
            return module, default
    raise InvalidUsage(
        f"{place} defines none of {', '.join(DEFAULT_NAMES)}: say what makes the model, "
        f"{place}:NAME"
    )


def find(module: ModuleType, name: str) -> Any:
    """What a module has under a name with dots.

    Raises:
        InvalidUsage: nothing; the message lists what there is.
    """
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = sorted(
                key
                for key, value in vars(module).items()
                if not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
            )
            raise InvalidUsage(
                f"{_described(module)} has no {name}; it defines: {', '.join(own) or 'nothing'}"
            )
        found = getattr(found, part)
    return found


def build_model(module: ModuleType, name: str, *, on_meta: bool = True) -> nn.Module:
    """Makes the model that a name stands for: an `nn.Module`, or what returns one.

    It is built on the device "meta", where it takes no memory, or, if it can't be, on the CPU.

    Args:
        module: Where the name is.
        name: If it isn't the model itself, it is called without arguments.
        on_meta: Whether "meta" is tried. Without, the model has values.

    Raises:
        InvalidUsage: there is no such name, or it makes no model.
    """
    found = find(module, name)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise InvalidUsage(
            f"{name} in {_described(module)} is {a_type(found)}; it must be a torch.nn.Module, or "
            "a function or class that makes one"
        )
    model = None
    if on_meta:
        # One that looks at values can't be made there.
        with contextlib.suppress(Exception), torch.device("meta"):
            model = found()
    if model is None:
        model = guarded(f"{name}() in {_described(module)}", found)
    if not isinstance(model, nn.Module):
        raise InvalidUsage(
            f"{name}() in {_described(module)} returned {a_type(model)}; it must return a "
            "torch.nn.Module"
        )
    return model


def guarded(what: str, call: Callable[[], Any]) -> Any:
    """Calls a user's code; what goes wrong there is an InvalidUsage that says where."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise InvalidUsage(
            f"{what} raised {type(error).__name__}: {error}{_place_of(error.__traceback__)}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidUsage(f"no such file: {path}")
    # As `python FILE` finds what lies beside it.
    sys.path.insert(0, str(path.resolve().parent))
    name = path.stem if path.stem not in sys.modules else f"model in {path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses and pickle look for it.
    sys.modules[name] = module
    loader = spec.loader
    guarded(f"importing {path}", lambda: loader.exec_module(module))
    return module


def _import_module(name: str) -> ModuleType:
    # As with `python -m`.
    sys.path.insert(0, "")
    try:
        missing = not name or importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        raise InvalidUsage(f"no such module: {name!r}; a file ends with .py")
    loaded: ModuleType = guarded(f"importing {name}", lambda: importlib.import_module(name))
    return loaded


def _described(module: ModuleType) -> str:
    return Path(module.__file__).name if module.__file__ else module.__name__


def _place_of(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
