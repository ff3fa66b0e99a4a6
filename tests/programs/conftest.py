"""What pytest runs by itself before the first of these tests."""

from pathlib import Path

import pytest
from launch import warm_up


def pytest_collection_finish(session: pytest.Session) -> None:
    """Loads torch for all ranks before the first test's limit counts: a slow disk takes long."""
    is_here = any(Path(__file__).parent in item.path.parents for item in session.items)
    if is_here and not session.config.option.collectonly:
        warm_up()
