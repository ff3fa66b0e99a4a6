"""Parameters of which the everyday tests take some, and `make test-all` all."""

from typing import Any

import pytest


def everyday(*values: Any, thorough: tuple[Any, ...]) -> list[Any]:
    """Values for a parameter: `values` for every run, `thorough` for `make test-all` alone.

    What is `thorough` shows the same as the others once more: on another backend, with another
    number of ranks, for another dtype.
    """
    return [*values, *(pytest.param(value, marks=pytest.mark.thorough) for value in thorough)]
