"""Makes the processes that tests start cheaper; Python runs it in each of them at the beginning.

Hundreds of them load torch, and that makes half a million objects that live to the end. Python's
garbage collector looks at all of them while they are made, and again at the end of the process:
a third of what a short script costs. So it does not run while torch is loaded, and what torch has
made by then is left out of every later collection. All other objects are collected as ever.
"""

import gc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _TorchWithoutCollections(MetaPathFinder):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_without_collections(module: ModuleType) -> None:
                gc.disable()
                try:
                    load(module)
                finally:
                    gc.freeze()
                    gc.enable()

            spec.loader.exec_module = load_without_collections  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _TorchWithoutCollections())
