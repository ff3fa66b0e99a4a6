"""What tests of Accelerate and Transformers run on ranks."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
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
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()


def accelerator_of(whose: str, **settings: Any) -> Any:
    """`ours`, `stock`, or `stock on pydist`, which joins a group of pydist's."""
    if whose == "ours":
        from pydist.integrations.accelerate import Accelerator

        return Accelerator(cpu=True, **settings)
    from accelerate import Accelerator as Stock

    if whose == "stock on pydist":
        pydist.init()
    return Stock(cpu=True, **settings)


def mean_of(steps: list[list[float]]) -> list[float]:
    """The mean over ranks, of each step."""
    return [sum(losses) / len(losses) for losses in zip(*steps, strict=True)]
