"""A step of `pydist.ShardedOptimizer` that one rank can't take: none does, and all go on."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from training import Runner, batch, joined
from twins import LIMIT_S, TIME_LIMIT, small_model

import pydist

pytestmark = TIME_LIMIT

# Who can't step.
ODD = 1


@pytest.fixture(
    scope="module", params=everyday("native-3", "gloo-2", thorough=("native-2", "gloo-3"))
)
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    backend, count = request.param.split("-")
    with Ranks(int(count), {"PYDIST_BACKEND": backend}) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


class Odd(pydist.ShardedOptimizer):
    """With a step that raises before it steps, where `trouble` says so."""

    trouble = ""

    def step(self, closure: Any = None) -> Any:
        if self.trouble:
            raise KeyError(self.trouble)
        return super().step(closure)


class Trained:
    """A model with a sharded optimizer, and what one process makes of all ranks' batches."""

    def __init__(self, stage: int) -> None:
        self.rank, self.size = joined()
        module = small_model(torch.float64)
        self.reference = copy.deepcopy(module)
        self.theirs = torch.optim.AdamW(self.reference.parameters(), lr=0.01)
        self.model = pydist.DataParallel(module, bucket_cap_mb=0.004)
        groups = [{"params": [p]} for p in self.model.parameters()]
        self.ours: Any = Odd(groups, torch.optim.AdamW, stage=stage, lr=0.01)  # type: ignore[arg-type]

    def loss(self, net: nn.Module, rank: int, number: int) -> Tensor:
        loss: Tensor = net(batch(rank, 6, 10, step=number)).square().mean()
        return loss

    def backward(self, number: int) -> None:
        self.ours.zero_grad()
        self.loss(self.model, self.rank, number).backward()

    def step(self, number: int) -> None:
        self.backward(number)
        self.ours.step()
        self.theirs.zero_grad()
        losses = [self.loss(self.reference, rank, number) for rank in range(self.size)]
        (sum(losses) / self.size).backward()  # type: ignore[union-attr]
        self.theirs.step()
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-11)

    def values(self) -> list[Tensor]:
        states = [value for of_one in self.ours.state.values() for value in of_one.values()]
        return [tensor.detach().clone() for tensor in [*self.model.parameters(), *states]]


@contextlib.contextmanager
def put_by_hand(trained: Trained) -> Iterator[None]:
    weight = next(trained.model.parameters())
    weight.grad = torch.ones_like(weight)
    yield


@contextlib.contextmanager
def accumulate(trained: Trained) -> Iterator[None]:
    with trained.model.no_sync():
        trained.loss(trained.model, trained.rank, 99).backward()
    yield


@contextlib.contextmanager
def remove_a_group(trained: Trained) -> Iterator[None]:
    removed = trained.ours.param_groups.pop()
    yield
    trained.ours.param_groups.append(removed)


@contextlib.contextmanager
def convert(trained: Trained) -> Iterator[None]:
    weight = next(trained.model.parameters())
    before = weight.data
    weight.data = before.float()
    yield
    weight.data = before


@contextlib.contextmanager
def hook(trained: Trained) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise ValueError("no luck")

    handle = trained.ours.register_step_pre_hook(fail)
    yield
    handle.remove()


@contextlib.contextmanager
def override(trained: Trained) -> Iterator[None]:
    trained.ours.trouble = "no luck"
    yield
    trained.ours.trouble = ""


@contextlib.contextmanager
def write(trained: Trained) -> Iterator[None]:
    with trained.ours.writing():
        yield


Misuse = Callable[[Trained], contextlib.AbstractContextManager[None]]
MISUSES: dict[str, tuple[Misuse, type[Exception], str]] = {
    "put by hand": (put_by_hand, pydist.InvalidUsage, "was put there by hand"),
    "accumulated": (accumulate, pydist.InvalidUsage, "and never averaged"),
    "removed": (remove_a_group, pydist.InvalidUsage, r"and step\(\) finds 7 in 7"),
    "converted": (convert, pydist.InvalidUsage, "is .* torch.float32 on cpu now"),
    "hook": (hook, ValueError, "no luck"),
    "override": (override, KeyError, "no luck"),
    "write": (write, pydist.InvalidUsage, r"is called inside optimizer\.writing"),
}


def refuse(stage: int) -> None:
    trained = Trained(stage)
    trained.step(0)
    is_odd = trained.rank == ODD
    for number, (misuse, error, said) in enumerate(MISUSES.values(), 1):
        trained.backward(number)
        before = trained.values()
        kind = error if is_odd else pydist.Error
        text = said if is_odd else rf"raised on rank {ODD}, so no rank has stepped.*{said}"
        misusing = misuse(trained) if is_odd else contextlib.nullcontext()
        with misusing, pytest.raises(kind, match=text):
            trained.ours.step()
        now = trained.values()
        assert all(torch.equal(*pair) for pair in zip(before, now, strict=True))
        trained.step(number)


@pytest.mark.parametrize("stage", [1, 2])
def test_no_rank_steps_where_one_can_not(run: Runner, stage: int) -> None:
    run(refuse, stage)


