"""Pipelines of replicated stages: the weights of one process, one round a step."""

import contextlib
import os
import warnings
from typing import Any

import pytest
import torch
from launch import Ranks, rank_outcomes, run_ranks
from pipelines import (
    MICRO_BATCHES,
    SCHEDULES,
    STEPS,
    Place,
    batch,
    by_one_process,
    require_weights,
    sgd,
    whole_model,
)
from thorough import everyday
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining

import pydist
from pydist.pipelining import PipelineStage, WeightedLoss


def train(
    kind: str,
    replicas: int,
    sharded: bool,
    dtype: torch.dtype,
    micro_batches: int = MICRO_BATCHES,
) -> tuple[list[int], Any]:
    place = Place(replicas, kind)
    stages = place.make(whole_model(dtype))
    models = [stage.submod for stage in stages]
    schedule = place.schedule(kind, stages, nn.functional.mse_loss, micro_batches)
    optimizers: list[Any] = [
        pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.3, momentum=0.9)
        if sharded
        else sgd(model.parameters())
        for model in models
    ]
    before = [model.stats().rounds for model in models]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        place.step(schedule, *batch(step, dtype))
        for optimizer in optimizers:
            optimizer.step()
    rounds = [model.stats().rounds - b for model, b in zip(models, before, strict=True)]
    weights = [[p.detach().clone() for p in model.parameters()] for model in models]
    return rounds, list(zip(place.layers, weights, strict=True))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.thorough if kind == "DualPipeV" else ())
        for kind in SCHEDULES
    ],
)
def test_weights_are_those_of_one_process_and_a_step_is_one_round(
    four: Ranks, kind: str, sharded: bool
) -> None:
    expected = by_one_process()
    for rounds, found in four.run(train, kind, 2, sharded, torch.float64):
        assert set(rounds) == {STEPS}
        require_weights(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sharded", everyday(False, thorough=(True,)))
def test_dual_pipe_between_its_beginning_and_its_end(four: Ranks, sharded: bool) -> None:
    """With twice as many micro-batches as stages, forwards overlap backwards for a while."""
    expected = by_one_process()
    for rounds, found in four.run(train, "DualPipeV", 2, sharded, torch.float64, 8):
        assert set(rounds) == {STEPS}
        require_weights(found, expected, rtol=1e-12, atol=1e-14)


def test_one_replica() -> None:
    expected = by_one_process()
    for _, found in run_ranks(train, 2, "1F1B", 1, False, torch.float64):
        require_weights(found, expected, rtol=1e-12, atol=1e-14)


def test_16_bits(four: Ranks) -> None:
    expected = by_one_process(torch.bfloat16)
    for rounds, found in four.run(train, "1F1B", 2, False, torch.bfloat16):
        assert rounds == [STEPS]
        # Micro-batches and replicas round their parts of the sum: 8 bits hold a weight below 1 to
        # 2^-9, three times.
        require_weights(found, expected, rtol=0, atol=3 * 2**-8)


def refused(what: str) -> str:
    """The number of micro-batches differs, or what divides gradients is another than expected."""
    place = Place(2, "1F1B")
    (stage,) = place.make(whole_model())
    count = 2 if what == "numbers" and place.replica == 1 else MICRO_BATCHES
    loss: Any = nn.functional.mse_loss
    if what == "scale":
        loss = WeightedLoss(loss, len, stage)
    schedule = torch_pipelining.Schedule1F1B(
        stage, count, loss_fn=loss, scale_grads=what != "scale"
    )
    x, y = batch(0)
    around: Any = contextlib.nullcontext()
    if what == "scale":
        around = loss.over(y[place.share])
    if what == "weighted":
        around = stage.submod.weighted(16)
    try:
        with around:
            place.step(schedule, x, y)
    except (pydist.InvalidUsage, pydist.Mismatch) as error:
        return f"{type(error).__name__}: {error}"
    except pydist.Error as error:
        return type(error).__name__  # of who waits for one that has raised
    finally:
        pydist.shutdown()
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("numbers", "Mismatch: the schedule of stage"),
        ("scale", "leave scale_grads=True"),
        ("weighted", "use pydist.pipelining.WeightedLoss"),
    ],
)
def test_what_would_give_other_numbers_is_refused(four: Ranks, what: str, message: str) -> None:
    told = four.run(refused, what)
    # All stages where all can see it, otherwise the last one of each replica.
    assert sum(message in each for each in told) >= 2, told


