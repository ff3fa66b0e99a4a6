"""What pytest finds by itself: hosts, and ranks that start quickly."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_or_skip import hosts_or_skip
from launch import warm_up
from namespaces import Hosts


def pytest_collection_finish(session: pytest.Session) -> None:
    """Loads torch for all ranks before the first test's limit counts: a slow disk takes long."""
    is_here = any(Path(__file__).parent in item.path.parents for item in session.items)
    if is_here and not session.config.option.collectonly:
        warm_up()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts with two links, for all tests of a file; each leaves the links as they were."""
    with hosts_or_skip(2, links=2) as hosts:
        yield hosts
