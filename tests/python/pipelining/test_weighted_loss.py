"""The loss of a pipeline whose micro-batches and replicas count differently."""

import functools
from typing import Any

import pytest
import torch
from launch import Ranks
from pipelines import MICRO_BATCHES, SAMPLES, WIDTH, Place, batch, whole_model
from torch import Tensor, nn

import pydist
from pydist.pipelining import WeightedLoss


def uneven() -> tuple[list[float], float]:
    """Tokens: of each replica another number counts, and of each micro-batch."""
    place = Place(2, "1F1B")
    (stage,) = place.make(whole_model())
    model = stage.submod
    targets = torch.arange(SAMPLES) % WIDTH
    targets[torch.arange(SAMPLES) % 7 < 3] = -100
    targets[:8] = -100  # nothing of the first replica's first two micro-batches counts
    x, _ = batch(0)
    loss = WeightedLoss(nn.functional.cross_entropy, lambda t: (t != -100).sum(), stage)
    schedule = place.schedule("1F1B", [stage], loss)
    losses: list[Tensor] = []
    with loss.over(targets[place.share]):
        if stage.is_last:
            schedule.step(target=targets[place.share], losses=losses)
        else:
            schedule.step(x[place.share])
    if stage.is_last:
        with pytest.raises(pydist.InvalidUsage, match="weights are not known"):
            loss(x, targets)
    whole = whole_model()
    expected = nn.functional.cross_entropy(whole(x), targets)
    expected.backward()
    wanted = [p.grad for layer in place.layers[0] for p in whole[layer].parameters()]
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-11, atol=1e-14)
    return [each.item() for each in losses], expected.item()


def test_uneven_weights_give_the_mean_of_one_process(four: Ranks) -> None:
    told = four.run(uneven)
    of_last = told[1][0] + told[3][0]
    assert len(of_last) == 2 * MICRO_BATCHES
    assert sum(of_last) / len(of_last) == pytest.approx(told[0][1], rel=1e-12)


def own_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets, reduction="sum")


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.MSELoss(reduction="none"),
        functools.partial(nn.functional.mse_loss, reduction="sum"),
        functools.partial(nn.MSELoss(reduction="sum"), target=torch.zeros(1)),
    ],
)
def test_a_loss_that_says_it_is_no_mean_is_refused(loss: Any) -> None:
    with pytest.raises(pydist.InvalidUsage, match="reduction='mean'"):
        WeightedLoss(loss, len, None)  # type: ignore[arg-type]


class MeanOfEach(nn.CrossEntropyLoss):
    """Takes the mean by itself."""

    def __init__(self) -> None:
        super().__init__(reduction="none")

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, targets).mean()


class OfTokens(nn.Module):
    """Says how it is reduced in its own words."""

    reduction = "token_mean"


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        MeanOfEach(),
        OfTokens(),
        nn.KLDivLoss(reduction="batchmean"),
        functools.partial(nn.functional.mse_loss, reduction="mean"),
        own_sum,  # which nobody can tell
    ],
)
def test_a_mean_is_taken_and_so_is_what_says_nothing(loss: Any) -> None:
    WeightedLoss(loss, len, None)  # type: ignore[arg-type]


class OneStage:
    """What WeightedLoss asks of a stage, without replicas."""

    is_last, replicated, chunks, scaled_by = True, None, 1, None


def test_a_loss_for_each_sample_is_refused_as_it_comes() -> None:
    samples = torch.zeros(4, 2)

    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets, reduction="none")

    loss = WeightedLoss(each, len, OneStage())  # type: ignore[arg-type]
    with loss.over(samples), pytest.raises(pydist.InvalidUsage, match=r"is of shape \(4, 2\)"):
        loss(samples, samples)
