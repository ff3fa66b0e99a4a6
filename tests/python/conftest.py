"""What pytest finds by itself: the fixtures of tests that train."""

from collections.abc import Iterator

import pytest
from beside_torch import run_on_some, some_ranks
from saved_training import four
from training import backend, ranks, run, run_on_each, run_over_hosts, three, three_hosts
from twins import native_three, run_native, run_sharded, sharded_ranks

import pydist

__all__ = [
    "backend",
    "four",
    "native_three",
    "ranks",
    "run",
    "run_native",
    "run_on_each",
    "run_on_some",
    "run_over_hosts",
    "run_sharded",
    "sharded_ranks",
    "some_ranks",
    "three",
    "three_hosts",
    "world_of_one",
]


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """For a test whose calls join a job by themselves."""
    yield
    pydist.shutdown()