def refuse_in_closure(stage: int, where: str) -> None:
    """The others may be in a backward of theirs, which waits for this rank."""
    trained = Trained(stage)
    trained.step(0)
    is_odd = trained.rank == ODD

    def closure() -> Tensor:
        trained.ours.zero_grad()
        if is_odd and where == "before backward":
            raise ValueError("no luck")
        loss = trained.loss(trained.model, trained.rank, 1)
        if is_odd and where == "in backward":
            loss.register_hook(lambda _: 1 / 0)  # type: ignore[arg-type]
        loss.backward()
        if is_odd and where == "after backward":
            raise ValueError("no luck")
        return loss

    before = trained.values()
    error = ZeroDivisionError if where == "in backward" else ValueError
    with pytest.raises(error if is_odd else pydist.Error, match=None if is_odd else f"rank {ODD}"):
        trained.ours.step(closure)
    now = trained.values()
    assert all(torch.equal(*pair) for pair in zip(before, now, strict=True))
    where = ""
    for number in range(1, 4):
        trained.step(number)
    trained.ours.zero_grad()
    trained.ours.step(closure)


@pytest.mark.parametrize("where", ["before backward", "in backward", "after backward"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_closure_that_raises_on_one_rank(run: Runner, stage: int, where: str) -> None:
    run(refuse_in_closure, stage, where)


def go_apart(stage: int) -> None:
    """One rank steps, and the others go backward; then the other way round."""
    trained = Trained(stage)
    trained.step(0)
    is_odd = trained.rank == ODD
    before = trained.values()
    trained.ours.zero_grad()
    with trained.model.no_sync() if is_odd else contextlib.nullcontext():
        loss = trained.loss(trained.model, trained.rank, 1)
    if is_odd:
        loss.backward()
        with pytest.raises(pydist.InvalidUsage, match="and never averaged"):
            trained.ours.step()
    else:
        with pytest.raises(pydist.Error, match=rf"step\(\) of .* raised on rank {ODD} before"):
            loss.backward()
    trained.ours.zero_grad()
    trained.step(1)
    before = trained.values()
    if is_odd:
        with pytest.raises(pydist.Error, match=r"called step\(\) .*while this rank went back"):
            trained.backward(2)
    else:
        with pytest.raises(pydist.Error, match=f"rank {ODD} went backward while this rank"):
            trained.ours.step()
    now = trained.values()
    assert all(torch.equal(*pair) for pair in zip(before, now, strict=True))
    for number in range(2, 5):
        trained.step(number)


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_step_while_others_go_backward(run: Runner, stage: int) -> None:
    run(go_apart, stage)


def refuse_sparse() -> None:
    """Without a wrapped model, whose gradients are averaged by something else."""
    rank, _ = joined()
    weights = [nn.Parameter(torch.arange(40.0).view(8, 5)) for _ in range(3)]
    optimizer = pydist.ShardedOptimizer(weights, torch.optim.SGD, lr=1.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    if rank == ODD:
        weights[0].grad = torch.ones_like(weights[0]).to_sparse()
    said = "the gradient of parameter 0 is sparse"
    with pytest.raises(pydist.InvalidUsage if rank == ODD else pydist.Error, match=said):
        optimizer.step()
    assert torch.equal(weights[1].detach(), torch.arange(40.0).view(8, 5))
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    for weight in weights:
        assert torch.equal(weight.detach(), torch.arange(40.0).view(8, 5) - 1)
    optimizer.param_groups[0]["lr"] = 1.0 + rank
    with pytest.raises(
        pydist.Mismatch, match=r"rank 0 has lr=1\.0 in group 0, where rank 1 has lr"
    ):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    for weight in weights:
        assert torch.equal(weight.detach(), torch.arange(40.0).view(8, 5) - 2)


def test_without_a_wrapped_model(run: Runner) -> None:
    run(refuse_sparse)


def step_others() -> None:
    """Of two optimizers of one model, ranks step another one."""
    rank, _ = joined()
    model = pydist.DataParallel(nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 1)))
    optimizers = [
        pydist.ShardedOptimizer(model.get_submodule(name).parameters(), torch.optim.SGD, lr=0.1)
        for name in ("0", "1")
    ]
    model(torch.ones(2, 10)).sum().backward()
    with pytest.raises(pydist.Mismatch, match=r"different pydist\.ShardedOptimizers of one"):
        optimizers[rank == ODD].step()
    for optimizer in optimizers:
        optimizer.step()


def test_ranks_that_step_different_optimizers(run: Runner) -> None:
    run(step_others)


def put_by_hand_into_a_new_bucket() -> None:
    """It is made in the step, after the vote: then the groups end."""
    joined()
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    model = pydist.DataParallel(module)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    module[0].requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    weight = module[0].get_parameter("weight")
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(pydist.Error):
        optimizer.step()
    assert torch.equal(weight.detach(), before)


def test_what_is_put_by_hand_into_a_new_bucket_is_refused(run: Runner) -> None:
    run(put_by_hand_into_a_new_bucket)
