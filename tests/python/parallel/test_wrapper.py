"""The wrapper stands for the module: names, attributes, copies; and it lets go of it."""

import copy
import io
import pickle
from collections import OrderedDict
from typing import Any, cast

import pytest
import torch
from launch import NO_LAUNCHER, run_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    assert_like_reference,
    assert_near,
    batch,
    joined,
    train_like_reference,
)

import pydist

pytestmark = TIME_LIMIT


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.top = nn.Parameter(torch.ones(2))
        self.hidden = 7

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)) * self.top

    def double_hidden(self) -> int:
        return 2 * self.hidden


def stand_for_the_module() -> None:
    rank, _ = joined()
    torch.manual_seed(0)
    module = Named()
    names = [name for name, _ in module.named_parameters()]
    model = pydist.DataParallel(module)

    assert model.module is module
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_modules()] == ["", "fc", "norm"]
    assert list(model.state_dict()) == list(module.state_dict())
    assert model.fc is module.fc
    assert model.double_hidden() == 14
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing
    assert "backend=" in repr(model)

    changed = OrderedDict((k, v + 1) for k, v in module.state_dict().items())
    before = OrderedDict((k, v.clone()) for k, v in module.state_dict().items())
    for form in (changed, OrderedDict((f"module.{k}", v) for k, v in before.items())):
        assert not model.load_state_dict(form).missing_keys
        for (name, value), expected in zip(model.state_dict().items(), form.values(), strict=True):
            assert torch.equal(value, expected), name
    # What torch's own wrapper and what a plain module save.
    model.load_state_dict(torch.nn.parallel.DataParallel(module).state_dict())
    module.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="unexpected"):
        model.load_state_dict({"unexpected": torch.ones(1)})
    with pytest.raises(pydist.InvalidUsage, match="assign"):
        model.load_state_dict(before, assign=True)

    # A module that has a child of that name keeps its prefix.
    nested = nn.Module()
    nested.module = nn.Linear(2, 2)
    wrapped = pydist.DataParallel(nested)
    wrapped.load_state_dict(nested.state_dict())
    wrapped.load_state_dict(OrderedDict((f"module.{k}", v) for k, v in nested.state_dict().items()))

    parent = nn.ModuleDict({"net": model})
    assert "net.fc.weight" in parent.state_dict()
    parent.load_state_dict(parent.state_dict())

    x = batch(rank, 4, 2, dtype=torch.float32)
    shifted = {name: p.detach() + 1 for name, p in model.named_parameters()}
    ours = torch.func.functional_call(model.eval(), shifted, (x,))
    theirs = torch.func.functional_call(module, shifted, (x,))
    assert torch.equal(ours, theirs)
    assert [name for name, _ in model.named_parameters()] == names

    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    assert {f"module.{name}" for name in model.state_dict()} | {"n_averaged"} == set(
        averaged.state_dict()
    )
    model.train()
    assert module.norm.training
    model(x).sum().backward()
    averaged.update_parameters(model)

    assert type(copy.deepcopy(model).module) is Named
    assert type(pickle.loads(pickle.dumps(model))) is Named
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Named


def test_names_and_copies(run: Runner) -> None:
    run(stand_for_the_module)


def let_go() -> None:
    rank, size = joined()
    module = nn.Linear(2, 1)
    for _ in range(3):
        model = pydist.DataParallel(module)
        module.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
        assert_near(module.weight.grad, torch.full((1, 2), (size - 1) / 2), 1e-6)
        stats = model.stats()
        assert stats.rounds == 1
        assert stats.bytes > 0
        assert stats.exposed_s > 0
        model.reset_stats()
        assert model.stats().rounds == 0
        del model
    # The last wrapper is gone, and its hooks are.
    module.zero_grad()
    module(torch.full((1, 2), float(rank))).sum().backward()
    assert_near(module.weight.grad, torch.full((1, 2), float(rank)), 1e-6)


def test_wrapper_lets_go_of_the_module(run: Runner) -> None:
    run(let_go)


def move_a_packed_sequence() -> None:
    joined()

    class Kept(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            kept.append(value)
            return torch.zeros(1)

    kept: list[Any] = []
    model = pydist.DataParallel(Kept(2, 2))
    model._input_device = torch.device("meta")
    model(nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]))
    assert kept[0].data.device.type == "meta"
    assert kept[0].batch_sizes.tolist() == [2, 1, 1]


