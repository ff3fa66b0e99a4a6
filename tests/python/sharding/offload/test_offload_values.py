"""`pydist.ShardedOptimizer(offload="cpu")`: values, to the bit, on the stand-in or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_ranks
import pytest
import torch
from gpu_ranks import needs_gpu_ranks
from gpu_twins import ENVIRONMENTS, LIMIT_S, STAGES, start
from launch import run_ranks
from offload_twins import KernelTwin, Offloaded, Uneven, flat
from training import Runner, batch

import pydist

pytestmark = [needs_gpu_ranks, pytest.mark.timeout(60)]


CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {}),
]


def train(stage: int) -> None:
    for optimizer_class, options in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            training = Offloaded(optimizer_class, dtype=dtype, stage=stage, **options)
            for number in range(4):
                training.train(number)
            training.check(f"{optimizer_class.__name__}, {options}, {dtype}")


@STAGES
def test_values(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(train, stage)


def accumulate(stage: int) -> None:
    """Under no_sync(), on top of what was averaged, and by weight."""
    training = Offloaded(torch.optim.SGD, stage=stage, lr=0.05, momentum=0.9)
    for number in range(3):
        for micro in range(3):
            with training.model.no_sync(enabled=micro < 2):
                training.backward(10 * number + micro)
        training.step()
        training.optimizer.zero_grad(set_to_none=number == 0)
    training.check("accumulated")
    training.optimizer.zero_grad()
    for number in range(2):
        training.backward(40 + number)
    training.step()
    training.check("averaged twice")
    training.optimizer.zero_grad()
    with training.model.weighted(training.rank + 1):
        training.backward(50)
    training.step()
    training.optimizer.zero_grad()
    with training.model.no_sync():
        training.backward(51)
    training.model.sync_gradients()
    training.step()
    training.check("weighted, and averaged outside of backward")


def clip(stage: int, delayed: bool = False) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        training = Offloaded(stage=stage, dtype=dtype, delayed=delayed)
        for number, order in enumerate((2.0, 1.0, float("inf"))):
            training.optimizer.zero_grad()
            training.backward(number)
            if number % 2:
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01, order)
            else:
                training.optimizer.clip_grad_norm_(0.01, order)
            training.step()
            training.check(f"clipped by a norm of order {order}, {dtype}")
        training.optimizer.zero_grad()
        training.backward(9)
        training.optimizer.clip_grad_norm_(0.01)
        training.optimizer.clip_grad_norm_(0.005)
        torch.nn.utils.clip_grad_value_(training.model.parameters(), 1e-4)
        training.step()
        training.finish()
        training.check(f"clipped three times, {dtype}")


def scale(stage: int, delayed: bool = False) -> None:
    """A step that one rank's shard alone can't take is left out by all."""
    training = Offloaded(torch.optim.SGD, stage=stage, lr=0.05, delayed=delayed)
    # The fake has no torch.cuda; the scale is on the loss's device in either case.
    device = "cuda" if gpu_ranks.IS_REAL else "cpu"
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
    scales = []
    for number in range(6):
        training.optimizer.zero_grad()
        is_bad = number == 2
        loss = training.loss(number)
        if is_bad and training.rank == training.size - 1:
            loss = loss + training.model.get_parameter("inside.weight").sum() * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        if number % 2:
            training.optimizer.clip_grad_norm_(0.5)
        if is_bad:
            scaler.step(training.optimizer)
        else:
            training.step(lambda: scaler.step(training.optimizer))
        scaler.update()
        scales.append(scaler.get_scale())
        training.check(f"step {number}")
    assert scales == [256, 512, 256, 256, 512, 512]


@STAGES
def test_accumulation(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(accumulate, stage)


@STAGES
def test_clipping_and_scaling(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(clip, stage)
    run_on_gpus(scale, stage)


def schedule(stage: int, delayed: bool = False) -> None:
    """Groups with options of their own, which change in every step; and what is unfrozen."""
    training = Offloaded(stage=stage, groups=True, delayed=delayed)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, gamma=0.5)
    frozen = training.model.get_parameter("frozen")
    for number in range(6):
        if number == 2:
            frozen.requires_grad_(True)
        training.train(number)
        scheduler.step()
        training.check(f"step {number}")
    assert frozen.grad is not None


@STAGES
def test_schedules_groups_and_unfreezing(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(schedule, stage)


def write_between_steps(stage: int) -> None:
    """By `.data`, in other memory, and by a state that is loaded."""
    for dtype in (torch.float32, torch.bfloat16):
        training = Offloaded(stage=stage, dtype=dtype)
        for number in range(5):
            training.optimizer.zero_grad()
            training.backward(number)
            if number == 1:
                training.write(1.25)
            elif number == 2:
                # Two elements change places, so that the sum of all stays.
                weight = training.model.get_parameter("inside.weight")
                weight.data.copy_(weight.data.flip(0))
                training.twin.values[weight].copy_(flat(weight))
            elif number == 3:
                weight = training.model.get_parameter("middle.1.weight")
                weight.data = weight.data * 0.5
                training.twin.values[weight].copy_(flat(weight))
            elif number == 4:
                state = {k: v * 0.75 for k, v in training.model.state_dict().items()}
                training.model.load_state_dict(state)
                for _, p in training.named():
                    training.twin.values[p].copy_(flat(p))
            training.step()
            training.check(f"step {number}, {dtype}")


@STAGES
def test_what_the_program_writes_counts(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(write_between_steps, stage)


def replace_memory_with_a_delayed_step() -> None:
    """The next forward reads what the program has put in place of a parameter's memory."""
    for dtype in (torch.float32, torch.bfloat16):
        training = Offloaded(dtype=dtype, delayed=True)
        training.train(0)
        training.finish()
        weight = training.model.get_parameter("middle.1.weight")
        weight.data = weight.data * 0.5
        training.twin.values[weight].copy_(flat(weight))
        for number in range(1, 4):
            training.train(number)
            training.check(f"step {number}, {dtype}")
        training.finish()
        training.check(f"finished, {dtype}")


