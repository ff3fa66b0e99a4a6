"""`check_finite=True` on GPUs, which tell a step late what they have seen."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_ranks
import pytest
import staged_gpu
import torch
from gpu_ranks import needs_gpu_ranks
from launch import run_ranks
from torch import nn
from training import TIME_LIMIT, Cut, batch, joined, loss_of_cut

import pydist
from pydist.gpu.late_number import LateNumber
from pydist.parallel.checks.finite_check import _MOST_UNDER_WAY

pytestmark = [needs_gpu_ranks, TIME_LIMIT]

BACKENDS = pytest.mark.parametrize("backend", ["nccl", "native"])
LIMIT_S = 40.0


class Branches(nn.Module):
    """A layer that a forward may leave out, a parameter without elements, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 2, dtype=torch.float64)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, uses_second: bool = True) -> torch.Tensor:
        x = self.first(x) + self.empty.sum()
        if uses_second:
            x = self.second(x.double()).float()
        return (x[:, :2] * self.turn.abs()).square().mean()

    def by_method(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def start(**settings: Any) -> tuple[int, pydist.DataParallel]:
    install = gpu_ranks.install if os.environ["PYDIST_BACKEND"] == "nccl" else staged_gpu.install
    install(delay_us=0)
    rank, _ = joined()
    torch.manual_seed(0)
    return rank, pydist.DataParallel(Branches().to("cuda"), check_finite=True, **settings)


def loss_of(model: pydist.DataParallel, step: int, worst: float = 1.0, **how: Any) -> torch.Tensor:
    """A loss; `worst` is in the gradients of the first layer's bias, NaN then in all of them."""
    loss: torch.Tensor = model(batch(pydist.rank(), 5, 4, step=step).float().to("cuda"), **how)
    loss = loss * worst if math.isnan(worst) else loss + worst * model.module.first.bias.sum()
    gpu_ranks.synchronize()  # what was sent behind the backward before has come
    return loss


def told_by(call: Any) -> tuple[str, str]:
    try:
        call()
    except (FloatingPointError, pydist.Error) as error:
        return type(error).__name__, str(error)
    return "", ""


def told_in(step: Callable[[int], None], numbers: Iterable[int]) -> list[tuple[str, str]]:
    return [told_by(lambda number=number: step(number)) for number in numbers]


def nothing_comes() -> AbstractContextManager[object]:
    """What is sent to the host is under way for long."""
    return mock.patch.object(LateNumber, "has_come", return_value=False)


def fail_in_step_3(kind: str, value: float) -> list[tuple[str, str]]:
    rank, model = start()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer: Any
    if kind == "sharded":
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        bad = number == 3 and (rank == 1 or kind == "on both")
        loss = loss_of(model, number, value if bad else 1.0)
        late = number == 4 and kind == "on both" and rank == 0
        with nothing_comes() if late else nullcontext():
            loss.backward()
        optimizer.step()

    told = told_in(step, range(1, 5))
    # As from a checkpoint. All gradients of step 4 were worth nothing, and are not told of.
    model.load_state_dict(before)
    return told + told_in(step, range(5, 8))


@BACKENDS
@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        ("whole", math.nan, r"turn on rank 1 had NaN among its 2 elements in step 3; of 5 such"),
        ("on both", math.nan, r"turn on rank 1 had NaN among its 2 elements in step 3; of 5 such"),
        ("sharded", math.inf, r"first\.bias on rank 1 had Inf among its 3 .* step 3; of 1 such"),
    ],
)
def test_the_next_backward_raises(backend: str, kind: str, value: float, told: str) -> None:
    env = {"PYDIST_BACKEND": backend}
    first, second = run_ranks(fail_in_step_3, 2, kind, value, env=env, timeout=LIMIT_S)
    nothing = ("", "")
    assert first[:3] == second[:3] == [nothing] * 3
    assert first[4:] == second[4:] == [nothing] * 3
    assert first[3][0] == "Error"
    assert "rank 1" in first[3][1]
    assert second[3][0] == "FloatingPointError"
    assert re.search(f"the gradient of parameter {told} gradients among 6", second[3][1])


def fail_while_accumulating() -> list[tuple[str, str]]:
    """The first backward of step 2 has a NaN in what the second one does not reach."""
    rank, model = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int, throws_away: bool = False) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            loss = loss_of(model, number, math.nan if number == 2 and rank == 1 else 1.0)
            loss.backward()
            if throws_away:
                optimizer.zero_grad()
            loss_of(model, number, uses_second=False).backward()
        loss_of(model, number + 1, uses_second=False).backward()
        optimizer.step()

    step(1)
    step(2, throws_away=True)
    step(3)  # nobody raises
    told = told_in(step, (1, 2, 3))
    pydist.barrier()
    return told


@BACKENDS
def test_what_was_accumulated_is_looked_at(backend: str) -> None:
    env = {"PYDIST_BACKEND": backend}
    first, second = run_ranks(fail_while_accumulating, 2, env=env, timeout=LIMIT_S)
    assert [kind for kind, _ in first] == ["", "", "Error"]
    assert [kind for kind, _ in second] == ["", "", "FloatingPointError"]
    assert "in step 5" in second[2][1]


