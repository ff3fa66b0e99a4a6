"""Programs that keep gradients, run on torch's DDP and on ours, which must find the same."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from training import LIMIT_S, Runner, joined

import pydist

STEPS = 9  # plans change after the 1st, 2nd, 4th and 8th


@pytest.fixture(scope="module", params=everyday("native-3", thorough=("gloo-2",)))
def some_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    backend, count = request.param.split("-")
    with Ranks(int(count), {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run_on_some(some_ranks: Ranks) -> Runner:
    return lambda function, *args: some_ranks.run(function, *args, timeout=LIMIT_S)


# What a program finds, in order.
Found = list[Any]


Program = Callable[[Any, int, int], Found]


class Moody(nn.Module):
    """Whose branches come in another order in some forwards, so that plans change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(4, 6, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        self.last = nn.Linear(6, 2, dtype=torch.float64)

    def forward(self, x: Tensor, order: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
        x = self.trunk(x).tanh()
        for number in order:
            x = self.branches[number](x).tanh()
        out: Tensor = self.last(x)
        return out.sin().mean()


def order_of(step: int) -> tuple[int, ...]:
    return ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1))[min(step, 8) // 2 % 3]


def beside_torch(program: Program, module: nn.Module, *, uses_hook: bool = False) -> None:
    """Runs a program on torch's DDP, and on ours with small buckets and with one."""
    rank, size = joined()
    group = dist.new_group(backend="gloo")
    theirs = DistributedDataParallel(
        copy.deepcopy(module), process_group=group, find_unused_parameters=True
    )
    models = [
        pydist.DataParallel(copy.deepcopy(module), bucket_cap_mb=cap_mb) for cap_mb in (1e-6, 1.0)
    ]
    if uses_hook:
        theirs.register_comm_hook(group, allreduce_hook)
        for model in models:
            model.register_comm_hook(group, allreduce_hook)
    expected = program(theirs, rank, size)
    for model in models:
        compare(program(model, rank, size), expected)


def compare(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            compare(a, b)
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    else:
        assert ours == theirs


def inner(model: Any) -> Any:
    return model.module


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def values_of(held: Sequence[Any]) -> list[Tensor | None]:
    """Copies, of what a program has kept."""
    return [None if kept is None else torch.as_tensor(kept).clone().reshape(-1) for kept in held]


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "detach": lambda gradient: gradient.detach(),
    "data": lambda gradient: gradient.data,
    "view": lambda gradient: gradient.view(-1),
    "slice": lambda gradient: gradient[:1],
    "numpy": lambda gradient: gradient.numpy(),
    "numpy of a view": lambda gradient: gradient.view(-1)[1:].numpy(),
    "dlpack": torch.from_dlpack,
    "storage": lambda gradient: gradient.untyped_storage(),
    "deepcopy": copy.deepcopy,
}


def into_flat(model: nn.Module) -> Tensor:
    """Makes the gradients views of one buffer."""
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    flat = torch.zeros(count, dtype=torch.float64, device=parameters[0].device)
    begin = 0
    for parameter in parameters:
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    return flat


def places(model: Any) -> list[int]:
    return [g.data_ptr() for g in gradients(model) if g is not None]