def test_memory_that_is_replaced_with_a_delayed_step(run_on_gpus: Runner) -> None:
    run_on_gpus(replace_memory_with_a_delayed_step)


def train_without_wrapper() -> None:
    """Gradients that something else has averaged, and a parameter that each rank has alone."""
    rank, size = start()
    for delayed in (False, True):
        torch.manual_seed(5)
        module = Uneven(torch.float32).to("cuda")
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer = pydist.ShardedOptimizer(
            parameters, torch.optim.AdamW, lr=0.02, offload="cpu", delayed=delayed
        )
        twin = KernelTwin(optimizer, {p: p for p in parameters})
        late = []
        for number in range(4):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            module(batch(0, 4, 10, step=number)).backward()
            late.append({p: None if p.grad is None else p.grad.clone() for p in parameters})
            optimizer.step()
            for p in parameters:
                if p.grad is not None:
                    p.grad.fill_(float("nan"))  # it was the optimizer's until here
            while len(late) > delayed:
                twin.step(late.pop(0), [dict(g) for g in optimizer.param_groups])
        optimizer.finish()
        for gradients in late:
            twin.step(gradients, [dict(g) for g in optimizer.param_groups])
        for p in parameters:
            assert torch.equal(flat(p), twin.values[p])
        assert rank < size


def test_gradients_of_something_else(run_on_gpus: Runner) -> None:
    run_on_gpus(train_without_wrapper)


def train_one_rank_late(stage: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        training = Offloaded(dtype=dtype, stage=stage, delayed=True, weight_decay=0.1)
        for number in range(5):
            training.train(number)
            training.check(f"step {number}, {dtype}")
        training.finish()
        training.check(f"finished, {dtype}")
        training.write(1.5)
        training.train(7)
        training.finish()
        training.check(f"written, {dtype}")


@STAGES
def test_delayed_steps(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(train_one_rank_late, stage)
    run_on_gpus(clip, stage, True)
    run_on_gpus(scale, stage, True)
    run_on_gpus(schedule, stage, True)


def train_all() -> None:
    for act in (train, accumulate, schedule, write_between_steps, train_one_rank_late):
        act(2)
    clip(1)
    scale(1)
    train_without_wrapper()


def train_some() -> None:
    train_one_rank_late(2)
    scale(1)
    train_without_wrapper()


@pytest.mark.parametrize(
    ("count", "training"),
    [
        (3, train_some),
        *(pytest.param(count, train_all, marks=pytest.mark.thorough) for count in (1, 3)),
    ],
)
def test_other_numbers_of_ranks(count: int, training: Callable[[], None]) -> None:
    if gpu_ranks.IS_REAL and count > 2:
        pytest.skip("three ranks that share a real GPU by sockets take minutes")
    run_ranks(training, count, env=ENVIRONMENTS["nccl"], timeout=LIMIT_S)
