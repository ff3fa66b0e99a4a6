"""Wrapper and module are one: what goes through modules does to both what it does in torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim import swa_utils
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


class Net(nn.Module):
    """Reads its own mode and parameters, beside those of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=None)
        self.drop = nn.Dropout(0.5)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.fc(x))) * self.gain
        return functional.dropout(y, 0.5, self.training)


def for_each_child(act: Callable[[nn.Module], Any]) -> Callable[[Any], None]:
    def run(net: nn.Module) -> None:
        for child in net.children():
            act(child)

    return run


def for_each_named_child(net: nn.Module) -> None:
    def walk(part: nn.Module) -> None:
        for _, child in part.named_children():
            walk(child)
        part.training = False

    walk(net)


def for_each_module(net: nn.Module) -> None:
    for part in net.modules():
        part.training = False


def set_norms(part: nn.Module) -> None:
    if isinstance(part, nn.BatchNorm1d):
        part.eval()


def evaluate_then_train_on(net: nn.Module) -> None:
    was = net.training
    pydist.evaluate(
        net, [torch.ones(2, 4, dtype=torch.float64)], lambda model, x: {"out": model(x).mean(1)}
    )
    net.train(was)


def evaluate_with_frozen_norm(net: nn.Module) -> None:
    set_norms(net.module)  # type: ignore[arg-type]
    net.apply(set_norms)
    pydist.evaluate(
        net, [torch.ones(2, 4, dtype=torch.float64)], lambda model, x: {"out": model(x).mean(1)}
    )


def average_weights(net: nn.Module) -> None:
    averaged = swa_utils.AveragedModel(net)
    averaged.update_parameters(net)
    swa_utils.update_bn([torch.arange(8, dtype=torch.float64).view(2, 4)], net)


def average_after_evaluation(net: nn.Module) -> None:
    evaluate_then_train_on(net)
    average_weights(net)


def swap_mode_as_update_bn(net: nn.Module) -> None:
    pydist.evaluate(
        net, [torch.ones(2, 4, dtype=torch.float64)], lambda model, x: {"out": model(x).mean(1)}
    )
    with torch.no_grad():
        was_training = net.training
        net.eval()
        net.train(was_training)


def convert_norms(net: nn.Module) -> None:
    nn.SyncBatchNorm.convert_sync_batchnorm(net)


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "eval": lambda net: net.eval(),
    "train": lambda net: net.train(False).train(),
    "training": lambda net: setattr(net.module, "training", False),
    "modules": for_each_module,
    "children, eval": for_each_child(lambda child: child.eval()),
    "children, freeze": for_each_child(lambda child: child.requires_grad_(False)),
    "children, zero_grad": for_each_child(lambda child: child.zero_grad()),
    "children, double": for_each_child(lambda child: child.double()),
    "named_children": for_each_named_child,
    "apply": lambda net: net.apply(set_norms),
    "requires_grad_": lambda net: net.requires_grad_(False),
    "zero_grad": lambda net: net.zero_grad(),
    "zero_grad to zero": lambda net: net.zero_grad(set_to_none=False),
    "half": lambda net: net.half(),
    "double": lambda net: net.double(),
    "to": lambda net: net.to(torch.bfloat16),
    "type": lambda net: net.type(torch.float64),
    "clip_grad_norm_": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.01),
    "clip_grad_value_": lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.01),
    "vector_to_parameters": lambda net: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(net.parameters()) * 2, net.parameters()
    ),
    "get_submodule": lambda net: net.get_submodule("module.norm").eval(),
    "get_parameter": lambda net: net.get_parameter("module.fc.weight").data.fill_(1),
    "evaluate": evaluate_then_train_on,
    "evaluate, norm frozen": evaluate_with_frozen_norm,
    "evaluate, then update_bn": average_after_evaluation,
    "evaluate, then eval and train": swap_mode_as_update_bn,
    "AveragedModel and update_bn": average_weights,
    "parametrize a layer": lambda net: nn.utils.parametrizations.weight_norm(net.module.fc),
    "prune a layer": lambda net: prune.l1_unstructured(net.module.fc, "weight", 3),
    "register_buffer": lambda net: net.module.register_buffer("late", torch.ones(1)),
    "convert_sync_batchnorm": convert_norms,
}


