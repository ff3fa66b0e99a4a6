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
from pydist.sharding.state.ranges import MASTER

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

    def __init__(
        self,
        kind: str,
        sharded: bool,
        seed: int,
        lr: float,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.place = Place(2, kind)
        self.dtype = dtype
        model = whole_model(dtype)
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
            x, y = batch(step, self.dtype)
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

    def save(self, folder: Path) -> list[Path]:
        """Returns the checkpoints of all stages."""
        for stage, model, optimizer in zip(
            self.place.stages, self.models, self.optimizers, strict=True
        ):
            pydist.save(folder / f"stage{stage}", model=model, optimizer=optimizer)
        pydist.barrier()
        return [folder / f"stage{stage}" for stage in range(self.place.of_all)]

    def load(self, paths: list[Path]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            from_parts(paths, model=model, optimizer=optimizer)


def goes_on(
    folder: str, before: tuple[str, bool], after: tuple[str, bool]
) -> tuple[list[float], list[float]]:
    first = Pipeline(*before, seed=0, lr=0.02)
    losses = first.train(range(BEFORE))
    paths = first.save(Path(folder))
    second = Pipeline(*after, seed=1, lr=1.0)
    second.load(paths)
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


# By name; of the optimizer's float32 copies, each piece that a rank has with its first element.
Values = dict[str, Tensor]
Pieces = list[tuple[str, int, Tensor]]


def bits(values: Tensor) -> Tensor:
    """By which two numbers are the same where nothing was rounded in between."""
    integers = {2: torch.int16, 4: torch.int32}
    return values.detach().clone().contiguous().view(integers[values.element_size()])


def values_of(pipeline: Pipeline) -> tuple[Values, Pieces]:
    """The bits of this rank's parameters, and of its pieces of their float32 copies."""
    parameters = {
        name: bits(parameter)
        for model in pipeline.models
        for name, parameter in model.named_parameters()
    }
    pieces: Pieces = []
    for model, optimizer in zip(pipeline.models, pipeline.optimizers, strict=True):
        if not isinstance(optimizer, pydist.ShardedOptimizer):
            continue
        assert set(optimizer.sharded_state().parameters) == set(dict(model.named_parameters()))
        for name, known in optimizer.sharded_state().parameters.items():
            pieces += [(name, piece.begin, bits(piece.values[MASTER])) for piece in known.ranges]
    return parameters, pieces


def in_16_bits(folder: str, before: str, after: str) -> list[tuple[Values, Pieces]]:
    """Of a pipeline that is saved, and one cut otherwise that goes on from there.

    First as they are at the checkpoint, and then some steps later; at last, of one in float32, not
    sharded, which goes on from the same checkpoint.
    """
    first = Pipeline(before, True, seed=0, lr=0.02, dtype=torch.bfloat16)
    first.train(range(BEFORE))
    paths = first.save(Path(folder))
    second = Pipeline(after, True, seed=1, lr=1.0, dtype=torch.bfloat16)
    second.load(paths)
    wide = Pipeline(after, False, seed=2, lr=1.0, dtype=torch.float32)
    wide.load(paths)
    found = [values_of(first), values_of(second)]
    for pipeline in (first, second):
        pipeline.train(range(BEFORE, BEFORE + AFTER))
    return [*found, values_of(first), values_of(second), values_of(wide)]


def of_all_ranks(found: list[tuple[Values, Pieces]]) -> tuple[Values, Values]:
    """The whole model's parameters, which replicas have alike, and their whole float32 copies."""
    parameters: Values = {}
    pieces: dict[str, dict[int, Tensor]] = {}
    for its_parameters, its_pieces in found:
        for name, value in its_parameters.items():
            assert torch.equal(parameters.setdefault(name, value), value)
        for name, begin, value in its_pieces:
            assert begin not in pieces.setdefault(name, {})
            pieces[name][begin] = value
    copies = {name: torch.cat([its[b] for b in sorted(its)]) for name, its in pieces.items()}
    return parameters, copies


def require_same_bits(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    assert len(found) == 8  # of four layers
    for name, value in found.items():
        assert torch.equal(value.view(-1), expected[name].view(-1)), name


@pytest.mark.parametrize(
    ("before", "after"),
    [(FOUR, TWO), pytest.param(TWO, FOUR, marks=pytest.mark.thorough)],
)
def test_16_bits_and_their_float32_copies_go_on_by_every_bit(
    four: Ranks, tmp_path: Path, before: str, after: str
) -> None:
    of_ranks = four.run(in_16_bits, str(tmp_path), before, after)
    saved, loaded, later, gone_on, wide = (
        of_all_ranks([found[i] for found in of_ranks]) for i in range(5)
    )
    for found, expected in ((loaded, saved), (gone_on, later)):
        for values, wanted in zip(found, expected, strict=True):
            require_same_bits(values, wanted)
    # Where nothing is in 16 bits, the copies are the parameters.
    require_same_bits(wide[0], saved[1])
    # What is compared was no rounding of itself, and has changed since.
    for name, copy in saved[1].items():
        short = saved[0][name].view(torch.bfloat16)
        assert not torch.equal(bits(short.float()).view(-1), copy)
        assert torch.equal(copy.view(torch.float32).bfloat16(), short.view(-1))
        assert not torch.equal(later[1][name], copy)
