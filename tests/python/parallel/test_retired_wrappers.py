"""A parameter is trained by one `pydist.DataParallel`: whoever takes it up retires the others."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


@pytest.fixture(scope="module")
def two(backend: str) -> Iterator[Ranks]:
    with Ranks(2, {"PYDIST_BACKEND": backend, "PYDIST_DEBUG": "1"}) as ranks:
        yield ranks


@pytest.fixture
def run_two(two: Ranks) -> Runner:
    return lambda function, *args: two.run(function, *args, timeout=LIMIT_S)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 299), nn.LayerNorm(299), nn.Linear(299, 3)
    ).double()


def loss_of(net: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    return (net(batch(rank, 5, 6, step=step)) - 1).square().mean()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
    """As one process, which has everybody's batches, where the net is not wrapped."""
    wrapped = isinstance(net, pydist.DataParallel)
    everybody = range(pydist.world_size())
    for step in steps:
        optimizer.zero_grad()
        losses = [loss_of(net, r, step) for r in ([pydist.rank()] if wrapped else everybody)]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
    return loss


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    for own, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_near(own.detach(), expected.detach())


# What a script has left when it wraps its module anew.
def leftovers(kind: str, model: nn.Module, optimizer: Any, loss: Tensor) -> Any:
    if kind == "scheduler":
        return torch.optim.lr_scheduler.StepLR(optimizer, 100)
    return {"model": model, "optimizer": optimizer, "loss": loss}[kind]


def wrap_anew(kind: str, is_sharded: bool) -> None:
    joined()
    reference = make_net()
    train(reference, torch.optim.Adam(reference.parameters(), lr=0.001), range(3))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.01), range(3, 15))

    def make(model: nn.Module, optimizer_class: Any, lr: float) -> torch.optim.Optimizer:
        if is_sharded:
            return pydist.ShardedOptimizer(model.parameters(), optimizer_class, lr=lr)
        optimizer: torch.optim.Optimizer = optimizer_class(model.parameters(), lr=lr)
        return optimizer

    model = pydist.DataParallel(make_net(), bucket_cap_mb=0.01)
    optimizer = make(model, torch.optim.Adam, 0.001)
    kept = leftovers(kind, model, optimizer, train(model, optimizer, range(3)))
    optimizer.zero_grad()
    model = pydist.DataParallel(model.module, bucket_cap_mb=0.01)
    optimizer = make(model, torch.optim.SGD, 0.01)
    train(model, optimizer, range(3, 15))
    assert_same_parameters(model, reference)
    del kept


@pytest.mark.parametrize(
    ("kind", "is_sharded"),
    [
        ("model", False),
        ("loss", False),
        ("model", True),
        ("loss", True),
        ("optimizer", True),
        ("scheduler", True),
    ],
)
def test_wrapping_anew_beside_leftovers(run_two: Runner, kind: str, is_sharded: bool) -> None:
    run_two(wrap_anew, kind, is_sharded)


def use_what_is_retired() -> None:
    rank, _ = joined()
    old = pydist.DataParallel(make_net())
    optimizer = pydist.ShardedOptimizer(old, torch.optim.SGD, lr=0.01)
    loss_of(old, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    of_old = loss_of(old, rank, 0)
    with old.no_sync():  # whose end is none of the old wrapper's concern
        model = pydist.DataParallel(old.module)
    weight = model.module[4].weight
    tries: list[Callable[[], Any]] = [
        lambda: loss_of(old, rank, 1),
        of_old.backward,
        optimizer.step,
        lambda: optimizer.step(lambda: 0.0),
        lambda: optimizer.add_param_group({"params": [weight]}),
        lambda: pydist.ShardedOptimizer(old, torch.optim.SGD, lr=0.01),
        old.sync_gradients,
        old.no_sync().__enter__,
        old.weighted(1).__enter__,
        old.join().__enter__,
        old.stats,
    ]
    for attempt in tries:
        with pytest.raises(
            pydist.InvalidUsage,
            match=r"DataParallel was retired: its parameters 0\.weight, 0\.bias, 2\.weight and 5 "
            r"more were wrapped anew.*nn\.ModuleDict",
        ):
            attempt()
    # What needs nobody to average is still there.
    assert set(old.state_dict()) == set(model.state_dict())
    assert optimizer.sharded_state().parameters is not None
    reference = copy.deepcopy(model)
    train(model, pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.01), range(3))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.01), range(3))
    assert_same_parameters(model, reference)


