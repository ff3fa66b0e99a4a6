"""Every backend does what docs/backends.md and docs/numerics.md promise; see `conformance`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conformance.cases import CASES, run_cases
from conformance.described import differences, reductions
from conformance.suite import Report, complaints_of
from gpu_ranks import needs_gpu_ranks
from launch import Ranks, run_ranks
from staged_gpu import needs_gpu

LIMIT_S = 90.0
pytestmark = pytest.mark.timeout(LIMIT_S + 30)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "backends.md"
BACKENDS: dict[str, dict[str, str | None]] = {
    "native": {"PYDIST_BACKEND": "native"},
    "native, ring": {"PYDIST_BACKEND": "native", "PYDIST_ALGORITHM": "ring"},
    "gloo": {"PYDIST_BACKEND": "gloo"},
}
# 8 are more ranks than most machines have cores that run tests; gloo's ranks would take longest.
SIZES = {"native": (1, 2, 3, 4, 8), "native, ring": (2, 3, 8), "gloo": (1, 2, 3)}
# Small cases then take many chunks, and results must not depend on it.
SMALL_CHUNKS: dict[str, str | None] = {"PYDIST_CHUNK_BYTES": "16384"}
# All tensors on a CUDA device, and in several parts; see Note [Device] in the suite.
DEVICE: dict[str, str | None] = {"CONFORMANCE_DEVICE": "cuda", "PYDIST_STAGING_BYTES": "65536"}
# The same over NCCL; see gpu_ranks.
NCCL: dict[str, str | None] = {"CONFORMANCE_DEVICE": "nccl"}


class Pool:
    """Ranks in one process group, which all tests use; new ones after a test that broke it."""

    def __init__(self, size: int, env: dict[str, str | None]) -> None:
        self._size = size
        self._env = env
        self.on_device = "CONFORMANCE_DEVICE" in env
        self._ranks: Ranks | None = None

    def run(self, name: str) -> list[Report]:
        if self._ranks is None:
            self._ranks = Ranks(self._size, self._env)
        reports: list[Report] = []
        try:
            reports = self._ranks.run(run_cases, name, timeout=LIMIT_S)
        finally:
            if not reports or any(report.failures for report in reports):
                self.close()
        return reports

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


# Of the pools: each way that a collective is made (but for the ring over NCCL, and small chunks,
# which the C++ tests show), and three ranks, which divide little evenly.
EVERYDAY = (
    *("native-1", "native-3", "native, ring-3", "gloo-2", "native, device-3", "nccl, device-2"),
)
# What takes longest, and the pools of it: of the other ones the C++ tests show it.
LONGEST = ("every_op_on_every_dtype", "every_size", "shared_allocations")
EVERYDAY_OF_LONGEST = ("native-3", "gloo-2")


def pools(everyday: Sequence[str]) -> Iterator[object]:
    """What `pool` is made of."""
    for values, name, *marks in all_pools():
        if name not in everyday:
            marks.append(pytest.mark.thorough)
        yield pytest.param(values, id=name, marks=marks)


def all_pools() -> Iterator[tuple[Any, ...]]:
    for name, sizes in (
        ("native", (1, 2, 3, 4, 8)),
        ("native, ring", (2, 3, 8)),
        ("gloo", (1, 2, 3)),
    ):
        for size in sizes:
            yield (size, BACKENDS[name]), f"{name}-{size}"
    for name in ("native", "native, ring"):
        yield (3, {**BACKENDS[name], **SMALL_CHUNKS}), f"{name}, small chunks-3"
    for name, size in (("native", 3), ("gloo", 2)):
        yield (size, {**BACKENDS[name], **DEVICE}), f"{name}, device-{size}", needs_gpu
    for name, algorithm, size in (
        ("nccl", "auto", 2),
        ("nccl", "auto", 4),
        ("nccl, ring", "ring", 3),
    ):
        env = {"PYDIST_BACKEND": "nccl", "PYDIST_ALGORITHM": algorithm, **NCCL}
        yield (size, env), f"{name}, device-{size}", needs_gpu_ranks


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(*request.param)
    yield pool
    pool.close()


@pytest.mark.parametrize("pool", [*pools(EVERYDAY)], indirect=True)
@pytest.mark.parametrize("name", [name for name in CASES if name not in LONGEST])
def test_conformance(pool: Pool, name: str) -> None:
    if pool.on_device and name == "numpy_arrays":
        pytest.skip("numpy arrays are not on a device")
    check(pool, name)


@pytest.mark.parametrize("pool", [*pools(EVERYDAY_OF_LONGEST)], indirect=True)
@pytest.mark.parametrize("name", LONGEST)
def test_conformance_at_length(pool: Pool, name: str) -> None:
    check(pool, name)


def check(pool: Pool, name: str) -> None:
    reports = pool.run(name)
    assert min(report.cases for report in reports) > 0 or len(reports) == 1
    complaints = complaints_of(reports)
    assert not complaints, "\n".join(complaints)


def table_of_page(name: str) -> list[str]:
    found = re.search(rf"<!-- {name}:.*?-->\n(.*?)\n<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None, f"{PAGE} has no table {name!r}"
    return found.group(1).splitlines()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_page_says_what_can_be_reduced(backend: str) -> None:
    for lines in run_ranks(reductions, 2, env=BACKENDS[backend]):
        assert lines == table_of_page("reductions")


@pytest.mark.parametrize(
    ("backend", "env"),
    [
        *BACKENDS.items(),
        pytest.param("nccl", {"PYDIST_BACKEND": "nccl"}, marks=needs_gpu_ranks),
    ],
)
def test_the_page_says_what_differs(backend: str, env: dict[str, str | None]) -> None:
    # Three ranks: the first number for which the ring has an order of its own.
    said = run_ranks(differences, 3, env=env)
    assert all(each == said[0] for each in said)
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")] for line in table_of_page("differences")
    )
    column = head.index(backend)
    assert {row[1]: row[column] for row in rows} == said[0]