def test_packed_sequences_move_whole(run: Runner) -> None:
    run(move_a_packed_sequence)


def average_in_a_subgroup() -> None:
    rank, size = joined()
    group = torch.distributed.new_group([0, size - 1])
    if rank not in (0, size - 1):
        return
    module = nn.Linear(2, 1)
    model = pydist.DataParallel(module, process_group=group)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert_near(module.weight.grad, torch.full((1, 2), (size - 1) / 2), 1e-6)


def test_process_group(run: Runner) -> None:
    run(average_in_a_subgroup)


def train_alone() -> None:
    model = pydist.DataParallel(nn.Linear(2, 1))
    model(torch.ones(4, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[4.0, 4.0]]
    pydist.shutdown()


def test_world_of_one_needs_no_launcher() -> None:
    run_ranks(train_alone, 1, timeout=LIMIT_S, env=NO_LAUNCHER)


# --- in the middle of training -------------------------------------------------------------------


def wave(net: nn.Module, rank: int, step: int) -> Tensor:
    out: Tensor = net(batch(rank, 5, 2, step=step))
    return out.sin().mean()


def copied(model: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return cast(nn.Module, copy.deepcopy(model).module)
    if how == "pickle":
        return cast(nn.Module, pickle.loads(pickle.dumps(model)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return cast(nn.Module, torch.load(file, weights_only=False))


def copy_while_training(how: str) -> None:
    rank, _ = joined()
    torch.manual_seed(0)
    reference = Named().double()
    model = pydist.DataParallel(copy.deepcopy(reference))
    train_like_reference(model, reference, wave)
    # Between backward and step, with gradients in place, and a graph that is alive.
    pending = wave(model, rank, 9)
    twin = copied(model, how)
    assert type(twin) is Named
    assert_like_reference(twin, model, gradients=False)
    # The copy is free of the wrapper: one rank can train it alone.
    if rank == 0:
        wave(twin, 0, 7).backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    pending.backward()
    # The original has not noticed, and the copy can be wrapped, from rank 0's values.
    again = pydist.DataParallel(twin)
    theirs = Named().double()
    theirs.load_state_dict({k: v.clone() for k, v in again.state_dict().items()})
    train_like_reference(again, theirs, wave)
    reference.load_state_dict(model.state_dict())
    train_like_reference(model, reference, wave)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_while_training(run: Runner, how: str) -> None:
    run(copy_while_training, how)


def hook_the_wrapper() -> None:
    joined()
    torch.manual_seed(0)
    reference = Named().double()
    model = pydist.DataParallel(copy.deepcopy(reference))
    seen: list[str] = []

    def hook(net: nn.Module) -> None:
        net.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        net.register_forward_hook(lambda _, args, out: out + args[0].sum())
        net.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 3,))
        net.register_full_backward_hook(lambda *_: seen.append("backward"))
        net.fc.register_forward_hook(lambda _m, _args, out: out * 0.5)
        net.fc.register_full_backward_hook(lambda *_: seen.append("fc"))

    hook(model)
    hook(reference)

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        seen.clear()
        out: Tensor = net(batch(rank, 5, 2, step=step).requires_grad_())
        return out.sin().mean()

    train_like_reference(model, reference, loss)
    assert seen == ["fc", "backward"]


def test_module_hooks(run: Runner) -> None:
    run(hook_the_wrapper)


def set_attributes() -> None:
    joined()
    module = Named()
    model = pydist.DataParallel(module)
    with pytest.warns(UserWarning, match="setting 'hidden' on a pydist"):
        model.hidden = 9
    assert model.hidden == 9
    assert model.double_hidden() == 18
    assert module.hidden == 9


def train_what_counts_forwards_itself() -> None:
    joined()
    module = Named()
    module._forwards = 7
    model = pydist.DataParallel(module)
    model(torch.ones(3, 2)).sum().backward()
    assert module._forwards == 7


def test_what_the_wrapper_has_is_its_own(run: Runner) -> None:
    run(train_what_counts_forwards_itself)


def test_setting_attributes(run: Runner) -> None:
    run(set_attributes)
