"""The shapes that a backward can have: checkpoints, penalties, chosen leaves, several passes."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint
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


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = self.first if shared else nn.Linear(4, 4, dtype=torch.float64)
        self.last = nn.Linear(4, 1, dtype=torch.float64)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        x = checkpoint(self.first, x, use_reentrant=self.reentrant).tanh()
        x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return {"out": [self.last(x)]}


def train_checkpointed(reentrant: bool, shared: bool, cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(
        Checkpointed(reentrant=reentrant, shared=shared), bucket_cap_mb=cap_mb
    )
    reference = copy.deepcopy(model)
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        x = batch(rank, 5, 4, step=step).requires_grad_()
        model(x)["out"][0].mean().backward()
        assert model.stats().rounds == step + 1
        for r in range(size):
            x = batch(r, 5, 4, step=step).requires_grad_()
            (reference(x)["out"][0].mean() / size).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_activation_checkpointing(run_on_each: Runner, reentrant: bool, cap_mb: float) -> None:
    run_on_each(train_checkpointed, reentrant, False, cap_mb)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_weight_shared_by_checkpoints(run_on_each: Runner, reentrant: bool, cap_mb: float) -> None:
    # With reentrant ones its gradient comes in parts, and at first after its bucket was sent.
    run_on_each(train_checkpointed, reentrant, True, cap_mb)


def penalize_gradients() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = pydist.DataParallel(module)
    reference = copy.deepcopy(model)

    def loss(net: nn.Module, r: int) -> Tensor:
        x = batch(r, 5, 4).requires_grad_()
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + slope.square().sum()

    model_loss = loss(model, rank)
    assert model.stats().rounds == 0
    assert all(p.grad is None for p in model.parameters())
    model_loss.backward()
    assert model.stats().rounds == 1
    (torch.stack([loss(reference, r) for r in range(size)]).sum() / size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)
    # Gradients asked for by name are not averaged: those of autograd.grad never are.
    (alone,) = torch.autograd.grad(model(batch(rank, 5, 4)).mean(), [module[0].weight])
    (expected,) = torch.autograd.grad(module(batch(rank, 5, 4)).mean(), [module[0].weight])
    assert torch.equal(alone, expected)
    assert model.stats().rounds == 1


def test_autograd_grad_is_left_alone(run: Runner) -> None:
    run(penalize_gradients)


def go_backward_in_odd_ways() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(nn.Linear(4, 2, dtype=torch.float64))
    mean = torch.stack([batch(r, 5, 4).sum(0) for r in range(size)]).mean(0).expand(2, 4)
    # Twice through one graph.
    loss = model(batch(rank, 5, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_near(model.weight.grad, 2 * mean)
    # For chosen leaves.
    model.zero_grad()
    model(batch(rank, 5, 4)).sum().backward(inputs=[model.weight])
    assert_near(model.weight.grad, mean)
    assert model.bias.grad is None
    # An output changed in place.
    model.zero_grad()
    model(batch(rank, 5, 4)).mul_(2).sum().backward()
    assert_near(model.weight.grad, 2 * mean)


def test_odd_backwards(run_on_each: Runner) -> None:
    run_on_each(go_backward_in_odd_ways)


def drop_the_wrapper() -> None:
    rank, size = joined()
    module = nn.Linear(3, 1)
    pydist.DataParallel(module)(torch.full((1, 3), rank + 1.0)).sum().backward()
    mean = sum(range(1, size + 1)) / size
    assert torch.equal(module.weight.grad, torch.full((1, 3), mean))


def test_wrapper_may_go_before_backward(run: Runner) -> None:
    run(drop_the_wrapper)


# --- more checkpoints ----------------------------------------------------------------------------


class Nested(nn.Module):
    """Checkpoints within checkpoints, with dropout, whose state they restore."""

    def __init__(self, *, outer: bool, inner: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.drop = nn.Dropout(0.3)
        self.outer = outer
        self.inner = inner

    def pair(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layers[1], x, use_reentrant=self.inner).tanh()
        return self.drop(checkpoint(self.layers[2], x, use_reentrant=self.inner)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).tanh()
        x = checkpoint(self.pair, x, use_reentrant=self.outer)
        out: Tensor = self.layers[3](x)
        return out


def nested_loss(net: nn.Module, rank: int, step: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    out: Tensor = net(batch(rank, 5, 4, step=step))
    return out.sin().mean()


def train_nested(outer: bool, inner: bool) -> None:
    joined()
    torch.manual_seed(0)
    reference = Nested(outer=outer, inner=inner)
    train_like_reference(pydist.DataParallel(copy.deepcopy(reference)), reference, nested_loss)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_nested_checkpoints(run: Runner, outer: bool, inner: bool) -> None:
    run(train_nested, outer, inner)


def checkpoint_the_wrapper(reentrant: bool) -> None:
    """The wrapper's forward runs twice, the second time in backward."""
    joined()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        x = batch(rank, 5, 4, step=step).requires_grad_()
        out: Tensor = checkpoint(net, x, use_reentrant=reentrant)
        return out.sin().mean()

    train_like_reference(model, reference, loss)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_wrapper(run: Runner, reentrant: bool) -> None:
    run(checkpoint_the_wrapper, reentrant)


