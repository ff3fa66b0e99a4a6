"""A training run that checkpoints are made of, whole and sharded, on some of the ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor
from training import Tied

import pydist

# Of a call on all ranks.
LIMIT_S = 50.0

# How an optimizer is sharded.
Kind = int
WHOLE, STAGE_1, STAGE_2 = 0, 1, 2
SAMPLES = 24


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, {"PYDIST_BACKEND": "native"}) as ranks:
        yield ranks


class Training:
    """A model, its optimizer and its schedule, on the first `size` ranks."""

    def __init__(
        self,
        group: Any,
        kind: Kind,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        optimizer_class: Any = torch.optim.AdamW,
        frozen: tuple[str, ...] = (),
        layout: torch.memory_format = torch.channels_last,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.rank, self.size, self.dtype = group.rank, group.size, dtype
        module = Tied(dtype)
        module.image.to(memory_format=layout)  # type: ignore[call-overload]
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
        self.model = pydist.DataParallel(module, process_group=group, bucket_cap_mb=0.0005)
        named = list(self.model.named_parameters())
        groups: Any = [
            {"params": [n for n in named if n[1].dim() > 1], "weight_decay": 0.1},
            {"params": [n for n in named if n[1].dim() <= 1]},
        ]
        options = {"lr": 1e-2, **options}
        self.optimizer: torch.optim.Optimizer
        if kind == WHOLE:
            self.optimizer = optimizer_class(groups, **options)
        else:
            self.optimizer = pydist.ShardedOptimizer(
                groups,
                optimizer_class,
                stage=kind,  # type: ignore[arg-type]
                **options,
            )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def values(self) -> list[Tensor]:
        return [value.detach().clone() for value in self.model.state_dict().values()]

    def run(self, steps: range) -> list[Tensor]:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
            self.optimizer.zero_grad()
            share = batch.to(self.dtype).view(self.size, -1, 8)[self.rank]
            self.model(share).mean().backward()
            self.optimizer.step()
            self.scheduler.step()
        return [p.detach().clone() for p in self.model.parameters()]


def assert_same(ours: list[Tensor], theirs: list[Tensor], what: str, *, exact: bool) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if exact:
            assert torch.equal(a, b), f"{what}: {(a - b).abs().max()} apart"
        else:
            torch.testing.assert_close(
                a, b, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}"
            )


class Keeps:
    """Its state is whatever it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
