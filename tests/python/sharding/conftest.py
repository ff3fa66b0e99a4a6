"""Ranks for sharded training on GPUs, of each backend; other files have their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_twins import ENVIRONMENTS, LIMIT_S
from launch import Ranks
from thorough import everyday
from training import Runner


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each day every backend and every stage is tested, and not every pair of them."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        parameters = getattr(item, "callspec", None)
        if parameters is not None and {"ranks_on_gpus", "stage"} <= parameters.params.keys():
            pair = parameters.params["ranks_on_gpus"], parameters.params["stage"]
            if pair in (("nccl-2", 1), ("native-2", 2)):
                item.add_marker(pytest.mark.thorough)


@pytest.fixture(
    scope="module",
    params=everyday("nccl-2", "native-2", thorough=("nccl-3", "native-3", "gloo-2", "gloo-3")),
)
def ranks_on_gpus(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    backend, count = request.param.split("-")
    with Ranks(int(count), ENVIRONMENTS[backend]) as ranks:
        yield ranks


@pytest.fixture
def run_on_gpus(ranks_on_gpus: Ranks) -> Runner:
    return lambda function, *args: ranks_on_gpus.run(function, *args, timeout=LIMIT_S)
