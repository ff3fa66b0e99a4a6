"""Parameters that join a `pydist.ShardedOptimizer`: unfrozen, or added in a group."""

import copy
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import Runner, batch, joined
from twins import LIMIT_S, TIME_LIMIT, Twins

import pydist
from pydist.sharding import placement

pytestmark = TIME_LIMIT


def unfreeze(stage: int) -> None:
    """Parameters that join: unfrozen, or added to the module and then to the optimizer."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 9), nn.Linear(9, 1))
    module[0].requires_grad_(False)
    twins = Twins(module, torch.optim.AdamW, options={"lr": 0.01}, stage=stage)
    twins.step(0)
    twins.models[0].get_submodule("0").requires_grad_(True)
    twins.models[1].get_submodule("0").requires_grad_(True)
    for step in range(1, 4):
        twins.step(step)
    twins.check("unfrozen", exact=False)
    rows = twins.ours.sharded_state().parameters["0.weight"].ranges
    assert sum(r.end - r.begin for r in rows) < 400 or twins.size == 1

    def extend(model: Any, optimizer: Any) -> None:
        torch.manual_seed(9)
        model.module.append(nn.Linear(1, 3))
        optimizer.zero_grad()
        optimizer.add_param_group(
            {"params": list(model.get_submodule("4").named_parameters("4")), "lr": 0.1}
            if optimizer is twins.ours
            else {"params": list(model.get_submodule("4").parameters()), "lr": 0.1}
        )

    twins.each(extend)
    for step in range(4, 7):
        twins.step(step)
    twins.check("added", exact=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_join(run_sharded: Runner, stage: int) -> None:
    run_sharded(unfreeze, stage)


def add_without_names() -> None:
    """As torch's tutorials do, to an optimizer that was made from the model."""
    twins = Twins(nn.Sequential(nn.Linear(10, 4)), torch.optim.AdamW, options={"lr": 0.01})
    twins.step(0)
    torch.manual_seed(3)
    layers = [nn.Linear(4, 3), nn.Linear(3, 1)]

    def extend(model: Any, optimizer: Any) -> None:
        first, last = copy.deepcopy(layers)
        model.module.append(first)
        model.module.append(last)
        optimizer.zero_grad()
        optimizer.add_param_group({"params": first.parameters(), "lr": 0.1})
        optimizer.add_param_group({"params": last.weight})

    twins.each(extend)
    for step in range(1, 3):
        twins.step(step)
    twins.check("added", exact=False)
    groups = twins.ours.param_groups
    assert [group["param_names"] for group in groups] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
        ["2.weight"],
    ]
    assert "1.weight" in twins.ours.sharded_state().parameters
    with pytest.raises(pydist.InvalidUsage, match=r"no pydist.*model\.module\.append"):
        twins.ours.add_param_group({"params": nn.Linear(2, 2).parameters()})


def test_groups_without_names(run_native: Runner) -> None:
    run_native(add_without_names)


class Grown(nn.Module):
    """With a parameter that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always = nn.Linear(10, 3, dtype=torch.float64)
        self.later = nn.Parameter(torch.randn(5, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        loss: Tensor = self.always(x).square().mean()
        return loss + scale * self.later.square().sum() if scale else loss


def synchronize_after_joining(stage: int, accumulates: bool) -> None:
    """What was averaged in the round in which it joined is averaged."""
    twins = Twins(Grown(), torch.optim.SGD, options={"lr": 0.01}, stage=stage)

    def act(model: Any, optimizer: Any) -> None:
        model(batch(twins.rank, 4, 10), 0.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.module.later.requires_grad_(True)
        model(batch(twins.rank, 4, 10, step=1), twins.rank + 1.0).backward()
        if accumulates:
            with model.no_sync():
                model(batch(twins.rank, 4, 10, step=2), 0.0).backward()
        model.sync_gradients()
        optimizer.step()

    twins.each(act)
    twins.check("synchronized after joining", exact=False)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_sync_gradients_of_what_joined(run_sharded: Runner, stage: int, accumulates: bool) -> None:
    run_sharded(synchronize_after_joining, stage, accumulates)


def run_out_of_memory(how: str) -> None:
    """On one rank, where parameters that join are to move."""
    rank, _ = joined()
    module = nn.Sequential(nn.Linear(10, 40), nn.Linear(40, 1))
    if how == "unfrozen":
        module[0].requires_grad_(False)
    model = pydist.DataParallel(module, bucket_cap_mb=0.0005)
    parameters = model.parameters() if how == "unfrozen" else module[1].parameters()
    optimizer = pydist.ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1)

    def raise_here(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    def change() -> None:
        if how == "added":
            optimizer.add_param_group({"params": list(module[0].parameters())})
        optimizer.step()
        _ = [parameter + 1 for parameter in model.parameters()]

    module[0].requires_grad_(True)
    if how == "unfrozen":
        model(torch.ones(2, 10)).sum().backward()
    if rank == 1:
        with mock.patch.object(placement, "move_in", raise_here), pytest.raises(MemoryError):
            change()
        for again in (optimizer.step, change):
            with pytest.raises(pydist.InvalidUsage, match=r"earlier step or change.*no room"):
                again()
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        assert optimizer._layout.indices.keys() == {id(parameter) for parameter in owned}
    else:
        with pytest.raises(pydist.Error, match="no room"):
            change()


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_no_memory_for_what_joins(how: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        ranks.run(run_out_of_memory, how, timeout=LIMIT_S)


def forget_on_one_rank() -> None:
    """An optimizer that one rank has collected, and the other has not."""
    rank, _ = joined()
    module = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 1))
    module[0].requires_grad_(False)
    model = pydist.DataParallel(module)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    kept = [optimizer] if rank == 1 else []
    del optimizer
    gc.collect()
    # What is frozen had it as well.
    for part in module:
        with pytest.raises(
            pydist.InvalidUsage, match=r"weight has another .*or had one that is gone"
        ):
            pydist.ShardedOptimizer(part.parameters(), torch.optim.SGD, lr=0.1)
    module.requires_grad_(True)
    model(batch(rank, 3, 10, dtype=torch.float32)).sum().backward()
    assert all("Sharded" in type(p.grad).__name__ for p in module.parameters())
    anew = pydist.DataParallel(module)
    anew.zero_grad()
    again = pydist.ShardedOptimizer(anew, torch.optim.SGD, lr=0.1)
    anew(batch(rank, 3, 10, dtype=torch.float32)).sum().backward()
    again.step()
    del kept


def test_what_an_optimizer_has_does_not_depend_on_garbage(run_sharded: Runner) -> None:
    run_sharded(forget_on_one_rank)
