"""The models and batches that most programs use."""

from __future__ import annotations

import torch
from harness import Library
from torch import Tensor, nn

# Of all ranks together: as many for each of 1, 2 and 3 ranks.
ROWS = 12
FEATURES = 6
CLASSES = 3


def mlp() -> nn.Sequential:
    """Two layers, which take rows of six and tell three classes apart."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def batch(lib: Library, number: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a batch, and their classes."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    classes = torch.randint(CLASSES, (ROWS,), generator=generator)
    return lib.share(inputs), lib.share(classes)


def words(lib: Library, number: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of five words of twenty, and their classes."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(20, (ROWS, 5), generator=generator)
    return lib.share(rows), lib.share(torch.arange(ROWS) % CLASSES)


def dataset(rows: int = 2 * ROWS) -> torch.utils.data.TensorDataset:
    """All rows of a small data set, on every rank, and their classes."""
    generator = torch.Generator().manual_seed(99)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(
        inputs, torch.randint(CLASSES, (rows,), generator=generator)
    )
