"""Two wrappers that would average one gradient are refused, on all ranks."""

import threading

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from training import LIMIT_S, TIME_LIMIT, Runner, batch, joined, train_like_reference

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
        ("ours", "the module is a pydist.DataParallel already"),
        ("ours within", "b of the module is a pydist.DataParallel already"),
    ],
)
def test_wrapped_models_are_not_wrapped_again(three: Ranks, kind: str, says: str) -> None:
    for message in three.run(wrap_a_wrapped_one, kind, timeout=LIMIT_S):
        assert says in message


def put_torch_around(how: str) -> str:
    rank, _ = joined()
    model: nn.Module = pydist.DataParallel(build())
    if how == "deeper":
        model = nn.Sequential(nn.Linear(4, 4).double(), model)
    outer = DistributedDataParallel(model)
    # What Accelerate's prepare() does to a model that is wrapped already.
    with pytest.raises(pydist.InvalidUsage) as caught:
        outer(batch(rank, 5, 4))
    # The model itself works on.
    inner = model[1] if how == "deeper" else model
    inner(batch(rank, 5, 4)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("how", ["directly", "deeper"])
def test_torch_around_a_wrapped_model_raises_in_forward(three: Ranks, how: str) -> None:
    for message in three.run(put_torch_around, how, timeout=LIMIT_S):
        assert "Accelerate's prepare() and Trainers" in message
        assert "give them the plain module (model.module)" in message


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
