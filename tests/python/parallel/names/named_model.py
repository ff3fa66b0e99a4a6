"""A wrapped model for tests of names, and what a program that uses it is told."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import nn

import pydist


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


def build() -> Any:
    torch.manual_seed(0)
    pydist.init()
    return pydist.DataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ModuleDict({"head": nn.Linear(2, 1)}))
    )


def warned_twice(function: Callable[[Any], None]) -> list[tuple[str, str]]:
    """The warnings of a program that is run twice: what they say, and of which file."""
    model = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(model)
        function(model)
    return [(str(warning.message), warning.filename) for warning in caught]
