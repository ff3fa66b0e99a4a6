"""Two wrappers that would average one gradient are refused, on all ranks."""

import threading
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    assert_near,
    batch,
    joined,
    train_like_reference,
)

import pydist

pytestmark = TIME_LIMIT


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def wrap_a_wrapped_one(kind: str) -> str:
    joined()
    inner: nn.Module = build()
    if kind == "torch's":
        wrapped: nn.Module = DistributedDataParallel(inner)
    elif kind == "torch's within":
        wrapped = nn.ModuleDict({"a": nn.Linear(1, 1), "b": DistributedDataParallel(inner)})
    elif kind == "torch's within a compiled one":
        wrapped = torch.compile(nn.Sequential(DistributedDataParallel(inner)), backend="eager")  # type: ignore[assignment]
    elif kind == "a copy of torch's":
        wrapped = AveragedModel(DistributedDataParallel(inner))
    elif kind == "replicated":
        wrapped = nn.Sequential(replicate(inner))
    elif kind == "ours within":
        wrapped = nn.ModuleDict({"b": pydist.DataParallel(inner)})
    else:
        wrapped = pydist.DataParallel(inner)
    with pytest.raises(pydist.InvalidUsage) as caught:
        pydist.DataParallel(wrapped)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("torch's", "the module is a torch DistributedDataParallel already"),
        ("torch's within", "b of the module is a torch DistributedDataParallel already"),
        ("torch's within a compiled one", "_orig_mod.0 of the module is a torch Distributed"),
        ("a copy of torch's", "module of the module is a torch DistributedDataParallel already"),
        ("replicated", "0 of the module is averaged by torch's replicate() already"),
        ("ours", "the module is a pydist.DataParallel already"),
        ("ours within", "b of the module is a pydist.DataParallel already"),
    ],
)
def test_wrapped_models_are_not_wrapped_again(three: Ranks, kind: str, says: str) -> None:
    for message in three.run(wrap_a_wrapped_one, kind, timeout=LIMIT_S):
        assert says in message


