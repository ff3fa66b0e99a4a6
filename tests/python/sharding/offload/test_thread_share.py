"""On how many threads a rank steps on the host."""

from __future__ import annotations

import pytest

from pydist.sharding.offload.thread_share import share_of

pytestmark = pytest.mark.timeout(60)

ALL = frozenset(range(64))


@pytest.mark.parametrize(
    ("places", "quota", "threads"),
    [
        ([("a", ALL)] * 8, None, 7),
        ([("a", frozenset(range(8 * rank, 8 * rank + 8))) for rank in range(8)], None, 7),
        ([("a", ALL)] * 4 + [("b", ALL)] * 4, None, 15),
        ([("a", frozenset(range(32)))] * 2 + [("a", frozenset(range(32, 64)))] * 2, None, 15),
        ([("a", ALL)] * 8, 24.0, 2),
        ([("a", ALL)] * 8, 4.5, 1),
        ([("a", frozenset({0, 1}))] * 2, None, 1),
        ([("a", ALL)], None, 63),
    ],
)
def test_a_rank_has_its_share_but_for_one(
    places: list[tuple[str, frozenset[int]]], quota: float | None, threads: int
) -> None:
    assert [share_of(rank, places, quota) for rank in range(len(places))] == [threads] * len(places)
