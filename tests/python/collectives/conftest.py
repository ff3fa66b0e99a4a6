"""Ranks for tests of torch.distributed, which the tests of one file share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from launch import Ranks
from thorough import everyday

LIMIT_S = 45.0

Runner = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=everyday("native", thorough=("gloo",)))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=everyday(3, thorough=(1, 2)))
def ranks(request: pytest.FixtureRequest, backend: str) -> Iterator[Ranks]:
    with Ranks(request.param, {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


@pytest.fixture
def run_two(backend: str) -> Iterator[Runner]:
    """For tests that leave the group broken."""
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)
