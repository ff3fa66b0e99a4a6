"""Makes the processes that tests start cheaper; Python runs it in each of them at the beginning.

Hundreds of them load torch, and that makes half a million objects that live to the end; so does
torch's compiler, which the first optimizer of a program loads. Python's garbage collector looks at
all of them while they are made, and again at the end of the process: a third of what a short script
costs. So it does not run while these are loaded, and what torch has made by then, before the
program has made anything, is left out of every later collection.
"""

import gc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _LoadedWithoutCollections(MetaPathFinder):
    """Finds one package, the first time that it is loaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_without_collections(module: ModuleType) -> None:
                collects = gc.isenabled()
                gc.disable()
                try:
                    load(module)
                finally:
                    if fullname == "torch":
                        gc.freeze()
                    if collects:
                        gc.enable()

            spec.loader.exec_module = load_without_collections  # type: ignore[method-assign]
        return spec


for _package in ("torch", "torch._dynamo"):
    sys.meta_path.insert(0, _LoadedWithoutCollections(_package))