def test_what_is_retired_raises(run_two: Runner) -> None:
    run_two(use_what_is_retired)


def share_an_encoder() -> None:
    rank, size = joined()
    torch.manual_seed(1)
    encoder, policy, value = (nn.Linear(*sizes).double() for sizes in ((6, 9), (9, 3), (9, 1)))
    actor = pydist.DataParallel(nn.Sequential(encoder, nn.Tanh(), policy))
    critic_net = nn.Sequential(encoder, nn.Tanh(), value)
    reference = copy.deepcopy(critic_net)
    of_actor = loss_of(actor, rank, 0)
    critic = pydist.DataParallel(critic_net)
    with pytest.raises(
        pydist.InvalidUsage, match=r"retired: its parameters 0\.weight, 0\.bias wer"
    ):
        loss_of(actor, rank, 0)
    # Nobody would average what the critic does not have.
    with pytest.raises(pydist.InvalidUsage, match="retired"):
        (of_actor + loss_of(critic, rank, 0)).backward()
    with pytest.raises(pydist.InvalidUsage, match="retired"):
        pydist.ShardedOptimizer(actor.parameters(), torch.optim.SGD, lr=0.01)
    critic.zero_grad()
    loss_of(critic, rank, 1).backward()
    for r in range(size):
        (loss_of(reference, r, 1) / size).backward()
    for ours, theirs in zip(critic.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)


def test_shared_encoder(run_two: Runner) -> None:
    run_two(share_an_encoder)


class Holder(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 3), inside])


def nest() -> None:
    rank, _ = joined()
    inner = pydist.DataParallel(make_net())
    for module in (Holder(inner), Holder(torch.compile(inner, backend="eager"))):
        with pytest.raises(
            pydist.InvalidUsage, match=r"parts\.1\S* of the module is a pydist\.Data"
        ):
            pydist.DataParallel(module)
    with pytest.raises(pydist.InvalidUsage, match=r"^0 of the module is a pydist\.DataParallel"):
        pydist.DataParallel(nn.Sequential(inner))
    loss_of(inner, rank, 0).backward()  # goes on
    inner.module[4] = pydist.DataParallel(inner.module[4])
    with pytest.raises(
        pydist.InvalidUsage, match=r"its parameters 4\.weight, 4\.bias were wrapped"
    ):
        loss_of(inner, rank, 0)


def test_nested(run_two: Runner) -> None:
    run_two(nest)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.adapter = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.adapter(self.base(x).tanh())
        return out


def unfreeze_what_is_shared() -> None:
    rank, size = joined()
    base = make_net().requires_grad_(False)
    first, second = (pydist.DataParallel(Adapted(base)) for _ in range(2))
    for model in (first, second):
        loss_of(model, rank, 0).backward()
    base[4].requires_grad_(True)
    of_first = loss_of(first, rank, 1)
    reference = copy.deepcopy(second.module)
    second.zero_grad()
    loss = loss_of(second, rank, 1)
    with pytest.raises(pydist.InvalidUsage, match=r"retired: its parameters base\.4\.weight, base"):
        loss_of(first, rank, 1)
    with pytest.raises(pydist.InvalidUsage, match="were unfrozen in, or added to, another"):
        (of_first + loss).backward()
    second.zero_grad()
    loss_of(second, rank, 2).backward()
    for r in range(size):
        (loss_of(reference, r, 2) / size).backward()
    for ours, theirs in zip(second.parameters(), reference.parameters(), strict=True):
        if theirs.requires_grad:
            assert_near(ours.grad, theirs.grad)


def test_late_unfreezing(run_two: Runner) -> None:
    run_two(unfreeze_what_is_shared)


