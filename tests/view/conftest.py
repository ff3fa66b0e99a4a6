"""A browser for the tests of this folder, which are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from time_limit import PATIENCE

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--window-size=1280,1400",
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, driven by selenium, with a profile of its own."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = programs["chromium"]
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(
        options=options, service=selenium.ChromeService(programs["chromedriver"])
    )
    driver.set_page_load_timeout(30 * PATIENCE)
    driver.set_script_timeout(30 * PATIENCE)
    yield driver
    driver.quit()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder for the runs of a test."""
    return tmp_path / "runs"
