"""What pytest finds by itself: the fixtures of tests that train, and ranks that start quickly."""

import gc
from collections.abc import Iterator

import pytest
from beside_torch import run_on_some, some_ranks
from launch import warm_up
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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Loads torch for all ranks before the first test's limit counts: a slow disk takes long.

    The collector leaves alone from here on what was there before the first test: torch, and
    thousands of tests, through which each test that collects would go.
    """
    gc.freeze()
    if not session.config.option.collectonly and any(map(_uses_ranks, session.items)):
        warm_up()


def _uses_ranks(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    names = {"Ranks", "Runner", "rank_outcomes", "run_ranks"}
    return not names.isdisjoint(vars(module) if module else ())
