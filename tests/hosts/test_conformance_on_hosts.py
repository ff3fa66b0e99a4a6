"""The conformance suite in splits of ranks over hosts, some with more ranks than cores."""

from collections.abc import Iterator

import pytest
from conformance.cases import CASES, run_cases
from conformance.suite import complaints_of
from hosts_or_skip import hosts_or_skip
from launch import Ranks
from ranks_on import RanksOn

pytestmark = [pytest.mark.timeout(120), pytest.mark.thorough]

SPLITS = [[1, 1], [2, 1], [2, 2], [1, 3], [1, 1, 1], [1, 2, 1]]


@pytest.fixture(scope="module", params=SPLITS, ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with hosts_or_skip(len(request.param)) as hosts, RanksOn(hosts, request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("name", CASES)
def test_conformance_over_hosts(ranks: Ranks, name: str) -> None:
    reports = ranks.run(run_cases, name, timeout=90)
    assert min(report.cases for report in reports) > 0
    complaints = complaints_of(reports)
    assert not complaints, "\n".join(complaints)
