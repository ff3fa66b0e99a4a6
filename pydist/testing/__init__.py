"""For programs that test what they do when something goes wrong."""

import importlib
from types import ModuleType

__all__ = ["faults"]


def __getattr__(name: str) -> ModuleType:
    """Imports `faults` when somebody asks for it: few programs do."""
    if name == "faults":
        return importlib.import_module("pydist.testing.faults")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
