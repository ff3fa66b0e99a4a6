"""Gradients that autograd computes where they travel from, and forecasts that are wrong.

Every suite of gradients runs with forecasts; here is what is about them alone.
"""

import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from beside_torch import STEPS, Found, Moody, beside_torch, gradients, inner, order_of, values_of
from launch import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import LIMIT_S, TIME_LIMIT, Runner, batch, joined

import pydist

pytestmark = TIME_LIMIT

# From this backward on, counted from 0, forecasts are made of a training that repeats itself.
FORESEEN_FROM = 2


def arrivals(model: nn.Module) -> dict[nn.Parameter, int]:
    """Where each gradient lies when it arrives, as of the last backward."""
    found: dict[nn.Parameter, int] = {}

    def note(parameter: nn.Parameter) -> Callable[[Tensor], None]:
        return lambda gradient: found.__setitem__(parameter, gradient.data_ptr())

    for parameter in model.parameters():
        parameter.register_hook(note(parameter))
    return found


def made_in_place(found: dict[nn.Parameter, int]) -> list[bool]:
    return [
        parameter.grad is not None and parameter.grad.data_ptr() == place != 0
        for parameter, place in found.items()
    ]


def require_gradients_of(reference: nn.Module, model: nn.Module) -> None:
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(
            own.grad.resolve_conj().resolve_neg(),
            expected.grad.resolve_conj().resolve_neg(),
            rtol=1e-11,
            atol=1e-13,
        )


class Kinds(nn.Module):
    """Layers whose gradients come about in different ways: views, sums, reductions, zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(11, 12)
        self.mix = nn.Linear(12, 12)  # used twice, so its gradients are added up
        self.norm = nn.LayerNorm(12)
        self.convolution = nn.Conv1d(12, 8, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.ones(0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.mix(self.words(tokens)).tanh())
        x = self.convolution(self.norm(x).transpose(1, 2))
        return (x * self.scale).sin().mean() + self.none.sum()


def make_all_in_place() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Kinds())
    found = arrivals(model)
    for step in range(6):
        model.zero_grad()
        model(torch.arange(rank, rank + 9)[None] % 11).backward()
        in_place = made_in_place(found)
        if step < FORESEEN_FROM:
            assert not any(in_place), step
        elif step == 5:  # plans have changed meanwhile
            # A bias of a Linear comes as an expanded or summed view that autograd may share.
            at_least = {"words.weight", "mix.weight", "norm.weight", "convolution.weight"}
            names = {p: n for n, p in inner(model).named_parameters()}
            there = {names[p] for p, is_there in zip(found, in_place, strict=True) if is_there}
            assert there >= at_least, there
    assert model.stats().copied_bytes == 0


def test_gradients_are_made_in_place(run_on_some: Runner) -> None:
    run_on_some(make_all_in_place)


def pass_no_views() -> None:
    """Views of buckets are not lent, so nothing is foreseen for them."""
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(8, 8), gradient_as_bucket_view=True)
    found = arrivals(model)
    for step in range(5):
        model.zero_grad()
        model(batch(rank, 4, 8, step=step).float()).sum().backward()
        assert not any(made_in_place(found))


def test_views_are_left_alone(run_on_some: Runner) -> None:
    run_on_some(pass_no_views)


class Complex(nn.Module):
    """The gradient comes with a bit set: its memory holds the conjugate, or the negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(6, 4, dtype=torch.complex128)) for _ in range(2)
        )
        self.weights[0].register_hook(lambda gradient: gradient.conj().data)
        self.weights[1].register_hook(lambda gradient: torch._neg_view(gradient).data)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.weights[0] * x + self.weights[1] * x).sin().mean()


def twist_gradients() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Complex())
    reference = Complex()
    for step in range(6):
        model.zero_grad()
        reference.zero_grad()
        shares = [
            torch.complex(batch(peer, 6, 4, step=step), batch(peer, 6, 4, step=step + 50))
            for peer in range(size)
        ]
        model(shares[rank]).backward()
        for share in shares:
            (reference(share) / size).backward()
        require_gradients_of(reference, model)


def test_conjugates_are_resolved(run_on_some: Runner) -> None:
    run_on_some(twist_gradients)


def keep_copies_once() -> None:
    """What hooks make and keep is not made in a home, where it would cost a copy in each step."""
    rank, _ = joined()
    model = pydist.DataParallel(Moody())
    kept: list[Tensor] = []
    is_keeping = False

    def keep(gradient: Tensor) -> None:
        if is_keeping:
            kept.append(gradient.clone())

    for parameter in model.parameters():
        parameter.register_hook(keep)
    for step in range(8):
        is_keeping = step == 5
        model.zero_grad()
        model(batch(rank, 5, 4, step=step)).backward()
    assert len(kept) == len(list(model.parameters()))
    assert model.stats().copied_bytes == 0


def test_what_hooks_make_is_not_made_in_place(run_on_some: Runner) -> None:
    run_on_some(keep_copies_once)


