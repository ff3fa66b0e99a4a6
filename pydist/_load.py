"""Loads the compiled module, or says in one sentence why it cannot be loaded.

Imported before any other module of the package. torch comes first: the compiled module shares
its libraries and its pybind11 types. The check of versions stands before the load, because a
module built for another torch minor fails on a mangled symbol name, or worse, later.
"""

import sys
from importlib import import_module

import torch

_REBUILD = "`pip install --no-build-isolation --force-reinstall --no-deps` from its sources"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _load() -> str:
    try:
        build = import_module("pydist._build")
    except ModuleNotFoundError:
        raise ImportError(
            "pydist is not built: this is its source tree, so install it first with "
            "`pip install --no-build-isolation -e .` (or `make`)."
        ) from None
    if _minor(torch.__version__) != build.TORCH_MINOR:
        raise ImportError(
            f"pydist {build.VERSION} was built for torch {build.TORCH_MINOR}, and this is torch "
            f"{torch.__version__}: install torch {build.TORCH_MINOR}.*, or rebuild pydist with "
            f"{_REBUILD}."
        )
    try:
        import_module("pydist._native")
    except ModuleNotFoundError:
        python = ".".join(map(str, sys.version_info[:3]))
        raise ImportError(
            f"pydist {build.VERSION} was built for Python {build.PYTHON_VERSION}, and this is "
            f"Python {python}: rebuild pydist with {_REBUILD}."
        ) from None
    version: str = build.VERSION
    return version


__version__ = _load()