def synchronize() -> list[tuple[str, str]]:
    rank, model = start()
    with model.no_sync():
        loss_of(model, 1, math.nan if rank == 0 else 1.0).backward()
    model.sync_gradients()
    model.zero_grad()
    told = [told_by(lambda: loss_of(model, 2).backward())]
    pydist.barrier()
    return told


@BACKENDS
def test_an_average_outside_of_backward(backend: str) -> None:
    env = {"PYDIST_BACKEND": backend}
    first, second = run_ranks(synchronize, 2, env=env, timeout=LIMIT_S)
    assert first[0][0] == "FloatingPointError"
    assert second[0][0] == "Error"


def train_apart() -> list[tuple[str, str]]:
    rank, model = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, number, math.inf if number == 2 and rank == 0 else 1.0).backward()
            optimizer.step()

    return told_in(step, (1, 2, 3, 4))


def test_ranks_that_train_apart() -> None:
    env = {"PYDIST_BACKEND": "native"}
    first, second = run_ranks(train_apart, 2, env=env, timeout=LIMIT_S)
    assert [kind for kind, _ in first] == ["", "", "FloatingPointError", ""]
    assert [kind for kind, _ in second] == [""] * 4


def save_after(kind: str, folder: str) -> list[tuple[str, str]]:
    rank, model = start()
    loss_of(model, 1).backward()
    pydist.save(folder, model=model, extra="sound")
    model.zero_grad()
    if kind == "gradient":
        loss_of(model, 2, math.nan if rank == 1 else 1.0).backward()
    else:
        weight = torch.tensor(-1.0 if rank == 1 else 1.0, device="cuda")
        loss = loss_of(model, 2)
        with model.weighted(weight):
            loss.backward()
    told = [told_by(lambda: pydist.save(folder, model=model, extra="unsound"))]
    assert pydist.load(folder, model=model) == "sound"
    return told


@pytest.mark.parametrize("kind", ["gradient", "weight"])
def test_a_checkpoint_waits_for_what_is_told_late(kind: str, tmp_path: Path) -> None:
    """Otherwise it could be what training would be taken up from."""
    env = {"PYDIST_BACKEND": "nccl"}
    folder = str(tmp_path / "saved")
    first, second = run_ranks(save_after, 2, kind, folder, env=env, timeout=LIMIT_S)
    assert "rank 1" in first[0][1]
    assert second[0][0] == ("CheckpointError" if kind == "gradient" else "InvalidUsage")
    assert f"the {kind} of " in second[0][1]


def save_delayed(folder: str) -> list[tuple[str, str]]:
    staged_gpu.install(delay_us=0)
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(4, 3).to("cuda"), check_finite=True)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, offload="cpu", delayed=True)
    loss = model(torch.ones(2, 4, device="cuda")).sum()
    (loss * (math.nan if rank == 1 else 1.0)).backward()
    optimizer.step()
    return [told_by(lambda: pydist.save(folder, model=model, optimizer=optimizer))]


def test_a_checkpoint_amid_a_delayed_step(tmp_path: Path) -> None:
    """All ranks gather what the step has made, whoever is told of something then."""
    env: dict[str, str | None] = {"PYDIST_BACKEND": "native", "PYDIST_TIMEOUT": "10"}
    found = run_ranks(save_delayed, 2, str(tmp_path / "saved"), env=env, timeout=LIMIT_S)
    for ((error, told),) in found:
        assert error == "CheckpointError", told
        assert "rank 1" in told


def take_up_again(folder: str) -> list[tuple[str, str]]:
    """A program that has found out by itself, and takes up training from a checkpoint."""
    _, model = start()
    pydist.save(folder, model=model)
    loss_of(model, 1, math.nan).backward()
    pydist.load(folder, model=model)
    model.zero_grad()
    return [told_by(lambda: loss_of(model, 2).backward())]


def test_a_checkpoint_undoes_what_was_found(tmp_path: Path) -> None:
    env = {"PYDIST_BACKEND": "native"}
    found = run_ranks(take_up_again, 1, str(tmp_path / "saved"), env=env, timeout=LIMIT_S)
    assert found == [[("", "")]]


def go_forward_by_method(kind: str) -> list[tuple[str, str]]:
    """Steps whose forwards are those of a method, with a NaN in the first backward of step 2."""
    rank, model = start()
    optimizer: Any
    if kind == "sharded":
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(step: int) -> torch.Tensor:
        inputs = batch(rank, 5, 4, step=step).float().to("cuda")
        found: torch.Tensor = model.by_method(inputs)
        gpu_ranks.synchronize()
        return found

    def step(number: int) -> None:
        optimizer.zero_grad()
        bad = math.nan if number == 2 and rank == 1 else 1.0
        if kind == "accumulates":
            with model.no_sync():
                (loss(number) * bad).backward()
            bad = 1.0
        (loss(number) * bad).backward()
        optimizer.step()

    told = told_in(step, (1, 2, 3))
    pydist.barrier()
    return told


