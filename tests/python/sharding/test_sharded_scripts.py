"""What scripts do around the steps of `pydist.ShardedOptimizer`, beside the same in one process."""

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import LIMIT_S, TIME_LIMIT, Runner, batch, joined

import pydist
from pydist.sharding.step.same_options import facts_of_options

pytestmark = TIME_LIMIT


@pytest.fixture(scope="module", params=["native-3", "gloo-2"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    backend, count = request.param.split("-")
    with Ranks(int(count), {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 1)
    ).to(dtype)


def whole_batch(step: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.cat([batch(rank, 4, 10, step=step, dtype=dtype) for rank in range(size)])


def assert_equal_models(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


# ---- parameters that were frozen when the model was wrapped -------------------------------


def unfreeze_and_clip(stage: Any) -> None:
    """What becomes of the first gradients of an unfrozen layer, before the step."""
    rank, size = joined()
    for scaled in (False, True):
        module, reference = small_model(), small_model()
        for model in (module, reference):
            model[0].requires_grad_(False)
        model = pydist.DataParallel(module, bucket_cap_mb=0.002)
        ours = pydist.ShardedOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled) for _ in "ab"]
        for step in range(4):
            for each in (module, reference):
                each[0].requires_grad_(step >= 2)
            x = whole_batch(step, size, torch.float64)
            norms = []
            for net, optimizer, scaler, inputs in (
                (model, ours, scalers[0], x.view(size, -1, 10)[rank]),
                (reference, theirs, scalers[1], x),
            ):
                optimizer.zero_grad()
                scaler.scale(net(inputs).square().mean()).backward()
                scaler.unscale_(optimizer)
                norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
                if step == 2 and net is model:
                    first = next(model.parameters())
                    torch.testing.assert_close(
                        ours.gradient_of(first), theirs_gradient(reference, x, scaler, norms[0])
                    )
                scaler.step(optimizer)
                scaler.update()
            torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
            assert_equal_models(model, reference)


def theirs_gradient(reference: nn.Module, x: Tensor, scaler: Any, norm: Tensor) -> Tensor:
    """Of the first parameter, clipped to 0.1."""
    first = next(reference.parameters())
    (gradient,) = torch.autograd.grad(reference(x).square().mean(), [first])
    return gradient * min(1.0, 0.1 / (float(norm) + 1e-6))


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_what_was_just_unfrozen(run: Runner, stage: int) -> None:
    run(unfreeze_and_clip, stage)


# ---- parameters that somebody else writes -------------------------------------------------


def write_between_steps() -> None:
    joined()

    def in_place(parameter: Tensor) -> None:
        parameter.mul_(0.5)

    def through_data(parameter: Tensor) -> None:
        parameter.data.clamp_(-0.01, 0.01)

    def other_data(parameter: Tensor) -> None:
        parameter.data = parameter.data * 0.5

    for dtype in (torch.float32, torch.bfloat16):
        for write in (in_place, through_data, other_data):
            model = pydist.DataParallel(small_model(dtype), bucket_cap_mb=0.001)
            optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.0)
            for _ in range(2):
                model(batch(0, 4, 10, dtype=dtype)).sum().backward()
                optimizer.step()
            expected = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for parameter in (*model.parameters(), *expected):
                    write(parameter)
            optimizer.step()
            for ours, theirs in zip(model.parameters(), expected, strict=True):
                assert torch.equal(ours.detach(), theirs), f"{dtype}, {write.__name__}"


def test_parameters_written_between_steps(run: Runner) -> None:
    run(write_between_steps)


def load_masters_alone() -> None:
    """Into a model that has other parameters: they stay, the same on all ranks."""
    joined()
    states = []
    for seed in range(2):
        module = small_model(torch.bfloat16)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(seed)
        model = pydist.DataParallel(module, bucket_cap_mb=0.001)
        optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
        model(batch(0, 4, 10, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.finish()
        states.append(copy.deepcopy(optimizer.state_dict()))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.load_state_dict(states[0])
    for ours, theirs in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours.detach(), theirs)
    optimizer.step()
    flat = torch.cat([p.detach().float().view(-1) for p in model.parameters()])
    least, most = flat.clone(), flat.clone()
    pydist.all_reduce(least, "min")
    pydist.all_reduce(most, "max")
    assert torch.equal(least, most)


def test_masters_without_their_parameters(run: Runner) -> None:
    run(load_masters_alone)


# ---- what torch's optimizers can ----------------------------------------------------------


def use_as_an_optimizer() -> list[str]:
    rank, size = joined()
    model = pydist.DataParallel(small_model(), bucket_cap_mb=0.002)
    ours = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=torch.tensor(0.25))
    reference = small_model()
    theirs = torch.optim.AdamW(reference.parameters(), lr=torch.tensor(0.25))
    # As loops do that evaluate on a device: nothing changes.
    for step in range(2):
        x = whole_batch(step, size, torch.float64)
        for net, optimizer, inputs in (
            (model, ours, x.view(size, -1, 10)[rank]),
            (reference, theirs, x),
        ):
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
            for same in (net.double, net.cpu, lambda net=net: net.to("cpu", torch.float64)):
                same()
            optimizer.step()
    assert_equal_models(model, reference)
    # Hooks of states, which run once each.
    called: list[str] = []
    ours.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    ours.register_state_dict_post_hook(lambda _, state: {**state, "more": called.append("saved")})
    ours.register_load_state_dict_pre_hook(lambda _, state: called.append("before loading"))
    ours.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    state = ours.state_dict()
    assert "more" in state
    ours.load_state_dict(state)
    # Options are copied: a schedule writes into a rate that is a tensor.
    other = pydist.ShardedOptimizer(
        pydist.DataParallel(small_model(), bucket_cap_mb=0.002),
        torch.optim.AdamW,
        lr=torch.tensor(1.0),
    )
    other.load_state_dict(state)
    other.param_groups[0]["lr"].fill_(7.0)
    assert float(ours.param_groups[0]["lr"]) == 0.25
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(pydist.InvalidUsage, match=r"can't be copied or pickled.*pydist\.save"):
            copying(ours)
    # Last of all: torch has put a parameter of its own on "meta" before anybody can refuse.
    refused: list[Callable[[], Any]] = [
        model.float,
        model.bfloat16,
        lambda: model.to("meta"),
        lambda: model.to(torch.float32),
    ]
    for convert in refused:
        with pytest.raises(pydist.InvalidUsage, match="convert the model first"):
            convert()
    return called


def test_it_is_an_optimizer(run: Runner) -> None:
    for called in run(use_as_an_optimizer):
        assert called == ["before saving", "saved", "before loading", "loaded"]


# ---- options that ranks don't have alike --------------------------------------------------


def disagree_on_options() -> None:
    rank, _ = joined()
    module = small_model()
    model = pydist.DataParallel(module)
    with pytest.raises(pydist.Mismatch, match=r"rank 0 has lr=0\.1 in group 0, where rank 1 has"):
        pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1 * (1 + (rank == 1)))
    with (
        mock.patch.dict(os.environ, {"PYDIST_DEBUG": "01"[rank]}),
        pytest.raises(pydist.Mismatch, match="rank 0 has PYDIST_DEBUG=0, where rank 1 has"),
    ):
        pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    optimizer = pydist.ShardedOptimizer(module[:2].parameters(), torch.optim.SGD, lr=0.1)
    more = {"params": list(module[2:].parameters()), "lr": torch.tensor(0.1 + rank)}
    with pytest.raises(pydist.Mismatch, match=r"lr=tensor\(0\.1.*\) in group 0, where rank 1"):
        optimizer.add_param_group(more)
    # Which torch prints alike.
    more["lr"] = torch.tensor(0.00102 if rank == 1 else 0.00098)
    with pytest.raises(pydist.Mismatch, match=r"lr=tensor\(0\.00098.*float32\) in group 0"):
        optimizer.add_param_group(more)
    other = pydist.DataParallel(small_model())
    with pytest.raises(pydist.Mismatch, match=r"betas=\(0\.9, 0\.99\) in group 0, where rank 1"):
        pydist.ShardedOptimizer(other, torch.optim.AdamW, betas=[0.9, 0.99 - 0.1 * (rank == 1)])
    optimizer.add_param_group({**more, "lr": 0.2})
    # By a loss of its own, a rank's schedule comes to its own rate.
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(2):
        model(batch(rank, 4, 10)).square().mean().backward()
        optimizer.step()
        schedule.step(1.0 if rank == 1 else -step)
    model(batch(rank, 4, 10)).square().mean().backward()
    with pytest.raises(pydist.Mismatch, match=r"rank 0 has lr=0\.1 in group 0.*schedule by what"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.1
    optimizer.step()


def test_options_differ_between_ranks() -> None:
    with Ranks(2, {"PYDIST_BACKEND": "native", "PYDIST_DEBUG": "1"}) as ranks:
        ranks.run(disagree_on_options, timeout=LIMIT_S)


def test_options_are_compared_by_value() -> None:
    """In full, and wherever tensors are: each rank has its own GPU."""
    rate = torch.tensor([0.25], dtype=torch.float64)
    groups = [{"params": [], "lr": rate, "betas": [0.9, rate], "hook": print, "hooks": (print,)}]
    assert facts_of_options(groups) == [
        "lr=tensor([0.25], torch.float64) in group 0",
        "betas=(0.9, tensor([0.25], torch.float64)) in group 0",
    ]


# ---- several optimizers of one model ------------------------------------------------------


def clip_twice() -> None:
    """What one optimizer remembers of norms, changes with the other's gradients."""
    rank, size = joined()
    model, reference = pydist.DataParallel(small_model(), bucket_cap_mb=0.002), small_model()
    split = list(model.parameters())
    optimizers = [
        pydist.ShardedOptimizer(parts, torch.optim.SGD, lr=0.1) for parts in (split[:2], split[2:])
    ]
    x = whole_batch(0, size, torch.float64)
    model(x.view(size, -1, 10)[rank]).square().mean().backward()
    reference(x).square().mean().backward()
    for foreach in (True, False):
        for limit in (0.1, 0.01, 0.001):
            norms = [
                torch.nn.utils.clip_grad_norm_(net.parameters(), limit, foreach=foreach)
                for net in (model, reference)
            ]
            torch.testing.assert_close(*norms, rtol=1e-9, atol=0)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        norms = [ours.grad.norm(), theirs.grad.norm()]  # type: ignore[union-attr]
        torch.testing.assert_close(*norms, rtol=1e-9, atol=0)
        norms[0].zero_()  # somebody else's tensor
        torch.testing.assert_close(ours.grad.norm(), norms[1], rtol=1e-9, atol=0)  # type: ignore[union-attr]
    for optimizer in optimizers:
        optimizer.step()


def test_norms_of_several_optimizers(run: Runner) -> None:
    run(clip_twice)