def put_torch_around(kind: str, how: str) -> str:
    rank, _ = joined()
    model = pydist.DataParallel(build())
    inner: nn.Module = model
    if how == "deeper":
        inner = nn.Sequential(nn.Linear(4, 4).double(), nn.ModuleDict({"a": model}))
    wrap: Any = DistributedDataParallel if kind == "distributed" else nn.DataParallel
    if how == "later":
        outer = wrap(nn.Sequential(nn.Linear(4, 4).double(), nn.Identity()))
        outer.module[1] = model
        with pytest.raises(pydist.InvalidUsage) as caught:
            outer(batch(rank, 5, 4))
    else:
        # What Accelerate's prepare() does to a model that is wrapped already.
        with pytest.raises(pydist.InvalidUsage) as caught:
            wrap(inner)
    # The model itself works on.
    model(batch(rank, 5, 4)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("how", ["directly", "deeper", "later"])
def test_torch_around_a_wrapped_model_is_refused(three: Ranks, how: str) -> None:
    for message in three.run(put_torch_around, "distributed", how, timeout=LIMIT_S):
        assert "Accelerate's prepare() and Trainers" in message
        assert "give them the plain module (model.module)" in message


@pytest.mark.parametrize("how", ["directly", "deeper"])
def test_copies_in_threads_of_a_wrapped_model_are_refused(three: Ranks, how: str) -> None:
    for message in three.run(put_torch_around, "threads", how, timeout=LIMIT_S):
        assert "torch.nn.DataParallel was put around a pydist.DataParallel" in message
        assert "start a process for each GPU" in message


def give_torch_what_it_does_not_train(how: str) -> None:
    rank, _ = joined()
    model = pydist.DataParallel(build())
    model(batch(rank, 5, 4)).sum().backward()
    head = nn.Linear(1, 1).double()
    both = nn.Sequential(model.module, head)
    if how == "frozen":
        model.requires_grad_(False)
    else:
        names = [name for name, _ in both.named_parameters() if name.startswith("0.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, names)
    outer = DistributedDataParallel(both)
    outer(batch(rank, 5, 4)).sum().backward()
    model(batch(rank, 5, 4))
    if how == "ignored":
        model(batch(rank, 5, 4)).sum().backward()


@pytest.mark.parametrize("how", ["frozen", "ignored"])
def test_torch_may_have_what_it_does_not_train(three: Ranks, how: str) -> None:
    three.run(give_torch_what_it_does_not_train, how, timeout=LIMIT_S)


def put_another_into_it(kind: str) -> str:
    rank, _ = joined()
    model = pydist.DataParallel(build())
    model(batch(rank, 5, 4)).sum().backward()
    layer = nn.Linear(4, 4).double()
    if kind == "torch's":
        model.module[0] = DistributedDataParallel(layer)
    elif kind == "torch's, inserted":
        model.module.insert(1, DistributedDataParallel(layer))
    elif kind == "torch's around its own part":
        model.module[0] = DistributedDataParallel(model.module[0])
    else:
        model.module[0] = pydist.DataParallel(layer)
    for _ in range(2):  # as long as it is there
        with pytest.raises(pydist.InvalidUsage) as caught:
            model(batch(rank, 5, 4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("torch's", "0 of the module is a torch DistributedDataParallel already"),
        ("torch's, inserted", "1 of the module is a torch DistributedDataParallel already"),
        ("torch's around its own part", "0.bias were given to torch's DistributedDataParallel"),
        ("ours", "0 of the module is a pydist.DataParallel already"),
    ],
)
def test_another_wrapper_in_a_wrapped_model_raises(three: Ranks, kind: str, says: str) -> None:
    for message in three.run(put_another_into_it, kind, timeout=LIMIT_S):
        assert says in message


def give_the_plain_module_to_torch() -> None:
    """As errors tell to do: then torch's wrapper trains, and ours has retired."""
    rank, size = joined()
    reference, model = build(), pydist.DataParallel(build(), broadcast_buffers=False)
    theirs = DistributedDataParallel(model.module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    theirs(batch(rank, 5, 4)).sin().mean().backward()
    for r in range(size):
        (reference(batch(r, 5, 4)).sin().mean() / size).backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, expected.grad)
    optimizer.step()
    with pytest.raises(pydist.InvalidUsage, match="given to torch's DistributedDataParallel"):
        model(batch(rank, 5, 4))


def test_torch_takes_over_the_plain_module(three: Ranks) -> None:
    three.run(give_the_plain_module_to_torch, timeout=LIMIT_S)


def replicate_it() -> None:
    """torch's function of that name makes its wrapper in the first forward, beside the module."""
    rank, size = joined()
    reference, model = build().eval(), pydist.DataParallel(build().eval())
    replicate(model.module)
    model(batch(rank, 5, 4)).sin().mean().backward()
    for r in range(size):
        (reference(batch(r, 5, 4)).sin().mean() / size).backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, expected.grad)
    with pytest.raises(pydist.InvalidUsage, match="given to torch's DistributedDataParallel"):
        model(batch(rank, 5, 4))


def test_a_module_that_torch_replicates(three: Ranks) -> None:
    three.run(replicate_it, timeout=LIMIT_S)


class CallsAnother(nn.Module):
    """Its forward runs a model that is none of its parts."""

    def __init__(self, other: list[nn.Module]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=torch.float64)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other[0](x) + self.fc(x).sum()
        return out


def train_beside_torch() -> None:
    """A wrapper of torch's that is active for another model stops nobody."""
    rank, _ = joined()
    reference, model = build(), pydist.DataParallel(build())
    outer = DistributedDataParallel(CallsAnother([model]))
    outer(batch(rank, 5, 4)).sum().backward()
    model.zero_grad()
    reference.load_state_dict(model.state_dict())

    def loss(net: nn.Module, r: int, step: int) -> Tensor:
        out: Tensor = net(batch(r, 5, 4, step=step)).sin().mean()
        return out

    with outer._inside_ddp_forward():
        train_like_reference(model, reference, loss)
    failures: list[BaseException] = []

    def forward_in_a_thread() -> None:
        try:
            with torch.no_grad():
                model(batch(rank, 5, 4))
        except BaseException as error:
            failures.append(error)

    with outer._inside_ddp_forward():
        thread = threading.Thread(target=forward_in_a_thread)
        thread.start()
        thread.join()
    assert not failures


def test_torch_around_another_model_stops_nobody(run: Runner) -> None:
    run(train_beside_torch)