@pytest.mark.parametrize("kind", ["sharded", "accumulates"])
def test_forwards_by_a_method(kind: str) -> None:
    env = {"PYDIST_BACKEND": "native"}
    first, second = run_ranks(go_forward_by_method, 2, kind, env=env, timeout=LIMIT_S)
    assert [error for error, _ in first] == ["", "", "Error"]
    assert [error for error, _ in second] == ["", "", "FloatingPointError"]
    assert "in step 2" in second[2][1]


def hold() -> list[tuple[str, str]]:
    """An evaluation comes between a backward that is held and its average."""
    rank, model = start()
    with model.holding_average():
        loss_of(model, 1, math.nan if rank == 1 else 1.0).backward()
    with torch.no_grad():
        loss_of(model, 1)
    model.conclude_average()
    model.zero_grad()
    told = [told_by(lambda: loss_of(model, 2).backward())]
    pydist.barrier()
    return told


def test_an_average_that_is_held() -> None:
    first, second = run_ranks(hold, 2, env={"PYDIST_BACKEND": "native"}, timeout=LIMIT_S)
    assert first[0][0] == "Error"
    assert "in step 1" in second[0][1]


def be_late() -> tuple[int, str]:
    """Nothing that was sent ever comes; returns in which step that raises."""
    _, model = start()
    with nothing_comes():
        for step in range(1, 40):
            model.zero_grad()
            try:
                loss_of(model, step, math.nan if step == 1 else 1.0).backward()
            except FloatingPointError as error:
                return step, str(error)
    return 0, ""


def test_the_host_waits_for_what_is_too_late() -> None:
    ((step, told),) = run_ranks(be_late, 1, env={"PYDIST_BACKEND": "nccl"}, timeout=LIMIT_S)
    assert step == 2 + _MOST_UNDER_WAY
    assert "in step 1;" in told


def average_by_hand() -> list[tuple[str, str]]:
    """Gradients of autograd.grad() reach no parameter: what is thrown away of them is no alarm."""
    rank, model = start()
    parameters = [each for each in model.parameters() if each.numel()]
    for step in range(1, 4):
        loss = loss_of(model, step, math.nan)
        torch.autograd.grad(loss, parameters, allow_unused=True)
        assert len(model._finite_check._seen) <= len(parameters)
    told = [told_by(lambda step=step: loss_of(model, step).backward()) for step in (4, 5)]
    model.zero_grad()
    bad = math.nan if rank == 1 else 1.0
    found = torch.autograd.grad(loss_of(model, 6, bad), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    model.sync_gradients()
    model.zero_grad()
    told.append(told_by(lambda: loss_of(model, 7).backward()))
    pydist.barrier()
    return told


@BACKENDS
def test_gradients_of_autograd_grad(backend: str) -> None:
    env = {"PYDIST_BACKEND": backend}
    first, second = run_ranks(average_by_hand, 2, env=env, timeout=LIMIT_S)
    assert [error for error, _ in first] == ["", "", "Error"]
    assert [error for error, _ in second] == ["", "", "FloatingPointError"]


def train_over_devices() -> list[tuple[str, str]]:
    """Of a model on two devices, with a NaN in what is on the second one."""
    staged_gpu.install(delay_us=0)
    rank, _ = joined()
    module = Cut(staged_gpu.devices()[0], staged_gpu.devices()[-1])
    module.bias.requires_grad_(False)  # on the CPU, where a gradient is told of at once
    model = pydist.DataParallel(module, check_finite=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = loss_of_cut(model, rank, number)
        if number == 2 and rank == 1:
            loss = loss + (module.outside.bias.sum() * math.nan).cpu()
        for device in staged_gpu.devices():
            torch.ones((), device=device).item()  # waits for the stream
        loss.backward()
        optimizer.step()

    told = told_in(step, (1, 2, 3))
    pydist.barrier()
    return told


def test_a_model_over_two_devices() -> None:
    env = {"PYDIST_BACKEND": "native"}
    first, second = run_ranks(train_over_devices, 2, env=env, timeout=LIMIT_S)
    assert [error for error, _ in first] == ["", "", "Error"]
    assert [error for error, _ in second] == ["", "", "FloatingPointError"]
    assert "outside.bias" in second[2][1]


def capture() -> None:
    _, model = start(broadcast_buffers=False)
    for number in range(3):
        model.zero_grad()
        loss_of(model, number).backward()
    model.zero_grad()
    # On a GPU the end of the capture raises, too.
    with pytest.raises((pydist.Error, RuntimeError)) as raised, gpu_ranks.Graph():
        model(torch.ones(5, 4, device="cuda")).backward()
    told = f"{raised.value} {raised.value.__context__}"
    assert "check_finite=True looks at no gradient in replays" in told
    model.zero_grad()
    for number in range(3):
        loss_of(model, number).backward()


def test_a_capture_is_refused() -> None:
    run_ranks(capture, 2, env={"PYDIST_BACKEND": "nccl"}, timeout=LIMIT_S)
