"""Finding the NCCL library that this process would use, without using it.

The copy that torch has loaded serves, if there is one; otherwise that of the wheel that CUDA builds
of torch bring along; otherwise the system's. Asking NCCL for its version needs no GPU.
"""

import ctypes
import functools
import importlib.util
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_NAME = "libnccl.so.2"


class NcclLibrary(NamedTuple):
    """NCCL, or why there is none."""

    # As NCCL counts since 2.9: 23003 is 2.30.3. 0 where there is none.
    code: int = 0
    path: str = ""
    problem: str = ""

    @property
    def version(self) -> str:
        return version_of(self.code)


def version_of(code: int) -> str:
    """ "2.30.3" for 23003, and "2.8.4" for 2804, the older way of counting."""
    unit = 10_000 if code >= 10_000 else 1000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"


@functools.cache
def find_nccl() -> NcclLibrary:
    """The NCCL library of this process. What it found stays found."""
    said = []
    for path, mode in [(_NAME, os.RTLD_NOLOAD), *((path, 0) for path in [*_of_wheels(), _NAME])]:
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL | mode)
        except OSError as error:
            said.append(str(error))
            continue
        version = ctypes.c_int()
        try:
            failed = library.ncclGetVersion(ctypes.byref(version))
        except AttributeError:
            return NcclLibrary(problem=f"{path} is no NCCL: it has no ncclGetVersion")
        if failed:
            return NcclLibrary(problem=f"{path} does not tell its version (error {failed})")
        return NcclLibrary(version.value, _path_of(library, path))
    return NcclLibrary(problem=f"NCCL can't be loaded ({said[-1]})")


def connect_at_joining() -> None:
    """Lets NCCL connect ranks when they join a group, unless the user has chosen.

    From 2.22 on it connects them when they first call a collective of a kind, and that call is
    under way until all of them have come: it would keep its caller, for whom another rank may wait
    before it comes itself. NCCL reads the variable once, for the first group of the process. It is
    set here, on the thread that starts a job, because the C library lets no other thread read the
    environment meanwhile.
    """
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


def _of_wheels() -> list[str]:
    """Where wheels of NCCL keep it; nvidia is a namespace package, spread over several folders."""
    spec = None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia.nccl")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [Path(folder) / "lib" / _NAME for folder in folders or ()]
    return [str(file) for file in files if file.exists()]


def _path_of(library: ctypes.CDLL, path: str) -> str:
    """The file that a loaded library came from: only the linker knows which it took for a name."""
    if os.sep in path:
        return path
    address = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split(" ", 1)[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return line.split(maxsplit=5)[-1]
    return path
