"""What pytest finds by itself for the benchmarks: time limits, the clock, the fixtures."""

from pathlib import Path
from typing import Any

import pytest
import time_limit
from rank_groups import BENCHMARK_LIMIT_S, measure_in_turns, rank_groups
from replayed_times import CLOCK, record
from time_limit import pytest_timeout_cancel_timer, pytest_timeout_set_timer

from pydist.benchmarks import machine

__all__ = [
    "measure_in_turns",
    "pytest_timeout_cancel_timer",
    "pytest_timeout_set_timer",
    "rank_groups",
    "record",
]

# Of benchmarks that failed, which says enough by itself, and of their processes.
_WARNINGS_AFTER_FAILURES = ("Benchmark fixture was not used", "resource_tracker")


def pytest_configure(config: pytest.Config) -> None:
    time_limit.pytest_configure(config)
    machine.keep_freed_blocks()
    for message in _WARNINGS_AFTER_FAILURES:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(BENCHMARK_LIMIT_S))
            item.add_marker(pytest.mark.benchmark(timer=CLOCK.read))


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """Instead of pytest-benchmark's own, which leaves out much that figures depend on."""
    described = machine.describe()
    return {"hardware": described.hardware, **described.to_dict()}
