"""A stage sends its input's gradient on before its replicas have averaged."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Ranks
from pipelines import (
    MICRO_BATCHES,
    WIDTH,
    Place,
    batch,
    by_one_process,
    require_same,
    sgd,
    whole_model,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import pydist
from pydist.pipelining import PipelineStage


def sends_on_first(kind: str) -> None:
    """The last stage of one replica goes backward once the other replica's gradient has arrived.

    So the average of the last stage can't be done before that gradient has been sent: a stage that
    waited for it first would wait for ever.
    """
    place = Place(2, kind)
    between = dist.new_group([0, 3])
    word = torch.zeros(1)
    is_armed = False
    calls = 0

    class Tells(PipelineStage):
        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            is_last_gradient = bwd_chunk_id == MICRO_BATCHES - 1
            is_its = pydist.rank() == 0 and self.stage_index == place.of_all - 2
            if is_armed and is_its and is_last_gradient:
                dist.send(word, 3, group=between)
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if is_armed and calls == MICRO_BATCHES and pydist.rank() == 3:
            dist.recv(word, 0, group=between)
        return nn.functional.mse_loss(outputs, targets)

    stages = place.make(whole_model(), Tells)
    schedule = place.schedule(kind, stages, loss)
    optimizers = [sgd(stage.submod.parameters()) for stage in stages]
    for step in range(2):
        # Before its first step a schedule may ask for a loss besides.
        is_armed, calls = step == 1, 0
        for optimizer in optimizers:
            optimizer.zero_grad()
        place.step(schedule, *batch(step))
        for optimizer in optimizers:
            optimizer.step()
    expected = by_one_process(steps=range(2))
    for stage, layers in zip(stages, place.layers, strict=True):
        require_same(layers, stage.submod, expected)


@pytest.mark.parametrize(
    "kind",
    [
        "1F1B",
        "Interleaved1F1B",
        pytest.param("GPipe", marks=pytest.mark.thorough),
        pytest.param("InterleavedZeroBubble", marks=pytest.mark.thorough),
    ],
)
def test_the_gradient_is_sent_before_the_average_is_done(four: Ranks, kind: str) -> None:
    four.run(sends_on_first, kind)


def is_interrupted(sharded: int) -> str:
    """In the second of three steps, an exception comes between a backward and its average."""
    place = Place(2, "1F1B")
    is_armed = False

    class Fails(PipelineStage):
        def perform_reduce_grad(self, grad_scale_factor: int) -> None:
            if is_armed and pydist.rank() == 1:
                raise RuntimeError("in between")
            super().perform_reduce_grad(grad_scale_factor)

    (stage,) = place.make(whole_model(), Fails)
    schedule = place.schedule("1F1B", [stage], nn.functional.mse_loss)
    optimizer: Any = sgd(stage.submod.parameters())
    if sharded:
        optimizer = pydist.ShardedOptimizer(
            stage.submod, torch.optim.SGD, lr=0.3, momentum=0.9, stage=sharded
        )
    told = ""
    for step in range(3):
        is_armed = step == 1
        optimizer.zero_grad()
        try:
            place.step(schedule, *batch(step))
        except (RuntimeError, pydist.Error) as error:
            told = f"{type(error).__name__}: {error}"
            if pydist.rank() == 1:
                with pytest.raises(pydist.InvalidUsage, match="before gradients are averaged"):
                    optimizer.step()
        if not is_armed:
            optimizer.step()
    require_same(place.layers[0], stage.submod, by_one_process(steps=(0, 2)))
    return told


@pytest.mark.parametrize("sharded", [0, 1, 2])
def test_a_step_that_is_interrupted_in_between_leaves_a_usable_model(
    four: Ranks, sharded: int
) -> None:
    first, interrupted, second, its_replica = four.run(is_interrupted, sharded)
    assert first == second == ""  # of the other stage, whose average was done
    assert interrupted == "RuntimeError: in between"
    assert "Error: rank 0 went backward and did not wait for the average" in its_replica


def is_interrupted_among_stages(who: int, where: int) -> list[str]:
    """On a process with several stages. Returns what each of three steps raised."""
    place = Place(2, "Interleaved1F1B")
    is_armed = False

    class Fails(PipelineStage):
        def perform_reduce_grad(self, grad_scale_factor: int) -> None:
            if is_armed and pydist.rank() == who and self.stage_index == where:
                raise RuntimeError("in between")
            super().perform_reduce_grad(grad_scale_factor)

    stages = place.make(whole_model(), Fails)
    schedule = place.schedule("Interleaved1F1B", stages, nn.functional.mse_loss)
    told = []
    try:
        for step in range(3):
            is_armed = step == 1
            for stage in stages:
                stage.submod.zero_grad()
            try:
                place.step(schedule, *batch(step))
                told.append("")
            except (RuntimeError, pydist.Error) as error:
                told.append(f"{type(error).__name__}: {error}")
        if pydist.rank() % 2 == who % 2:
            dist.barrier(group=place.peers)  # both have been told
    finally:
        pydist.shutdown()  # as at the end of a program: the other stages wait for this rank
    return told


@pytest.mark.parametrize(("who", "where"), [(0, 2), pytest.param(1, 3, marks=pytest.mark.thorough)])
def test_an_interrupted_step_of_several_stages_refuses_the_next(
    four: Ranks, who: int, where: int
) -> None:
    told = four.run(is_interrupted_among_stages, who, where)
    assert told[who][1] == "RuntimeError: in between"
    assert "went backward and did not wait for the average" in told[(who + 2) % 4][1]
    for rank in (who, (who + 2) % 4):
        assert f"the last step of stage {rank % 2} was interrupted" in told[rank][2]
    for neighbour in ((who + 1) % 2, (who + 1) % 2 + 2):  # who sees the others go
        assert any("PeerLost" in each for each in told[neighbour]), told[neighbour]


def has_a_dw_builder() -> None:
    place = Place(2, "1F1B")
    (part,) = place.parts(whole_model())
    model = pydist.DataParallel(part, process_group=place.peers)
    for module in (model, part):
        with contextlib.ExitStack() as refused:
            if module is model:
                refused.enter_context(pytest.raises(pydist.InvalidUsage, match="has a dw_builder"))
            PipelineStage(
                module,
                place.position,
                2,
                torch.device("cpu"),
                group=place.chain,
                dw_builder=lambda: lambda: None,
            )


def test_weight_gradients_that_come_later_are_refused(four: Ranks) -> None:
    four.run(has_a_dw_builder)


class Shifted(nn.Module):
    """A layer with a shift that only some use."""

    def __init__(self, layer: nn.Module, uses: bool) -> None:
        super().__init__()
        self.layer, self.uses = layer, uses
        self.shift = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + self.shift if self.uses else y


def with_what_a_round_may_have(has_hook: bool) -> None:
    """A parameter that one replica leaves unused, in every stage; and a communication hook."""
    place = Place(2, "1F1B")
    layers = whole_model()
    part = Shifted(place.parts(layers)[0], uses=place.replica == 1)
    model = pydist.DataParallel(part, process_group=place.peers)
    if has_hook:
        model.register_comm_hook(place.peers, allreduce_hook)
    stage = place.stage_of(model, place.stages[0])
    schedule = place.schedule("1F1B", [stage], nn.functional.mse_loss)
    for step in range(2):
        model.zero_grad()
        place.step(schedule, *batch(step))

    whole = whole_model()
    parts = [Shifted(whole[:2], uses=True), Shifted(whole[2:], uses=True)]
    x, y = batch(1)
    outputs = []
    for replica, share in enumerate(x.chunk(2)):
        for each in parts:
            each.uses = replica == 1
            share = each(share)
        outputs.append(share)
    nn.functional.mse_loss(torch.cat(outputs), y).backward()
    wanted = parts[place.position]
    for found, other in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("has_hook", [False, True])
def test_unused_parameters_and_hooks(four: Ranks, has_hook: bool) -> None:
    four.run(with_what_a_round_may_have, has_hook)
