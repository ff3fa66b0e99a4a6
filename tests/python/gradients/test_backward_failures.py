"""A backward that raises on some ranks: all hear of it, and all can go on."""

import copy
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, run_ranks
from torch import Tensor, nn
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArithmeticError("boom")


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.explode_before: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == self.explode_before:
                x = Explode.apply(x)
        return x


def survive_explosions(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Fragile(), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    for step, culprits in enumerate(([], [1], [], list(range(size)), [0, 1], [])):
        # 3: before any parameter has its gradient. 1: half way. Never after the last bucket.
        for place in (3, 1):
            model.zero_grad()
            reference.zero_grad()
            model.module.explode_before = place if rank in culprits else None
            loss = model(batch(rank, 5, 4, step=step)).mean()
            if rank in culprits:
                with pytest.raises(ArithmeticError, match="boom"):
                    loss.backward()
            elif culprits:
                names = ", ".join(map(str, culprits))
                with pytest.raises(pydist.Error, match=f"backward raised on rank {names},"):
                    loss.backward()
            else:
                loss.backward()
                for r in range(size):
                    (reference(batch(r, 5, 4, step=step)).mean() / size).backward()
                for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    assert_near(ours.grad, theirs.grad)
    # Other collectives of the job were never in the way.
    total = torch.ones(1)
    pydist.all_reduce(total)
    assert total == size


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_backward_that_raised(run_on_each: Runner, cap_mb: float) -> None:
    run_on_each(survive_explosions, cap_mb)


def raise_and_zero_in_place(set_to_none: bool) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double())
    reference = copy.deepcopy(model)
    # So that gradients lie in the arena already.
    model(batch(rank, 2, 3)).sum().backward()
    model.zero_grad(set_to_none=set_to_none)

    def explode(_: Tensor) -> None:
        raise ValueError("in the middle of backward")

    def watch(*args: Any) -> None:
        args[-1].register_hook(explode)

    watching = model.module[0].register_forward_hook(watch) if rank == 1 else None
    loss = model(batch(rank, 2, 3)).sum()
    if watching is not None:
        watching.remove()
    else:
        time.sleep(0.3)  # the round goes on after rank 1 has zeroed its gradients
    with pytest.raises((ValueError, pydist.Error), match=r"in the middle|raised on rank 1"):
        loss.backward()
    model.zero_grad(set_to_none=set_to_none)
    model(batch(rank, 2, 3, step=1)).sum().backward()
    for r in range(size):
        (reference(batch(r, 2, 3, step=1)).sum() / size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_clean_after_a_backward_that_raised(run: Runner, set_to_none: bool) -> None:
    run(raise_and_zero_in_place, set_to_none)


def raise_at_the_very_end() -> str:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(3, 1))

    def explode(_: Tensor) -> None:
        raise ValueError("after the last parameter")

    x = torch.ones(1, 3, requires_grad=True)
    if rank == 2:
        x.register_hook(explode)
    with pytest.raises((ValueError, pydist.Error)) as caught:
        model(x).sum().backward()
    pydist.barrier()  # whoever leaves earlier is lost to the others
    return str(caught.value)


def test_backward_that_raises_after_its_last_parameter(run: Runner) -> None:
    first, second, third = run(raise_at_the_very_end)
    assert "raised on rank 2" in first
    assert "raised on rank 2" in second
    assert third == "after the last parameter"


class OneOfTwo(nn.Module):
    """Never uses the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        self.spare = nn.Linear(2, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def fail_to_launch_the_last_bucket() -> None:
    rank, size = joined()
    model = pydist.DataParallel(OneOfTwo(), bucket_cap_mb=1e-6)

    def backward(step: int) -> None:
        x = torch.full((1, 2), 100.0 * step + rank, dtype=torch.float64)
        model(x).sum().backward()

    backward(0)
    for step in range(1, 4):
        model.zero_grad()
        rounds = model.stats().rounds
        if step == 1:
            if rank == 0:
                # The spare layer has no part in backward: its bucket goes at the end.
                graph = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
                model.spare.weight.grad = graph * 2
            message = "part of a graph" if rank == 0 else "backward raised on rank 0"
            with pytest.raises(pydist.Error, match=message):
                backward(step)
        else:
            backward(step)
            assert model.used.weight.grad.tolist() == [[100.0 * step + (size - 1) / 2] * 2]
            assert model.stats().rounds == rounds + 1


def test_an_error_at_the_end_of_backward_ends_its_own_step_only(run: Runner) -> None:
    run(fail_to_launch_the_last_bucket)


def raise_through_a_frozen_model() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    model = pydist.DataParallel(copy.deepcopy(reference))
    generator = nn.Linear(2, 2, dtype=torch.float64)
    for step in range(4):
        model.requires_grad_(True)
        model.zero_grad()
        reference.zero_grad()
        model(batch(rank, 3, 2, step=step)).sum().backward()
        for r in range(size):
            (reference(batch(r, 3, 2, step=step)).sum() / size).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_near(ours.grad, theirs.grad)
        model.requires_grad_(False)
        made = generator(batch(rank, 3, 2))
        if (rank, step) == (0, 1):
            with pytest.raises(ArithmeticError, match="boom"):
                model(Explode.apply(made)).sum().backward()
        else:
            model(made).sum().backward()


def test_an_error_behind_a_frozen_model_is_its_ranks_own(run: Runner) -> None:
    run(raise_through_a_frozen_model)


def raise_in_the_loss() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    for step in range(3):
        loss = model(torch.ones(1, 2)).sum()
        if (rank, step) == (0, 1):
            with pytest.raises(ArithmeticError, match="boom"):
                Explode.apply(loss).backward()
        elif rank == 0 or step < 2:
            loss.backward()
    pydist.barrier()


def test_a_warning_says_that_a_rank_left_out_a_step(three: Ranks) -> None:
    for outcome in three.outcomes(raise_in_the_loss, timeout=LIMIT_S):
        assert outcome.ok, outcome.describe()
        warning = "rank 0 ran 2 forward(s) for training before this step and rank 1 ran 1"
        assert outcome.output.count(warning) == 1, outcome.output


class Reversed(nn.Module):
    """Its layers run in another order than they stand in, so there is a new plan soon."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3200, 1)
        self.first = nn.Linear(3200, 3200)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def lack_memory_for_the_new_plan() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Reversed(), bucket_cap_mb=1)
    model(torch.ones(1, 3200)).sum().backward()
    pydist.barrier()
    usual = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        # Room for all but a copy of the large gradient, which moves to another place.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + (16 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, usual[1]))
    try:
        with pytest.raises(RuntimeError, match="allocate memory" if rank == 1 else "rank 1 left"):
            model.sync_gradients()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
    with pytest.raises(pydist.Error, match=r"rank 1 left|was cut short"):
        model.sync_gradients()


def test_a_rank_that_cannot_begin_a_round_keeps_nobody_waiting() -> None:
    run_ranks(lack_memory_for_the_new_plan, 2, env={"PYDIST_BACKEND": "native"}, timeout=LIMIT_S)


def go_backward_in_a_child() -> int:
    joined()
    model = pydist.DataParallel(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            model(torch.ones(1, 4)).sum().backward()
        except pydist.InvalidUsage:
            status = 7
        finally:
            os._exit(status)
    pydist.barrier()
    _, waited = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(waited)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_backward_in_a_forked_child_is_refused() -> None:
    native = {"PYDIST_BACKEND": "native"}
    assert run_ranks(go_backward_in_a_child, 2, env=native, timeout=LIMIT_S) == [7, 7]
