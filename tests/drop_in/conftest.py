"""What pytest finds by itself: the ranks of all arms."""

from collections.abc import Iterator

import pytest
from arms import Arms


@pytest.fixture(scope="session")
def arms() -> Iterator[Arms]:
    arms = Arms()
    yield arms
    arms.close()
