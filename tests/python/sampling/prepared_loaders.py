"""Prepared loaders of one data set for one of two ranks, for tests of what is shared out twice."""

from typing import Any

import pytest
from torch.utils.data import DataLoader

import pydist

DATA: Any = range(22)
RANKS = 2

LOADER_MARKS = [
    pytest.mark.timeout(60),
    # Of machines with one core, and of Python 3.12 and later about fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


def prepared(**settings: Any) -> pydist.PreparedLoader[Any]:
    loader: Any = DataLoader(DATA, **{"batch_size": 4, "shuffle": True, **settings})
    return pydist.prepare(loader, seed=0, num_replicas=RANKS, rank=0)
