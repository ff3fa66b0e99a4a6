"""What pytest finds by itself: hosts."""

from collections.abc import Iterator

import pytest
from hosts_or_skip import hosts_or_skip
from namespaces import Hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts with two links, for all tests of a file; each leaves the links as they were."""
    with hosts_or_skip(2, links=2) as hosts:
        yield hosts