def seen(module: nn.Module) -> dict[str, Any]:
    """What an action may have changed."""
    found: dict[str, Any] = {f"{n}.training": part.training for n, part in module.named_modules()}
    found |= {f"{n}.class": type(part).__name__ for n, part in module.named_modules()}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        found[name] = (
            parameter.requires_grad,
            parameter.dtype,
            gradient is None,
        )
    return found


def values(module: nn.Module) -> dict[str, Tensor]:
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    gradients = {
        f"gradient of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None
    }
    return {name: value.detach() for name, value in {**found, **gradients}.items()}


def act_on_both(name: str, is_training: bool) -> None:
    joined()
    torch.manual_seed(0)
    module = Net().double()
    found = []
    for wrap in (pydist.DataParallel, DistributedDataParallel):
        own = copy.deepcopy(module)
        net = wrap(own)
        # All ranks compute the same, so that it does not matter whose buffers count.
        torch.manual_seed(1)
        net(batch(0, 3, 4)).sum().backward()
        net.train(is_training)
        before = net.training
        ACTIONS[name](net)
        if "evaluate" in name:
            assert net.training == before
        found.append((seen(net.module), values(net.module)))
        if wrap is pydist.DataParallel:
            assert net.training == net.module.training
            for part, other in zip(net.modules(), net.module.modules(), strict=True):
                assert part is other
    (ours, our_values), (theirs, their_values) = found
    assert ours == theirs
    assert our_values.keys() == their_values.keys()
    for key, value in our_values.items():
        tolerance = 1e-12 if value.dtype == torch.float64 else 1e-2
        assert_near(value, their_values[key], tolerance)


@pytest.mark.parametrize("name", list(ACTIONS))
@pytest.mark.parametrize("is_training", [True, False])
def test_what_goes_through_modules_does_as_in_torch(
    three: Ranks, name: str, is_training: bool
) -> None:
    three.run(act_on_both, name, is_training, timeout=LIMIT_S)


def train_after_evaluating() -> None:
    """Batch norm and dropout are on again, for the wrapper and for what asks it."""
    rank, _ = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Net().double())
    for step in range(2):
        assert model.training
        mean = model.module.norm.running_mean.clone()
        torch.manual_seed(3)
        out = model(batch(rank, 6, 4, step=step))
        assert (out == 0).any()
        assert not torch.equal(mean, model.module.norm.running_mean)
        out.sum().backward()
        was = model.training
        pydist.evaluate(model, [batch(rank, 2, 4)], lambda m, x: {"out": m(x).mean(1)})
        model.train(was)
        swa_utils.update_bn([batch(rank, 6, 4)], model)


def test_training_goes_on_after_an_evaluation(run: Runner) -> None:
    run(train_after_evaluating)


def change_mode_through_a_parent() -> None:
    joined()
    model = pydist.DataParallel(Net())
    parent = nn.ModuleDict({"net": model})
    parent.eval()
    assert not model.training
    assert not model.module.drop.training
    parent.train()
    assert model.module.drop.training
    model.module.eval()
    assert not model.training
    # The wrapper has no mode of its own: torch's has, which changes nothing.
    model.training = True
    assert model.module.training
    # Names that are put together on the way down are those of the parameters.
    names = [f"{n}.{key}" for n, child in model.named_children() for key in child._parameters]
    names += model._parameters
    assert {name for name, _ in model.named_parameters()} <= set(names)
    assert_near(model.get_parameter("gain"), model.module.gain)


def test_a_parent_and_the_module_set_the_mode_of_both(run: Runner) -> None:
    run(change_mode_through_a_parent)
