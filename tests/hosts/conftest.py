"""What pytest finds by itself: hosts, and ranks that start quickly."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import warm_up
from namespaces import Hosts, HostsUnavailableError


def pytest_collection_finish(session: pytest.Session) -> None:
    """Loads torch for all ranks before the first test's limit counts: a slow disk takes long."""
    is_here = any(Path(__file__).parent in item.path.parents for item in session.items)
    if is_here and not session.config.option.collectonly:
        warm_up()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts with two links, for all tests of a file; each leaves the links as they were."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(2, links=2))
        except HostsUnavailableError as error:
            pytest.skip(str(error))
        yield made
