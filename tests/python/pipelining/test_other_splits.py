"""A pipeline goes on from its checkpoints in another split, with the losses of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from pipelines import Place, batch, whole_model
from torch import Tensor, nn

import pydist
from pydist.checkpoint import from_parts

BEFORE, AFTER = 3, 3


def adamw(model: nn.Module, sharded: bool, lr: float) -> Any:
    """Weights decay, biases don't."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    if sharded:
        return pydist.ShardedOptimizer(groups, torch.optim.AdamW, lr=lr)
    return torch.optim.AdamW(groups, lr=lr)


def alone() -> list[float]:
    model = whole_model()
    optimizer = adamw(model, False, 0.02)
    losses = []
    for step in range(BEFORE + AFTER):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Pipeline:
    """This rank's stages, with an optimizer for each."""

    def __init__(self, kind: str, sharded: bool, seed: int, lr: float) -> None:
        self.place = Place(2, kind)
        model = whole_model()
        if seed:
            torch.manual_seed(seed)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)
        self.stages = self.place.make(model)
        self.models = [stage.submod for stage in self.stages]
        self.optimizers = [adamw(each, sharded, lr) for each in self.models]
        self.schedule = self.place.schedule(kind, self.stages, nn.functional.mse_loss)

    def train(self, steps: range) -> list[float]:
        """The losses, on the ranks that have the last stage."""
        losses = []
        for step in steps:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            x, y = batch(step)
            parts: list[Tensor] = []
            args = (x[self.place.share],) if 0 in self.place.stages else ()
            if self.place.of_all - 1 in self.place.stages:
                self.schedule.step(*args, target=y[self.place.share], losses=parts)
                mean = torch.stack(parts).mean().detach()
                losses.append(pydist.all_reduce(mean, "mean", group=self.place.peers).item())
            else:
                self.schedule.step(*args)
            for optimizer in self.optimizers:
                optimizer.step()
        return losses


def goes_on(
    folder: str, before: tuple[str, bool], after: tuple[str, bool]
) -> tuple[list[float], list[float]]:
    first = Pipeline(*before, seed=0, lr=0.02)
    losses = first.train(range(BEFORE))
    for stage, model, optimizer in zip(
        first.place.stages, first.models, first.optimizers, strict=True
    ):
        pydist.save(Path(folder) / f"stage{stage}", model=model, optimizer=optimizer)
    pydist.barrier()
    paths = [Path(folder) / f"stage{stage}" for stage in range(first.place.of_all)]
    second = Pipeline(*after, seed=1, lr=1.0)
    for model, optimizer in zip(second.models, second.optimizers, strict=True):
        from_parts(paths, model=model, optimizer=optimizer)
    return losses, second.train(range(BEFORE, BEFORE + AFTER))


FOUR, TWO = "Interleaved1F1B", "1F1B"  # stages, on as many ranks


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((FOUR, True), (TWO, False)),
        ((TWO, False), (FOUR, True)),
        pytest.param((FOUR, False), (TWO, True), marks=pytest.mark.thorough),
        pytest.param((TWO, True), (FOUR, False), marks=pytest.mark.thorough),
    ],
)
def test_losses_go_on(
    four: Ranks, tmp_path: Path, before: tuple[str, bool], after: tuple[str, bool]
) -> None:
    expected = alone()
    found = four.run(goes_on, str(tmp_path), before, after)
    for losses in ([first + second for first, second in found][r] for r in (1, 3)):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
