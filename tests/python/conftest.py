"""What pytest finds by itself: the time limit of each test, the fixtures of those that train."""

from time_limit import pytest_configure, pytest_timeout_cancel_timer, pytest_timeout_set_timer
from training import backend, ranks, run, run_on_each, three

__all__ = [
    "backend",
    "pytest_configure",
    "pytest_timeout_cancel_timer",
    "pytest_timeout_set_timer",
    "ranks",
    "run",
    "run_on_each",
    "three",
]
