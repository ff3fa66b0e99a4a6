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
IN_ROUNDS = [[1, 1, 1, 1, 1], [1, 2, 1]]


@pytest.fixture(
    scope="module",
    params=[(split, 1_000) for split in SPLITS] + [(split, 2) for split in IN_ROUNDS],
    ids=lambda param: f"{param[0]}{' in rounds' if param[1] == 2 else ''}",
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    split, rounds_from = request.param
    env = {"PYDIST_ROUNDS_FROM": str(rounds_from)}
    with hosts_or_skip(len(split)) as hosts, RanksOn(hosts, split, env=env) as ranks:
        yield ranks


@pytest.mark.parametrize("name", CASES)
def test_conformance_over_hosts(ranks: Ranks, name: str) -> None:
    reports = ranks.run(run_cases, name, timeout=90)
    assert min(report.cases for report in reports) > 0
    complaints = complaints_of(reports)
    assert not complaints, "\n".join(complaints)