# --- several forwards, several backwards ---------------------------------------------------------


def net_of_three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def recur() -> None:
    """The output of one forward is the input of the next, and one forward is thrown away."""
    joined()
    reference = net_of_three()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        x = batch(rank, 5, 4, step=step)
        for _ in range(3):
            x = net(x)
        net(x)
        with torch.no_grad():
            net(x)
        return x.sin().mean()

    train_like_reference(model, reference, loss)


def test_several_forwards_before_a_backward(run: Runner) -> None:
    run(recur)


def go_back_through_parts() -> None:
    """Two losses with a common trunk, one backward each."""
    rank, size = joined()
    reference = net_of_three()
    model = pydist.DataParallel(copy.deepcopy(reference))
    for step in range(2):
        for net, ranks in ((model, [rank]), (reference, list(range(size)))):
            net.zero_grad()
            for r in ranks:
                out = net(batch(r, 5, 4, step=step))
                (out[:, 0].sin().mean() / len(ranks)).backward(retain_graph=True)
                # In between the mean has come; what follows is added to it.
                (out[:, 1].cos().mean() / len(ranks)).backward()
        assert_like_reference(model, reference)
        assert model.stats().rounds == 2 * (step + 1)


def test_two_losses_with_a_common_graph(run: Runner) -> None:
    run(go_back_through_parts)


def penalize_in_the_step(kind: str) -> None:
    joined()
    reference = net_of_three()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        x = batch(rank, 5, 4, step=step).requires_grad_()
        out: Tensor = net(x)
        of: list[Tensor] = [x] if kind == "inputs" else list(net.parameters())
        slopes = torch.autograd.grad(out.sin().sum(), of, create_graph=True)
        return out.mean() + sum(slope.square().sum() for slope in slopes)

    train_like_reference(model, reference, loss, tolerance=1e-11)


@pytest.mark.parametrize("kind", ["inputs", "parameters"])
def test_gradient_penalty(run: Runner, kind: str) -> None:
    run(penalize_in_the_step, kind)


class SolveInBackward(torch.autograd.Function):
    """Runs a backward of its own within backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.parameters = parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = layer(x).tanh()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.layer(x).tanh().backward(gradients[0])  # fills the parameters' gradients
        return x.grad, None, *(None for _ in ctx.parameters)


class Reversible(nn.Module):
    def __init__(self, *, names_parameters: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.names_parameters = names_parameters

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            parameters = list(layer.parameters()) if self.names_parameters else []
            x = SolveInBackward.apply(x, layer, *parameters)
        return x


def reversible_loss(net: nn.Module, rank: int, step: int) -> Tensor:
    out: Tensor = net(batch(rank, 5, 4, step=step).requires_grad_())
    return out.sin().mean()


def train_reversible(names_parameters: bool, cap_mb: float) -> None:
    joined()
    torch.manual_seed(0)
    reference = Reversible(names_parameters=names_parameters)
    model = pydist.DataParallel(copy.deepcopy(reference), bucket_cap_mb=cap_mb)
    train_like_reference(model, reference, reversible_loss)


@pytest.mark.parametrize("names_parameters", [False, True])
@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_a_function_that_goes_backward_itself(
    run: Runner, names_parameters: bool, cap_mb: float
) -> None:
    run(train_reversible, names_parameters, cap_mb)


@dataclass
class Outputs:
    logits: Tensor
    extras: Any


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 2, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> Outputs:
        outs = [head(x) for head in self.heads]
        return Outputs(outs[0], {"a": (outs[1], None), "b": [outs[2], {"c": outs[3]}, "text"]})


def train_structured() -> None:
    joined()
    torch.manual_seed(0)
    reference = Structured()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        outputs = net(batch(rank, 5, 4, step=step))
        parts = [outputs.extras["b"][1]["c"], outputs.extras["a"][0]]
        # A rank looks at some outputs only.
        return torch.stack([part.sin().mean() for part in parts[rank % 2 :]]).sum()

    train_like_reference(model, reference, loss)


def test_outputs_of_any_structure(run: Runner) -> None:
    run(train_structured)


class BackwardAtTheEnd(torch.autograd.Function):
    """Lets another backward run when this one ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Variable._execution_engine.queue_callback(ctx.then)
        return *grads, None


def go_backward_at_the_end_of_backward() -> None:
    rank, size = joined()
    outer = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    inner = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    x = torch.full((1, 2), rank + 1.0, dtype=torch.float64)
    mean = [[(size + 1) / 2] * 2]
    seen = []

    def then() -> None:
        with torch.enable_grad():
            inner(x).sum().backward()
        # It has returned, so it has averaged.
        seen.append(inner.weight.grad.tolist())

    for step in range(1, 3):
        outer.zero_grad()
        inner.zero_grad()
        outer(BackwardAtTheEnd.apply(x.clone().requires_grad_(), then)).sum().backward()
        assert seen == [mean] * step
        assert outer.weight.grad.tolist() == mean
        assert outer.stats().rounds == inner.stats().rounds == step


def test_a_backward_within_a_callback_at_the_end_of_another(run: Runner) -> None:
    run(go_backward_at_the_end_of_backward)