def train_adapters(stage: Any, by_groups: bool) -> None:
    joined()
    base = make_net().requires_grad_(False)
    torch.manual_seed(2)
    nets = [Adapted(base) for _ in range(6)]
    references = copy.deepcopy(nets)
    models = [pydist.DataParallel(net) for net in nets]
    optimizers = []
    for model in models:
        params: Any = model.parameters()
        if by_groups:
            params = [{"params": model.adapter.parameters(), "weight_decay": 0.1}]
        optimizer = pydist.ShardedOptimizer(params, torch.optim.AdamW, lr=0.01, stage=stage)
        if by_groups:
            optimizer.add_param_group({"params": model.base.parameters(), "weight_decay": 0.1})
        optimizers.append(optimizer)
    for model, optimizer, reference in zip(models, optimizers, references, strict=True):
        decay = 0.1 if by_groups else 0.01
        train(model, optimizer, range(3))
        alone = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=decay)
        train(reference, alone, range(3))
        assert_same_parameters(model, reference)
    of_both = [*models[0].adapter.parameters(), *models[1].adapter.parameters()]
    with pytest.raises(pydist.InvalidUsage, match="parameters of several models"):
        pydist.ShardedOptimizer(of_both, torch.optim.AdamW)
    with pytest.raises(pydist.InvalidUsage, match="parameters of another"):
        optimizers[0].add_param_group({"params": models[1].adapter.parameters()})


@pytest.mark.parametrize("by_groups", [False, True], ids=["all", "groups"])
@pytest.mark.parametrize("stage", [1, 2])
def test_adapters_on_one_frozen_base(run_two: Runner, stage: int, by_groups: bool) -> None:
    run_two(train_adapters, stage, by_groups)


def evaluate_what_another_trains() -> None:
    """By one rank alone, while a base that both have is unfrozen for the other."""
    rank, _ = joined()
    base, reference = make_net(), make_net()
    first = pydist.DataParallel(base)
    first.requires_grad_(False)
    second = pydist.DataParallel(nn.Sequential(base, nn.Linear(3, 3).double()))
    # The one that trains what trains, whatever the other trained before.
    pydist.ShardedOptimizer(second.parameters(), torch.optim.SGD, lr=0.01)
    first.requires_grad_(True)
    if rank == 1:
        with torch.no_grad():
            second(batch(rank, 5, 6))
    train(first, torch.optim.SGD(first.parameters(), lr=0.01), range(3))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.01), range(3))
    assert_same_parameters(first, reference)


def test_evaluating_retires_nobody(run_two: Runner) -> None:
    run_two(evaluate_what_another_trains)


def wrap_within_join() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(make_net())
    with model.join():
        loss_of(model, rank, 0).backward()
        with pytest.raises(pydist.InvalidUsage, match=r"in join\(\) of that wrapper"):
            pydist.DataParallel(model.module)
        gc.collect()
        loss_of(model, rank, 0).backward()


def test_wrapping_anew_within_join(run_two: Runner) -> None:
    run_two(wrap_within_join)


def unfreeze_within_join() -> None:
    rank, size = joined()
    net = make_net()
    model = pydist.DataParallel(net)
    head = next(net.children())
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    other = pydist.DataParallel(nn.Sequential(head, nn.Linear(300, 1).double()))
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    with model.join():
        for _ in range(2):  # what was found once is found again
            with pytest.raises(pydist.InvalidUsage, match=r"in join\(\) of that wrapper"):
                loss_of(other, rank, 0)
    other.zero_grad()
    loss_of(other, rank, 0).backward()
    assert head.weight.grad is not None
    of_all = pydist.all_gather(head.weight.grad[None])
    assert of_all.shape[0] == size
    assert all(torch.equal(of_all[0], one) for one in of_all)


def test_unfreezing_what_another_wrapper_joins_with(run_two: Runner) -> None:
    run_two(unfreeze_within_join)


def save_several(folder: str) -> None:
    joined()
    nets = [pydist.DataParallel(make_net()) for _ in range(2)]
    optimizers = [
        pydist.ShardedOptimizer(net, torch.optim.Adam, lr=0.01, share_parameters=True)
        for net in nets
    ]
    both = nn.ModuleDict({"first": nets[0], "second": nets[1]})
    train(nets[0], optimizers[0], range(2))
    pydist.save(folder, model=both)
    train(nets[0], optimizers[0], range(2))
    pydist.load(folder, model=both)
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, range(2))  # with PYDIST_DEBUG=1 says who else has written


def test_loading_several_wrapped_models(tmp_path: Any) -> None:
    with Ranks(2, {"PYDIST_BACKEND": "native", "PYDIST_DEBUG": "1"}) as ranks:
        ranks.run(save_several, str(tmp_path / "saved"), timeout=LIMIT_S)
