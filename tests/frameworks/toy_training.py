"""What the trainings of all frameworks are made of."""

import contextlib
import gc
import multiprocessing
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import pydist


class Points(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Points with their number, so that a training can say which ones it got."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._inputs = torch.randn(length, 6, generator=generator)
        self._targets = torch.randn(length, 1, generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor(index), self._inputs[index], self._targets[index]


def network() -> nn.Module:
    """The same on every rank and in every process."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def gradient_of_all(length: int) -> Tensor:
    """That of the mean loss over all points, of the network in float64, as one process has it."""
    points = Points(length)
    _, inputs, targets = (
        torch.stack([points[i][part] for i in range(length)]) for part in range(3)
    )
    reference = network().double()
    nn.functional.mse_loss(reference(inputs.double()), targets.double()).backward()
    return torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])


def weights_of(model: nn.Module) -> Tensor:
    """All of a model's parameters, one behind the other, as they are now."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def allow_workers() -> None:
    """Lets a rank of a test have loaders with workers: ranks are daemons, which Python forbids."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Leaves the job at the end, so that the next call on these ranks begins anew.

    Decorates a function, whose models are gone by then: torch's wrapper needs its group to go.
    """
    try:
        yield
    finally:
        gc.collect()
        pydist.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
