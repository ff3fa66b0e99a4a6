"""Who reads parameters right after a step of `pydist.ShardedOptimizer` sees all ranks' updates."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import Runner, joined
from twins import LIMIT_S, TIME_LIMIT, steps_late

import pydist
from pydist.sharding import in_flight
from pydist.sharding import optimizer as sharded_optimizer
from pydist.sharding.step.shard_step import ShardStep

pytestmark = TIME_LIMIT


class Stacked(nn.Module):
    """Layers beside each other, whose parameters pass by torch's dispatch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(4, 64, 64) / 8)
        self.more = nn.ParameterList([nn.Parameter(torch.zeros(4, 64))])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(lambda w, b: x @ w + b)(self.weight, self.more[0])
        return out


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor


class Scaled(nn.Module):
    """Gives a scripted function the parameter of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.scaled = torch.jit.script(scaled)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.inner.weight)


def pass_dispatch_by(how: str) -> None:
    """What the first reader after a step sees, where it takes parameters past torch's dispatch."""
    rank, _ = joined()
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
    module: nn.Module = {"vmap": Stacked, "scripted function": Scaled}.get(how, nn.Identity)()
    if how.startswith("scripted module"):
        module = nn.Sequential(nn.Linear(64, 64))
    read: Any = module
    if "copy" in how:
        read = torch.jit.script(module)
    model: Any
    if "torch" in how:
        read = model = nn.parallel.DistributedDataParallel(torch.jit.script(module))
        optimizer = pydist.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=100.0)
    else:
        model = pydist.DataParallel(module)
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=100.0)
    x = torch.ones(64, 64)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        pydist.barrier()
        with steps_late(0.05) if rank == 1 else contextlib.nullcontext():
            optimizer.step()
        with torch.no_grad():
            early = read(x).clone()
            optimizer.finish()
            torch.testing.assert_close(early, read(x), rtol=1e-4, atol=1e-6)
    assert not nn.modules.module._global_forward_pre_hooks


PAST_DISPATCH = ["vmap", "scripted function"]
PAST_DISPATCH += ["scripted module, copy", "scripted module, torch's wrapper"]


@pytest.mark.parametrize("how", PAST_DISPATCH)
def test_readers_past_dispatch_wait(native_three: Ranks, how: str) -> None:
    native_three.run(pass_dispatch_by, how, timeout=LIMIT_S)


def no_functions() -> Any:
    """As if no test had scripted one in this process."""
    return mock.patch.object(sharded_optimizer, "scripts_any_function", return_value=False)


def wait_for_own() -> None:
    """A module's forward waits for the bucket of its own parameters, and for no other."""
    joined()
    module: Any = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    model = pydist.DataParallel(module, bucket_cap_mb=0.1)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 200)).sum().backward()
    with no_functions():
        optimizer.step()
    waited: list[Any] = []
    with mock.patch.object(in_flight.Gather, "wait", lambda gather: waited.append(gather)):
        for hook in nn.modules.module._global_forward_pre_hooks.values():
            hook(module[1], ())
    own = {module[1].weight.gathered_by, module[1].bias.gathered_by}
    assert own == set(waited)
    assert module[0].weight.gathered_by not in own
    optimizer.finish()


def test_a_forward_waits_for_its_own_parameters(run_native: Runner) -> None:
    run_native(wait_for_own)


def look_for_scripts() -> None:
    """Once, and again where modules have joined."""
    joined()
    module = nn.Sequential(nn.Linear(10, 10))
    model = pydist.DataParallel(module)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)

    def step() -> int:
        model(torch.ones(2, 10)).sum().backward()
        with no_functions():
            optimizer.step()
        with (
            mock.patch.object(module, "modules", wraps=module.modules) as walks,
            mock.patch.object(ShardStep, "arrive", autospec=True) as arrive,
        ):
            model(torch.ones(2, 10))
        assert arrive.called == (len(module) > 1)
        return walks.call_count

    step()
    assert step() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.append(torch.jit.script(nn.Tanh()))
    step()
    assert step() == 0


def test_looking_for_torchscript(run_native: Runner) -> None:
    run_native(look_for_scripts)


class NoLayer(nn.Module):
    """Whose forward reads a parameter without a function of torch's that could wait."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))


def read_at_once() -> None:
    """Whoever reads parameters right after a step sees all ranks' updates."""
    joined()

    def read_dict(model: Any) -> Tensor:
        out: Tensor = model.state_dict()["weight"]
        return out

    readers: list[Callable[[Any], Tensor]] = [
        lambda model: model.weight + 0,
        lambda model: model.weight.detach(),
        lambda model: model.weight.data,
        lambda model: torch.cat([model.weight]),
        lambda model: torch.from_numpy(model.weight.detach().numpy()),
        lambda model: copy.deepcopy(model).weight,
        lambda model: copy.deepcopy(model.weight),
        lambda model: torch._foreach_add([model.weight], 0.0)[0],
        lambda model: torch.func.functional_call(
            nn.Linear(1000, 1, bias=False), {"weight": model.weight}, torch.eye(1000)
        ),
        lambda model: torch.func.grad(
            lambda weights: (
                torch.func.functional_call(nn.Linear(1000, 1, bias=False), weights, torch.eye(1000))
                .square()
                .sum()
                / 2
            )
        )(dict(model.named_parameters()))["weight"],
        read_dict,
        lambda model: torch.nn.utils.parameters_to_vector(model.parameters()),
    ]
    for number, read in enumerate(readers):
        model = pydist.DataParallel(NoLayer())
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.5)
        model.weight.grad = torch.ones(1000)
        model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.grad is None
        assert model.weight.shape == (1000,)
        got = read(model)
        assert torch.equal(got.detach().reshape(-1), torch.full((1000,), 0.5)), number
        assert type(model.weight) is nn.Parameter


def test_readers_wait(run_sharded: Runner) -> None:
    run_sharded(read_at_once)