def with_torchs_stage() -> list[str]:
    place = Place(2, "1F1B")
    (stage,) = place.make(whole_model(), torch_pipelining.PipelineStage)
    schedule = place.schedule("1F1B", [stage], nn.functional.mse_loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        place.step(schedule, *batch(0))
    return [str(warning.message) for warning in caught]


def test_torchs_own_stage_is_warned_of(four: Ranks) -> None:
    for told in four.run(with_torchs_stage):
        assert any("Use pydist.pipelining.PipelineStage" in each for each in told)


def in_another_order() -> None:
    pydist.init()
    stage = PipelineStage(pydist.DataParallel(whole_model()), 0, 1, torch.device("cpu"))
    schedule = torch_pipelining.ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    schedule.step(batch(0)[0], target=batch(0)[1])
    stage.clear_runtime_states()
    stage.backward_one_chunk(MICRO_BATCHES - 1, loss=torch.zeros((), requires_grad=True))


def test_another_order_of_backwards_is_refused() -> None:
    for outcome in rank_outcomes(in_another_order, 1):
        assert outcome.error == "InvalidUsage"
        assert "must come last" in outcome.message


def in_the_order_of_a_schedule(kind: str) -> None:
    place = Place(2, "Interleaved1F1B")
    stages = place.make(whole_model())
    schedule = OTHER_ORDERS[kind](stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    try:
        place.step(schedule, *batch(0))
    finally:
        pydist.shutdown()  # as at the end of a program: the first stages wait for the last one


class LastButOne(torch_pipelining.ScheduleLoopedBFS):
    """Goes backward in order, but for the last two micro-batches."""

    def _calculate_single_rank_operations(self, rank: int) -> Any:
        *before, other, last = range(MICRO_BATCHES)
        order = [*before, last, other]
        return [
            each._replace(microbatch_index=order[MICRO_BATCHES - 1 - each.microbatch_index])
            if each is not None and each.computation_type.name == "FULL_BACKWARD"
            else each
            for each in super()._calculate_single_rank_operations(rank)
        ]


OTHER_ORDERS: dict[str, Any] = {
    "LoopedBFS": torch_pipelining.ScheduleLoopedBFS,
    "last but one": LastButOne,
}


@pytest.mark.parametrize("kind", list(OTHER_ORDERS))
def test_a_schedule_that_takes_another_order_raises_on_all_ranks(kind: str) -> None:
    outcomes = rank_outcomes(in_the_order_of_a_schedule, 4, kind, timeout=60)
    for outcome in outcomes[1::2]:  # which have the last stage, whose backwards come first
        assert outcome.error == "InvalidUsage", outcome.describe()
        assert f"runs the backward of micro-batch {MICRO_BATCHES - 1} of" in outcome.message
        assert "must come last" in outcome.message
    assert {outcome.error for outcome in outcomes[0::2]} == {"PeerLost"}


def dies_amid_a_step(where: str) -> None:
    place = Place(2, "1F1B")
    dies = False

    class Dies(PipelineStage):
        def perform_reduce_grad(self, grad_scale_factor: int) -> None:
            if dies and where == "before its average" and pydist.rank() == 3:
                os._exit(9)
            super().perform_reduce_grad(grad_scale_factor)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if dies and where == "in its loss" and pydist.rank() == 3:
            os._exit(9)
        return nn.functional.mse_loss(outputs, targets)

    (stage,) = place.make(whole_model(), Dies)
    schedule = place.schedule("1F1B", [stage], loss)
    # A first step asks for losses at different times in different versions of torch.
    place.step(schedule, *batch(0))
    dies = True
    try:
        for step in (1, 2):  # not all have to wait for the dead rank in the step of its death
            place.step(schedule, *batch(step))
    finally:
        pydist.shutdown()  # as at the end of a program: others may wait for this rank


@pytest.mark.parametrize(
    "where", ["before its average", pytest.param("in its loss", marks=pytest.mark.thorough)]
)
def test_a_rank_that_dies_amid_a_step_is_told_of(where: str) -> None:
    *others, dead = rank_outcomes(dies_amid_a_step, 4, where, timeout=60)
    assert dead.exit_code == 9
    # Its replica, which waits for its average, and those that wait for that one.
    assert {outcome.error for outcome in others} == {"PeerLost"}
    assert "has died" in others[1].message
