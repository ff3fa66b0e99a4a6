"""Where NCCL is looked for on this host, and how its version is read."""

import ctypes
import os
import types
from typing import Any

import gpu_ranks
import pytest
from launch import run_ranks

from pydist.cli import info
from pydist.gpu import nccl
from pydist.gpu.nccl import find_nccl, version_of


@pytest.mark.parametrize(
    ("code", "version"),
    [(22907, "2.29.7"), (23003, "2.30.3"), (2804, "2.8.4"), (21104, "2.11.4")],
)
def test_how_nccl_counts_versions(code: int, version: str) -> None:
    assert version_of(code) == version


class FakeLibrary:
    """What dlopen would return of a library; `code` of None has no ncclGetVersion."""

    def __init__(self, code: int | None, failed: int = 0) -> None:
        self._code, self._failed = code, failed

    def __getattr__(self, name: str) -> Any:
        if name != "ncclGetVersion" or self._code is None:
            raise AttributeError(name)

        def get_version(version: Any) -> int:
            version._obj.value = self._code
            return self._failed

        return get_version


@pytest.mark.parametrize(
    ("loaded", "found"),
    [
        # What torch has loaded comes first, then the wheel's, then the system's.
        ({"noload": 22907, "/wheel/nccl": 23003, "libnccl.so.2": 1}, "2.29.7"),
        ({"/wheel/nccl": 23003, "libnccl.so.2": 1}, "2.30.3"),
        ({"libnccl.so.2": 2804}, "2.8.4"),
        ({}, "NCCL can't be loaded (no libnccl.so.2)"),
        ({"/wheel/nccl": None}, "/wheel/nccl is no NCCL: it has no ncclGetVersion"),
        ({"/wheel/nccl": -1}, "/wheel/nccl does not tell its version (error 5)"),
    ],
)
def test_finding_nccl(
    loaded: dict[str, int | None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_library(path: str, mode: int) -> FakeLibrary:
        name = "noload" if mode & os.RTLD_NOLOAD else path
        if name not in loaded:
            raise OSError(f"no {path}")
        return FakeLibrary(loaded[name], failed=5 if loaded[name] == -1 else 0)

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    monkeypatch.setattr(nccl, "_of_wheels", lambda: ["/wheel/nccl"])
    monkeypatch.setattr(nccl, "_path_of", lambda _, path: path)
    result = find_nccl.__wrapped__()
    assert found in (result.version, result.problem)
    assert bool(result.path) == (not result.problem)


def test_where_nccl_lies(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda _: types.SimpleNamespace(submodule_search_locations=[str(library.parents[1])]),
    )
    assert nccl._of_wheels() == [str(library)]
    # Any function of any library will do to find a file by.
    libc = ctypes.CDLL("libc.so.6")
    libc.ncclGetVersion = libc.getpid
    assert "libc" in os.path.basename(nccl._path_of(libc, "libc.so.6"))
    assert nccl._path_of(libc, "/as/given") == "/as/given"


def measured() -> None:
    gpu_ranks.install()
    taken = info.collect()["nccl"]["device_bytes"]
    assert taken >= 16 << 20, "the scratch memory at least"


@gpu_ranks.needs_gpu_ranks
def test_info_measures_what_a_group_takes_of_the_gpu() -> None:
    run_ranks(measured, 1, timeout=35)