class Forking(Moody):
    """A child goes on with the backward, to the last layer's parameters."""

    forks: ClassVar[bool] = False
    parent: ClassVar[int] = 0
    child: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.last.parameters():
            parameter.register_hook(self.end_child)

    @staticmethod
    def fork(gradient: Tensor) -> Tensor | None:
        Forking.child = os.fork()
        return gradient * 7 if Forking.child == 0 else None

    @staticmethod
    def end_child(_gradient: Tensor) -> None:
        if os.getpid() != Forking.parent:
            os._exit(0)
        if Forking.child != 0:  # it has computed all that this process has
            assert os.waitpid(Forking.child, 0)[1] == 0
            Forking.child = 0

    def forward(self, x: Tensor, order: Any = (0, 1, 2, 3)) -> Tensor:
        x = self.trunk(x).tanh()
        for number in order:
            x = self.branches[number](x).tanh()
        out: Tensor = self.last(x).sin()
        if self.forks and out.requires_grad:
            out.register_hook(self.fork)
        return out.mean()


def fork_amid_backward() -> None:
    """What the child computes does not go where the parent's gradients lie."""
    rank, size = joined()
    Forking.parent = os.getpid()
    model = pydist.DataParallel(Forking(), bucket_cap_mb=1e-6)
    reference = Moody()
    found = arrivals(model)
    for step in range(8):
        Forking.forks = step in (4, 6)
        model.zero_grad()
        reference.zero_grad()
        model(batch(rank, 5, 4, step=step)).backward()
        assert step < 3 or any(made_in_place(found))
        for peer in range(size):
            (reference(batch(peer, 5, 4, step=step)) / size).backward()
        require_gradients_of(reference, model)


def test_a_child_that_is_forked_amid_backward(run_on_some: Runner) -> None:
    run_on_some(fork_amid_backward)


