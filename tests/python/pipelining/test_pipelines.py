"""Pipelines of replicated stages: the weights of one process, one round a step."""

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import rank_outcomes, run_ranks
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining

import pydist
from pydist.pipelining import PipelineStage, WeightedLoss

SCHEDULES = {
    "GPipe": torch_pipelining.ScheduleGPipe,
    "1F1B": torch_pipelining.Schedule1F1B,
    "Interleaved1F1B": torch_pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_pipelining.ScheduleZBVZeroBubble,
}
MICRO_BATCHES, STEPS, SAMPLES, WIDTH = 4, 3, 32, 6


def whole_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=generator).to(dtype)
    return x, y


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def by_one_process(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    model = whole_model(dtype)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, dtype)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


class Place:
    """This rank's: its stages (each of one of the four layers, or of two) and its replica."""

    def __init__(self, replicas: int, kind: str) -> None:
        pydist.init()
        position, self.replica = pydist.rank() % 2, pydist.rank() // 2
        chains = [dist.new_group([2 * r, 2 * r + 1]) for r in range(replicas)]
        of_stage = [dist.new_group([s + 2 * r for r in range(replicas)]) for s in range(2)]
        self.chain, self.peers = chains[self.replica], of_stage[position]
        if kind in ("GPipe", "1F1B"):
            self.layers, self.stages, self.of_all = (
                [[2 * position, 2 * position + 1]],
                [position],
                2,
            )
        else:
            self.stages = [position, 3 - position if kind.startswith("ZBV") else position + 2]
            self.layers, self.of_all = [[stage] for stage in self.stages], 4
        samples = SAMPLES // replicas
        self.share = slice(self.replica * samples, (self.replica + 1) * samples)

    def make(self, model: nn.Sequential, stage_class: Any = PipelineStage) -> list[Any]:
        return [
            stage_class(
                pydist.DataParallel(
                    nn.Sequential(*(model[layer] for layer in layers)), process_group=self.peers
                ),
                stage,
                self.of_all,
                torch.device("cpu"),
                group=self.chain,
            )
            for layers, stage in zip(self.layers, self.stages, strict=True)
        ]

    def schedule(self, kind: str, stages: list[Any], loss: Any) -> Any:
        stage = stages[0] if kind in ("GPipe", "1F1B") else stages
        return SCHEDULES[kind](stage, MICRO_BATCHES, loss_fn=loss)

    def step(self, schedule: Any, x: Tensor, y: Tensor) -> None:
        args = (x[self.share],) if 0 in self.stages else ()
        targets = {"target": y[self.share]} if self.of_all - 1 in self.stages else {}
        schedule.step(*args, **targets)


def train(kind: str, replicas: int, sharded: bool, dtype: torch.dtype) -> tuple[list[int], Any]:
    place = Place(replicas, kind)
    stages = place.make(whole_model(dtype))
    models = [stage.submod for stage in stages]
    schedule = place.schedule(kind, stages, nn.functional.mse_loss)
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


def require_weights(found: Any, expected: nn.Sequential, **tolerance: float) -> None:
    for layers, weights in found:
        wanted = [p for layer in layers for p in expected[layer].parameters()]
        for weight, other in zip(weights, wanted, strict=True):
            torch.testing.assert_close(weight, other.detach(), **tolerance)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", list(SCHEDULES))
def test_weights_are_those_of_one_process_and_a_step_is_one_round(kind: str, sharded: bool) -> None:
    expected = by_one_process()
    for rounds, found in run_ranks(train, 4, kind, 2, sharded, torch.float64):
        assert set(rounds) == {STEPS}
        require_weights(found, expected, rtol=1e-12, atol=1e-14)


def test_one_replica() -> None:
    expected = by_one_process()
    for _, found in run_ranks(train, 2, "1F1B", 1, False, torch.float64):
        require_weights(found, expected, rtol=1e-12, atol=1e-14)


def test_16_bits() -> None:
    expected = by_one_process(torch.bfloat16)
    for rounds, found in run_ranks(train, 4, "1F1B", 2, False, torch.bfloat16):
        assert rounds == [STEPS]
        # Micro-batches and replicas round their parts of the sum: 8 bits hold a weight below 1 to
        # 2^-9, three times.
        require_weights(found, expected, rtol=0, atol=3 * 2**-8)


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


def test_uneven_weights_give_the_mean_of_one_process() -> None:
    told = run_ranks(uneven, 4)
    of_last = told[1][0] + told[3][0]
    assert len(of_last) == 2 * MICRO_BATCHES
    assert sum(of_last) / len(of_last) == pytest.approx(told[0][1], rel=1e-12)


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
def test_what_would_give_other_numbers_is_refused(what: str, message: str) -> None:
    told = run_ranks(refused, 4, what)
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


def test_torchs_own_stage_is_warned_of() -> None:
    for told in run_ranks(with_torchs_stage, 4):
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


def dies_amid_a_step() -> None:
    place = Place(2, "1F1B")
    (stage,) = place.make(whole_model())

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if pydist.rank() == 3:
            os._exit(9)
        return nn.functional.mse_loss(outputs, targets)

    schedule = place.schedule("1F1B", [stage], loss)
    try:
        place.step(schedule, *batch(0))
    finally:
        pydist.shutdown()  # as at the end of a program: others may wait for this rank


def test_a_rank_that_dies_amid_a_step_is_told_of() -> None:
    *others, dead = rank_outcomes(dies_amid_a_step, 4, timeout=60)
    assert dead.exit_code == 9
    # Its replica, and those that wait for that one.
    assert {outcome.error for outcome in others} == {"PeerLost"}


def saves(folder: str) -> None:
    place = Place(2, "1F1B")
    (stage,) = place.make(whole_model())
    schedule = place.schedule("1F1B", [stage], nn.functional.mse_loss)
    optimizer = sgd(stage.submod.parameters())
    place.step(schedule, *batch(0))
    optimizer.step()
    first = place.layers[0][0]
    named = {f"{first + i}": layer for i, layer in enumerate(stage.submod.module)}
    pydist.save(
        Path(folder) / f"stage{place.stages[0]}",
        model=nn.ModuleDict(named),
        process_group=place.peers,
    )


def test_a_checkpoint_loads_into_another_split(tmp_path: Path) -> None:
    run_ranks(saves, 4, str(tmp_path))
    expected = whole_model()
    x, y = batch(0)
    nn.functional.mse_loss(expected(x), y).backward()
    sgd(expected.parameters()).step()
    model = whole_model()
    state: dict[str, Any] = {}
    for stage in range(2):
        state |= pydist.checkpoint.to_torch(tmp_path / f"stage{stage}")["model"]
    model.load_state_dict(state)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
