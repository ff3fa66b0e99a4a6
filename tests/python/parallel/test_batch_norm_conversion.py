"""Models whose batch normalisation is converted to SyncBatchNorm, and copies and states of it."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from normalized_batches import batches, scrambled
from torch import Tensor, nn
from training import Runner, assert_near, joined

import pydist

pytestmark = pytest.mark.timeout(30)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=1e-3))
        self.again = nn.Sequential(self.first[1])
        self.same = self.first[1]
        self.second = nn.BatchNorm1d(4, momentum=None, affine=False)
        self.third = nn.BatchNorm3d(4, track_running_stats=False)
        self.torch_sync = nn.SyncBatchNorm(4)
        self.instance = nn.InstanceNorm2d(4, affine=True)


def test_conversion_keeps_everything() -> None:
    net = Net()
    net.first.eval()
    net.first[1].weight.requires_grad_(False)
    net.second.qconfig = "kept"  # type: ignore[assignment]
    calls: list[str] = []
    handle = net.second.register_forward_hook(lambda *_: calls.append("hook"))
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    order = [name for name, _ in net.named_modules()]
    modes = {name: part.training for name, part in net.named_modules()}

    converted = pydist.SyncBatchNorm.convert_sync_batchnorm(net)

    assert converted is net
    assert [name for name, _ in net.named_modules()] == order
    assert {name: part.training for name, part in net.named_modules()} == modes
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert list(after) == list(tensors)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    for layer in (net.first[1], net.second, net.third, net.torch_sync):
        assert type(layer) is pydist.SyncBatchNorm
        assert layer.process_group is None
    assert net.again[0] is net.first[1] is net.same
    assert type(net.instance) is nn.InstanceNorm2d
    assert (net.first[1].eps, net.second.momentum, net.second.affine) == (1e-3, None, False)
    assert net.second.qconfig == "kept"
    net.second.eval()(torch.ones(2, 4))
    assert calls == ["hook"]
    handle.remove()
    net.second(torch.ones(2, 4))
    assert calls == ["hook"]
    assert repr(net.second).startswith("SyncBatchNorm(4, eps=1e-05, momentum=None, affine=False")


def test_conversion_of_a_layer_itself() -> None:
    layer = nn.BatchNorm2d(3).eval()
    converted = pydist.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert type(converted) is pydist.SyncBatchNorm
    assert converted.weight is layer.weight
    assert not converted.training
    assert type(layer) is nn.BatchNorm2d


class Plain(nn.BatchNorm2d):
    """A subclass that computes as its base does."""


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def parametrized() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def patched() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda input: input  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.LazyBatchNorm2d(), r"^inner.1 \(LazyBatchNorm2d\) has no shape yet"),
        (lambda: Activated(3), r"^inner.1 \(Activated\) has a forward of its own"),
        (patched, r"^inner.1 \(BatchNorm2d\) has a forward of its own"),
        (parametrized, r"^inner.1 \(ParametrizedBatchNorm2d\) is parametrized"),
    ],
    ids=["lazy", "own forward", "patched", "parametrized"],
)
def test_conversion_refuses(make: Callable[[], nn.Module], why: str) -> None:
    net = nn.Sequential()
    net.add_module("inner", nn.Sequential(nn.BatchNorm2d(3), make()))
    with pytest.raises(pydist.InvalidUsage, match=why):
        pydist.SyncBatchNorm.convert_sync_batchnorm(net)
    assert type(net.inner[0]) is nn.BatchNorm2d


def test_conversion_of_a_plain_subclass() -> None:
    net = pydist.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(Plain(3)))
    assert type(net[0]) is pydist.SyncBatchNorm


def convert_with_groups() -> None:
    rank, size = joined()
    both = [pydist.new_group([0, 1]), pydist.new_group(range(2, size))]
    group = both[0] if rank < 2 else both[1]
    other = pydist.new_group([rank])
    net = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3, process_group=other))
    pydist.SyncBatchNorm.convert_sync_batchnorm(net)
    assert [layer.process_group for layer in net] == [None, other]
    pydist.SyncBatchNorm.convert_sync_batchnorm(net, group)
    assert [layer.process_group for layer in net] == [group, group]
    pydist.SyncBatchNorm.convert_sync_batchnorm(net)
    assert [layer.process_group for layer in net] == [group, group]


def test_conversion_and_groups(run: Runner) -> None:
    run(convert_with_groups)


def copies_and_states() -> None:
    rank, size = joined()
    inputs = batches(size, 3, 4, 2)
    layer = pydist.SyncBatchNorm(3, dtype=torch.float64)
    scrambled(layer)
    layer(inputs[rank])  # with a communicator, which no copy may try to take along
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for twin in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(saved, weights_only=False),
    ):
        assert type(twin) is pydist.SyncBatchNorm
        assert twin.state_dict().keys() == layer.state_dict().keys()
        assert twin.weight is not layer.weight
        assert twin.running_mean is not layer.running_mean
        assert torch.equal(twin(inputs[rank]), copy.deepcopy(layer)(inputs[rank]))
    plain = nn.BatchNorm2d(3, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    back = pydist.SyncBatchNorm(3, dtype=torch.float64)
    back.load_state_dict(plain.state_dict())
    for name, value in layer.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)
        assert torch.equal(back.state_dict()[name], value)
    assert_near(plain.eval()(inputs[0]), layer.eval()(inputs[0]))


def test_copies_and_states(run: Runner) -> None:
    run(copies_and_states)