def keep_what_arrives(way: str) -> None:
    """A hook keeps gradients as they arrive: those of this rank, whatever the average becomes."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "itself": lambda gradient: gradient,
        "detached": lambda gradient: gradient.detach(),
        "part": lambda gradient: gradient.view(-1)[-1:],
    }

    def program(model: Any, rank: int, _size: int) -> Found:
        is_ours = isinstance(model, pydist.DataParallel)
        kept: list[tuple[Tensor, Tensor]] = []
        is_keeping = False

        def keep(gradient: Tensor) -> None:
            if is_keeping:
                held = ways[way](gradient)
                kept.append((held, held.clone()))

        for parameter in inner(model).parameters():
            parameter.register_hook(keep)
        found: Found = []
        for step in range(STEPS):
            is_keeping = step in (3, 4, 7)
            model.zero_grad()
            model(batch(rank, 5, 4, step=step)).backward()
            found.append(values_of(gradients(model)))
            # Torch's DDP shows the average in what shares memory with a gradient that it took over.
            for held, value in kept if is_ours or way == "itself" else ():
                assert torch.equal(held, value)
        return found

    beside_torch(program, Moody())


@pytest.mark.parametrize("way", ["itself", "detached", "part"])
def test_what_a_hook_keeps_does_not_change(run_on_some: Runner, way: str) -> None:
    run_on_some(keep_what_arrives, way)


class WithRetained(Moody):
    """Some forwards have more activations than others, as large as a weight; all can be kept."""

    more: ClassVar[int] = 0
    activations: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor, order: Any = (0, 1, 2, 3)) -> Tensor:
        x = self.trunk(x).tanh()
        self.activations.clear()
        for number in order:
            x = self.branches[number](x).tanh()
            for _ in range(self.more):
                x = x.sin()
                if x.requires_grad:
                    x.retain_grad()
                    self.activations.append(x)
        out: Tensor = self.last(x)
        return out.sin().mean()


def leave_other_tensors() -> None:
    """Blocks that were foreseen as gradients become something else, which the program keeps."""

    def program(model: Any, rank: int, _size: int) -> Found:
        found: Found = []
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(3 * STEPS):
            WithRetained.more = (0, 0, 0, 1, 0, 2, 0, 0, 3)[step % 9]
            model.zero_grad()
            model(batch(rank, 6, 4, step=step), order_of(step // 3)).backward()
            found.append(values_of(gradients(model)))
            for activation in WithRetained.activations:
                assert activation.grad is not None
                kept.append((activation.grad, activation.grad.clone()))
            for value, expected in kept:
                assert torch.equal(value, expected)
            found.append(values_of([value for value, _ in kept]))
            if step % 4 == 3:
                del kept[::2]
        return found

    beside_torch(program, WithRetained())


def test_a_wrong_forecast_changes_nothing(run_on_some: Runner) -> None:
    run_on_some(leave_other_tensors)


def mix_kinds_of_backwards() -> None:
    """autograd.grad(), differentiable gradients and accumulation."""

    def program(model: Any, rank: int, _size: int) -> Found:
        module = inner(model)
        found: Found = []
        for step in range(2 * STEPS):
            x = batch(rank, 5, 4, step=step)
            model.zero_grad()
            if step % 5 == 3:
                found += values_of(torch.autograd.grad(module(x), list(module.parameters())))
            if step % 5 == 4:
                weight = module.trunk.weight
                (slope,) = torch.autograd.grad(module(x), weight, create_graph=True)
                found += values_of([torch.autograd.grad(slope.pow(2).sum(), weight)[0]])
            if step % 7 == 5:
                with model.no_sync():
                    model(x).backward()
            model(x).backward()
            found.append(values_of(gradients(model)))
        return found

    beside_torch(program, Moody())


def test_other_kinds_of_backwards_come_between(run_on_some: Runner) -> None:
    run_on_some(mix_kinds_of_backwards)


class Checkpointed(Moody):
    def forward(self, x: Tensor, order: Any = (0, 1, 2, 3)) -> Tensor:
        x = self.trunk(x).tanh()
        for number in order:
            x = checkpoint(self.branches[number], x, use_reentrant=False).tanh()
        out: Tensor = self.last(x)
        return out.sin().mean()


def train_checkpointed() -> None:
    def program(model: Any, rank: int, _size: int) -> Found:
        found: Found = []
        for step in range(STEPS):
            model.zero_grad()
            model(batch(rank, 5, 4, step=step), order_of(step)).backward()
            found.append(values_of(gradients(model)))
        return found

    beside_torch(program, Checkpointed())


def test_checkpoints_compute_within_backward(run_on_some: Runner) -> None:
    run_on_some(train_checkpointed)


def raise_amid_backward() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Moody())
    raises = False

    def hook(gradient: Tensor) -> None:
        if raises:
            raise KeyError("a hook of the program")

    model.module.branches[1].weight.register_hook(hook)
    reference = Moody()
    for step in range(8):
        raises = step in (3, 6)
        model.zero_grad()
        reference.zero_grad()
        if raises:
            with pytest.raises((KeyError, pydist.Error)):
                model(batch(rank, 5, 4, step=step)).backward()
            continue
        model(batch(rank, 5, 4, step=step)).backward()
        for peer in range(size):
            (reference(batch(peer, 5, 4, step=step)) / size).backward()
        require_gradients_of(reference, model)


def test_backwards_that_raise_come_between(run_on_some: Runner) -> None:
    run_on_some(raise_amid_backward)


def use_several_threads_and_models() -> None:
    """Backwards of one model on threads in turn, each through a second model as well."""

    def program(model: Any, rank: int, _size: int) -> Found:
        found: Found = []

        def step(number: int) -> None:
            model.zero_grad()
            model(batch(rank, 5, 4, step=number)).backward()
            found.append(values_of(gradients(model)))
            torch.ones(6, 6, dtype=torch.float64)  # on the thread of a backward that is over

        for number in range(STEPS):
            thread = threading.Thread(target=step, args=(number,))
            thread.start()
            thread.join()
        return found

    beside_torch(program, Moody())
    rank, size = joined()
    pair = [pydist.DataParallel(Moody()) for _ in range(2)]
    reference = [Moody() for _ in range(2)]
    for number in range(6):
        for each in (*pair, *reference):
            each.zero_grad()
        x = batch(rank, 5, 4, step=number)
        (pair[0](x) * pair[1](x)).backward()
        for peer in range(size):
            x = batch(peer, 5, 4, step=number)
            (reference[0](x) * reference[1](x) / size).backward()
        for own, expected in zip(pair, reference, strict=True):
            require_gradients_of(expected, own)


def test_threads_and_models_take_turns(run_on_some: Runner) -> None:
    run_on_some(use_several_threads_and_models)


def come_and_go_with_shared_allocations() -> None:
    """The allocator serves both, whoever comes and goes first."""
    rank, _ = joined()

    def train(model: Any, steps: int) -> None:
        for step in range(steps):
            model.zero_grad()
            model(batch(rank, 5, 4, step=step)).backward()

    model = pydist.DataParallel(Moody())
    found = arrivals(model)
    train(model, 4)
    assert any(made_in_place(found))
    with pydist.share_allocations(64 << 20):
        train(model, 4)
        assert any(made_in_place(found))
        kept = torch.full((1 << 16,), 5.0)
        del model
        found.clear()
        other = pydist.DataParallel(Moody())
        train(other, 2)
    again = arrivals(other)
    train(other, 4)
    assert any(made_in_place(again))
    assert kept.eq(5).all()
    gradient = other.module.last.weight.grad
    assert gradient is not None
    values = gradient.clone()
    del other
    again.clear()
    assert torch.equal(gradient, values)
    pydist.barrier()


@pytest.mark.parametrize("count", [1, 2])
def test_shared_allocations_come_and_go(count: int) -> None:
    run_ranks(
        come_and_go_with_shared_allocations,
        count,
        env={"PYDIST_BACKEND": "native"},
        timeout=LIMIT_S,
    )
