"""Tools of torch's that reach a module by its names: through the wrapper as through the module."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from training import (
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


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def substitute(make: str) -> tuple[float, int]:
    """The gradient of substitutes in a first forward, and of how many parameters ours are."""
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    nn.Linear(2, 2)  # a module of somebody's else
    weight = model.weight.detach().clone().requires_grad_()
    values = {"weight": weight if make == "leaf" else 2 * weight}
    functional_call(model, values, (torch.full((1, 2), 1.0 + rank).double(),)).sum().backward()
    assert weight.grad is not None
    known = len(list(model.parameters()))
    model(torch.ones(1, 2).double()).sum().backward()
    return float(weight.grad[0, 0]), known


@pytest.mark.parametrize("make", ["leaf", "computed"])
def test_substitutes_are_the_programs_own(run: Runner, make: str) -> None:
    """As with torch's wrapper: they are no parameters of the module's."""
    factor = 1.0 if make == "leaf" else 2.0
    assert run(substitute, make) == [(factor, 1), (2 * factor, 1), (3 * factor, 1)]


def mean_output(net: nn.Module, rank: int, step: int) -> Tensor:
    out: Tensor = net(batch(rank, 5, 4, step=step))
    return out.sin().mean()


# --- torch.func ----------------------------------------------------------------------------------


def call_functionally() -> None:
    joined()
    reference = make_net()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        # The parameters' own tensors, and values computed from them.
        values = {
            name: p if name.endswith("bias") else 2 * p.tanh() for name, p in net.named_parameters()
        }
        out: Tensor = functional_call(net, values, (batch(rank, 5, 4, step=step),))
        return out.sin().mean()

    train_like_reference(model, reference, loss)


def test_functional_call(run: Runner) -> None:
    run(call_functionally)


def take_gradients_per_sample() -> None:
    rank, size = joined()
    module = make_net()
    model = pydist.DataParallel(module)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(model, values, (x.unsqueeze(0),))
        return out.sin().sum()

    xs = batch(rank, 5, 4)
    per_sample = vmap(grad(loss), in_dims=(None, 0))(values, xs)
    for index, x in enumerate(xs):
        gradients = torch.autograd.grad(module(x).sin().sum(), list(module.parameters()))
        for (name, ours), theirs in zip(per_sample.items(), gradients, strict=True):
            assert_near(ours[index], theirs, 1e-12)
            assert module.get_parameter(name).grad is None
    assert model.stats().rounds == 0
    # The next backward knows nothing of it.
    model(xs).sin().mean().backward()
    everyone = torch.cat([batch(r, 5, 4) for r in range(size)])
    expected = torch.autograd.grad(module(everyone).sin().mean(), list(module.parameters()))
    for parameter, theirs in zip(module.parameters(), expected, strict=True):
        assert_near(parameter.grad, theirs)


def test_gradients_per_sample(run: Runner) -> None:
    run(take_gradients_per_sample)


def differentiate_within() -> None:
    joined()
    reference = make_net()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        x = batch(rank, 5, 4, step=step)
        slopes = vmap(grad(lambda row: net(row).sum()))(x)
        curvature = torch.func.jacrev(lambda rows: net(rows).sum(0))(x)
        out: Tensor = slopes.square().mean() + curvature.sin().mean()
        return out

    train_like_reference(model, reference, loss)


def test_derivatives_of_inputs_in_the_loss(run: Runner) -> None:
    run(differentiate_within)


# --- torch.nn.utils ------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def parametrized_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    weight_norm(net[0])
    orthogonal(net[1])
    spectral_norm(net[2])  # has buffers, and changes them in every forward
    parametrize.register_parametrization(net[3], "weight", Symmetric())
    return net


def train_parametrized() -> None:
    joined()
    reference = parametrized_net()
    model = pydist.DataParallel(copy.deepcopy(reference))
    assert "0.parametrizations.weight.original0" in dict(model.named_parameters())
    with parametrize.cached():
        weight: Any = model.get_submodule("3").weight
        assert torch.equal(weight, weight.mT)
    # The orthogonal parametrization is a matrix exponential: rounding grows.
    train_like_reference(model, reference, mean_output, tolerance=1e-9)


def test_parametrizations(run: Runner) -> None:
    run(train_parametrized)


def train_with_old_weight_norm() -> None:
    joined()
    reference = make_net()
    module = make_net()
    for net in (reference, module):
        torch.nn.utils.weight_norm(net[0])  # a forward hook that sets a plain attribute
    train_like_reference(pydist.DataParallel(module), reference, mean_output)


def test_weight_norm_of_the_old_kind(run: Runner) -> None:
    run(train_with_old_weight_norm)


def flatten_parameters() -> None:
    rank, size = joined()
    reference = make_net()
    model = pydist.DataParallel(copy.deepcopy(reference))
    assert torch.equal(
        parameters_to_vector(model.parameters()), parameters_to_vector(reference.parameters())
    )
    vector = torch.linspace(-1, 1, sum(p.numel() for p in model.parameters())).double()
    for net in (model, reference):
        # Sets `parameter.data`: other memory, the same tensors.
        vector_to_parameters(vector, net.parameters())
    train_like_reference(model, reference, mean_output)
    # Clipping by the norm of all gradients is the same decision everywhere.
    for net in (model, reference):
        net.zero_grad()
    mean_output(model, rank, 9).backward()
    for r in range(size):
        (mean_output(reference, r, 9) / size).backward()
    norms = [torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3) for net in (model, reference)]
    assert_near(norms[0], norms[1])
    assert_like_reference(model, reference)


def test_parameters_as_a_vector(run: Runner) -> None:
    run(flatten_parameters)


# --- averages of the weights ---------------------------------------------------------------------


def average_weights() -> None:
    rank, _ = joined()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = pydist.DataParallel(copy.deepcopy(reference))
    make: dict[str, Any] = {
        "mean": lambda net: AveragedModel(net),
        "moving": lambda net: AveragedModel(
            net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
        ),
    }
    ours = {name: function(model) for name, function in make.items()}
    theirs = {name: function(reference) for name, function in make.items()}
    for step in range(3):
        train_like_reference(model, reference, mean_output, steps=[step])
        for name in make:
            ours[name].update_parameters(model)
            theirs[name].update_parameters(reference)
            assert list(ours[name].state_dict()) == list(theirs[name].state_dict())
            for a, b in zip(
                ours[name].state_dict().values(), theirs[name].state_dict().values(), strict=True
            ):
                assert_near(a, b)
    # An average that does not train may be used on one rank.
    if rank == 0:
        for average in (ours["mean"], theirs["mean"]):
            update_bn([batch(r, 5, 4) for r in range(2)], average)
        with torch.no_grad():
            assert_near(ours["mean"](batch(0, 5, 4)), theirs["mean"](batch(0, 5, 4)))
    train_like_reference(model, reference, mean_output, steps=[9])


def test_averaged_models(run: Runner) -> None:
    run(average_weights)


# --- torch.distributed.checkpoint ----------------------------------------------------------------


def save_and_load_distributed_state() -> None:
    joined()
    reference = make_net()
    model = pydist.DataParallel(copy.deepcopy(reference))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mean_output(model, 0, 0).backward()
    optimizer.step()
    state = get_model_state_dict(model)
    assert list(state) == list(reference.state_dict())
    both = copy.deepcopy(get_state_dict(model, optimizer))
    assert "0.weight" in both[1]["state"]
    saved: dict[str, Any] = copy.deepcopy(state)

    missing, unexpected = set_model_state_dict(model, reference.state_dict())
    assert not missing
    assert not unexpected
    assert_like_reference(model, reference, gradients=False)
    other = torch.optim.AdamW(model.parameters(), lr=0.5)
    set_state_dict(model, other, model_state_dict=both[0], optim_state_dict=both[1])
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name])
    assert other.param_groups[0]["lr"] == 0.1
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    # Rank 0 alone is given everything.
    assert list(whole) == (list(saved) if pydist.rank() == 0 else [])
    reference.load_state_dict(saved)
    train_like_reference(model, reference, mean_output)


def test_distributed_checkpoint_state(run: Runner) -> None:
    run(save_and_load_distributed_state)
