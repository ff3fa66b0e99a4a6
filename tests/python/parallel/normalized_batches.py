"""Batches for layers of batch normalisation, and layers with values in them."""

import torch
from torch import Tensor, nn


def batches(
    size: int, *shape: int, step: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """A batch for each rank: one is empty, one has a single sample if there are three or more.

    Their means and variances differ, between ranks and between channels.
    """
    generator = torch.Generator().manual_seed(step)
    counts = [5, 0, 1, 2][:size]
    made = []
    for rank in range(size):
        count = counts[(rank + step) % size]
        values = torch.randn((count, *shape), generator=generator, dtype=torch.float64)
        channel = torch.arange(shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
        made.append((values * (1 + channel) + 3 * rank - channel).to(dtype))
    return made


def scrambled(layer: nn.Module) -> None:
    """Gives parameters values that show."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
