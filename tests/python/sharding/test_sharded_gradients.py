"""What `pydist.ShardedOptimizer` steps with: accumulated, clipped, scaled, put by hand, or none."""

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Runner, batch, joined
from twins import TIME_LIMIT, Pausing, Twins, assert_same, is_exact, small_model

import pydist

pytestmark = TIME_LIMIT


def accumulate(stage: int) -> None:
    """Under no_sync(), with and without zeros before; weights; an extra backward on averages."""
    twins = Twins(small_model(torch.float64), torch.optim.SGD, options={"lr": 0.1}, stage=stage)

    def act(model: Any, optimizer: Any) -> None:
        for number in range(3):
            for micro in range(3):
                with model.no_sync(enabled=micro < 2):
                    x = batch(twins.rank, 4, 10, step=10 * number + micro)
                    model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 1)
        for number in range(2):  # on top of what was averaged already
            model(batch(twins.rank, 4, 10, step=40 + number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with model.weighted(twins.rank + 1):
            model(batch(twins.rank, 4, 10, step=50)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with model.no_sync():
            model(batch(twins.rank, 4, 10, step=51)).square().mean().backward()
        model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()

    twins.each(act)
    twins.check("accumulated", exact=False)
    model, optimizer = twins.models[0], twins.ours
    with model.no_sync():
        model(batch(twins.rank, 4, 10)).sum().backward()
    with pytest.raises(pydist.InvalidUsage, match=r"never averaged.*mend the program"):
        optimizer.step()
    model.sync_gradients()
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulation(run_sharded: Runner, stage: int) -> None:
    run_sharded(accumulate, stage)


def accumulate_on_averages(stage: int) -> None:
    """Gradients that came when their bucket had no memory, which it has when the next ones come."""
    twins = Twins(Pausing(), torch.optim.SGD, cap_mb=0.0005, options={"lr": 0.1}, stage=stage)
    assert len(twins.models[0].plan.buckets) >= 8
    earlier, skipped = batch(twins.rank, 4, 10, step=1), (0, 2, 5)

    def act(model: Any, optimizer: Any) -> list[Tensor]:
        optimizer.zero_grad()
        model(earlier, 0.0).backward()
        for last in ((), skipped):  # each on top of what is there
            with model.no_sync():
                model(batch(twins.rank, 4, 10, step=2), 0.0).backward()
                model(batch(twins.rank, 4, 10, step=3), 0.0, skipped[1:]).backward()
            model(batch(twins.rank, 4, 10, step=4), 0.05, last).backward()
        own = optimizer is twins.ours
        gradients = [
            optimizer.gradient_of(p) if own else p.grad.clone() for p in model.parameters()
        ]
        optimizer.step()
        return gradients

    for step in range(2):
        names = [name for name, _ in twins.models[0].named_parameters()]
        for name, ours, theirs in zip(names, *twins.each(act), strict=True):
            assert_same(ours, theirs, f"gradient of {name} in step {step}", exact=False)
    twins.check("accumulated on averages", exact=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulation_on_averages(run_sharded: Runner, stage: int) -> None:
    run_sharded(accumulate_on_averages, stage)


def replace_between(stage: int) -> None:
    """What is accumulated on an average, and replaced, has lost sight of it."""
    rank, _ = joined()
    for layer in (0, 7):  # one whose bucket has no memory in stage 2, one whose has
        model = pydist.DataParallel(Pausing(), bucket_cap_mb=0.0005)
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        match = rf"layers\.{layer}\.weight was changed between backward passes"
        for refuses in (model, optimizer):
            optimizer.zero_grad()
            model(batch(rank, 4, 10, step=1), 0.0).backward()
            with model.no_sync():
                model(batch(rank, 4, 10, step=2), 0.0).backward()
            weight = model.module.layers[layer].weight
            assert weight.grad is not None
            weight.grad = weight.grad * 0.5
            if refuses is model:
                with pytest.raises(pydist.InvalidUsage, match=match):
                    model(batch(rank, 4, 10, step=3), 0.05).backward()
            else:
                pydist.barrier()
                with pytest.raises(pydist.InvalidUsage, match="never averaged"):
                    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_were_replaced_in_between(run_sharded: Runner, stage: int) -> None:
    run_sharded(replace_between, stage)


def add_to_gradients_put_by_hand(stage: int, reduction: str) -> None:
    """They are a part of what the next backward averages, wherever they lie, used or not."""
    twins = Twins(
        Pausing(),
        torch.optim.SGD,
        cap_mb=0.0005,
        options={"lr": 0.1},
        wrapping={"reduction": reduction},
        stage=stage,
    )
    skipped = (1, 4, 7)

    def act(model: Any, optimizer: Any) -> list[Tensor]:
        gradients = []
        for accumulates in (False, True):
            for weight in (None, twins.rank + 1.0):
                optimizer.zero_grad()
                for number, parameter in enumerate(model.parameters()):
                    parameter.grad = batch(twins.rank, *parameter.shape, step=number)
                # Each alone would do; together they come to memory that others have had.
                with model.weighted(weight) if weight else contextlib.nullcontext():
                    with model.no_sync(enabled=accumulates):
                        model(batch(twins.rank, 4, 10, step=5), 0.0, skipped[:2]).backward()
                    if accumulates:
                        model(batch(twins.rank, 4, 10, step=6), 0.05, skipped).backward()
                own = optimizer is twins.ours
                gradients += [
                    optimizer.gradient_of(p) if own else p.grad.clone() for p in model.parameters()
                ]
                optimizer.step()
        return gradients

    ours, theirs = twins.each(act)
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(our, their, f"gradient {number}", exact=False)
    first = next(twins.models[1].parameters())
    for rank in range(twins.size):
        one = first.detach().clone()
        pydist.broadcast(one, root=rank)
        assert torch.equal(one, first), "and the ranks are the same"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_backward_on_gradients_put_by_hand(
    run_sharded: Runner, stage: int, reduction: str
) -> None:
    run_sharded(add_to_gradients_put_by_hand, stage, reduction)


def land_beside_a_launch(stage: int) -> None:
    """A bucket wants its memory while a gradient of another lands there, as threads of other
    devices bring it about; here, a backward within a hook does.
    """
    twins = Twins(Pausing(), torch.optim.SGD, cap_mb=0.0005, options={"lr": 0.1}, stage=stage)
    first, other = 7, 4  # layers, whose buckets, 0 and 3, have the same memory in stage 2
    places = [list(bucket.parameters) for bucket in twins.models[0].plan.buckets]
    for layer, bucket in ((first, 0), (other, 3)):
        assert places[bucket] == [f"layers.{layer}.bias", f"layers.{layer}.weight"]

    def act(model: Any, optimizer: Any) -> list[Tensor]:
        optimizer.zero_grad()
        layers = model.module.layers
        x = batch(twins.rank, 4, 10, step=1)
        inner = layers[first](x).square().mean()
        weight = layers[other].weight
        accumulation = weight.view_as(weight).grad_fn.next_functions[0][0]
        handle = accumulation.register_prehook(lambda _: inner.backward())
        layers[other](x).square().mean().backward()
        handle.remove()
        own = optimizer is twins.ours
        used = (*layers[first].parameters(), *layers[other].parameters())
        return [optimizer.gradient_of(p) if own else p.grad.clone() for p in used]

    for number, (ours, theirs) in enumerate(zip(*twins.each(act), strict=True)):
        assert_same(ours, theirs, f"gradient {number}", exact=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_launch_while_a_gradient_lands(run_sharded: Runner, stage: int) -> None:
    run_sharded(land_beside_a_launch, stage)


class Sometimes(nn.Module):
    """Each rank uses other branches in other steps."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 40, dtype=torch.float64) for _ in range(4))
        self.out = nn.Linear(40, 1, dtype=torch.float64)

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        hidden: Tensor = sum(self.branches[i](x).tanh() for i in which)
        out: Tensor = self.out(hidden)
        return out.square().mean()


def train_branches(stage: int) -> None:
    torch.manual_seed(2)
    twins = Twins(Sometimes(), torch.optim.Adam, cap_mb=0.002, stage=stage)
    for step in range(8):
        which = [[0, 1], [1], [2, 0], [3]][(step + twins.rank) % 4] if step < 6 else [0]

        def act(model: Any, optimizer: Any, which: list[int] = which, step: int = step) -> None:
            optimizer.zero_grad()
            model(batch(twins.rank, 4, 10, step=step), which).backward()
            optimizer.step()

        twins.each(act)
    twins.check("branches")

    # On top of what was averaged, also where this rank has no more of it.
    def add_up(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        for step in range(2):
            which = [[0, 1], [2]][(step + twins.rank) % 2]
            model(batch(twins.rank, 4, 10, step=step), which).backward()
        optimizer.step()

    twins.each(add_up)
    twins.check("branches that add up", exact=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_unused_parameters(run_sharded: Runner, stage: int) -> None:
    run_sharded(train_branches, stage)


def clip_and_scale(stage: int) -> None:
    """Stock calls see the whole gradient."""
    twins = Twins(small_model(torch.float64), torch.optim.SGD, options={"lr": 0.1}, stage=stage)
    for number, order in enumerate((2.0, 1.0, 3.5, float("inf"), 0.0)):
        for own_method in (False, True):

            def act(
                model: Any,
                optimizer: Any,
                number: int = number,
                own: bool = own_method,
                order: float = order,
            ) -> Tensor:
                optimizer.zero_grad()
                model(batch(twins.rank, 4, 10, step=number)).square().mean().backward()
                limit = 0.05 if order else 1e9
                if own and optimizer is twins.ours:
                    norm = optimizer.clip_grad_norm_(limit, order)
                else:
                    norm = torch.nn.utils.clip_grad_norm_(
                        model.parameters(), limit, order, foreach=bool(number % 2) or None
                    )
                optimizer.step()
                return norm

            torch.testing.assert_close(*twins.each(act), rtol=1e-12, atol=0)
    twins.check("clipped by norm", exact=False)

    def by_value(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch(twins.rank, 4, 10, step=9)).square().mean().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        for parameter in model.parameters():
            parameter.grad *= 0.5
            parameter.grad.div_(2.0)
            parameter.grad.data.clamp_(-2e-4, 2e-4)
            parameter.grad.data *= 0.5
            parameter.grad.detach().mul_(1.5)
        optimizer.step()

    twins.each(by_value)
    twins.check("clipped by value", exact=False)

    model, optimizer = twins.models[0], twins.ours
    first = next(model.parameters())
    assert first.grad is not None
    other = next(twins.models[1].parameters()).grad
    assert other is not None
    torch.testing.assert_close(optimizer.gradient_of(first), other)
    for norm in (
        first.grad.norm(),
        first.grad.data.norm(2),
        torch.norm(first.grad.detach(), 2),
        torch.linalg.norm(first.grad),
    ):
        torch.testing.assert_close(norm, other.norm())
    last = list(model.parameters())[-1].grad
    expected = list(twins.models[1].parameters())[-1].grad
    assert last is not None
    assert expected is not None
    torch.testing.assert_close(torch.linalg.norm(last, 1), torch.linalg.norm(expected, 1))
    with pytest.raises(pydist.InvalidUsage, match=r"linalg_norm of order 1 .* 0.weight"):
        torch.linalg.norm(first.grad, 1)
    with pytest.raises(pydist.InvalidUsage, match=r"along dimensions .* 0.weight"):
        torch.linalg.norm(first.grad, dim=0)
    assert "0.weight" in repr(first.grad) == str(first.grad) == f"{first.grad}"
    for misuse in (
        lambda gradient: gradient.sum(),
        lambda gradient: gradient.add_(gradient),
        lambda gradient: torch.stack([gradient]),
        lambda gradient: gradient[0],
        copy.deepcopy,
    ):
        with pytest.raises(pydist.InvalidUsage, match=r"0\.weight|numbers"):
            misuse(first.grad)
    with pytest.raises(pydist.InvalidUsage, match=r"^\.T of the gradient of 0\.weight"):
        _ = first.grad.T
    with pytest.raises(pydist.InvalidUsage, match=r"^setting \.data of the gradient of 0\.weight"):
        first.grad.data = torch.zeros_like(first)


def scale(stage: int) -> None:
    """A step that one rank's shard alone can't take is left out by all."""
    twins = Twins(small_model(), torch.optim.SGD, options={"lr": 0.1}, stage=stage)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    for step in range(6):
        twins.scaled_step(step, scalers, overflows_on=1)
        twins.check(f"step {step}", exact=False)
    assert scalers[0].get_scale() != 2.0**8


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_and_scaling(run_sharded: Runner, stage: int) -> None:
    run_sharded(clip_and_scale, stage)
    run_sharded(scale, stage)


class Kinds(nn.Module):
    """Parameters of each kind of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.randn(31, 7))
        self.short = nn.Parameter(torch.randn(50, dtype=torch.bfloat16))
        self.pairs = nn.Parameter(torch.randn(21, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = sum(p.abs().square().sum().float() for p in self.parameters())
        return x.sum() * total


def read_past_dispatch(stage: Any) -> None:
    """Nobody takes what stands for a gradient for one: there is NaN in it, and in no step."""
    rank, _ = joined()
    torch.manual_seed(1)
    model = pydist.DataParallel(Kinds())
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, stage=stage, lr=1e-4)
    for _ in range(2):
        model(batch(rank, 3, dtype=torch.float32)).backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of copies
                copied = torch.tensor(gradient)
            seen = torch.func.vmap(lambda row: row * 1)(gradient)
            assert copied.isnan().all(), name
            assert seen.isnan().all(), name
            with torch._C.DisableTorchFunctionSubclass():
                assert gradient.untyped_storage().nbytes() == gradient.itemsize
        optimizer.zero_grad(set_to_none=False)
        model(batch(rank, 3, dtype=torch.float32)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert norm.isfinite()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        whole = optimizer.gradient_of(parameter)
        assert whole is not None
        assert whole.isfinite().all(), name


@pytest.mark.parametrize("stage", [1, 2])
def test_stand_ins_past_dispatch_are_no_numbers(run_sharded: Runner, stage: int) -> None:
    run_sharded(read_past_dispatch, stage)


def synchronize_what_was_scaled(stage: int) -> None:
    """An average that was changed in place is one still."""
    twins = Twins(small_model(torch.float64), torch.optim.SGD, options={"lr": 0.1}, stage=stage)

    def act(model: Any, optimizer: Any) -> None:
        for number in range(2):
            optimizer.zero_grad()
            model(batch(twins.rank, 4, 10, step=number)).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
            model.sync_gradients()
            optimizer.step()

    twins.each(act)
    twins.check("scaled and synchronized", exact=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_sync_gradients_of_scaled_ones(run_sharded: Runner, stage: int) -> None:
    run_sharded(synchronize_what_was_scaled, stage)


def ask_for_what_some_have() -> None:
    """A gradient that some ranks have averaged and others hold for themselves."""
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(5, 1, dtype=torch.float64))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(rank, 4, 5)).sum().backward()
    if rank == 1:
        with model.no_sync():
            model(batch(rank, 4, 5)).sum().backward()
    for parameter in model.parameters():
        with pytest.raises(pydist.Mismatch, match="averaged, where rank 1 has one of its own; ask"):
            optimizer.gradient_of(parameter)
    model.sync_gradients()
    for parameter in model.parameters():
        whole = optimizer.gradient_of(parameter)
        assert whole is not None
        assert whole.shape == parameter.shape


def test_a_gradient_that_only_some_have_averaged(run_sharded: Runner) -> None:
    run_sharded(ask_for_what_some_have)


def put_gradients() -> None:
    """By hand, on one rank: it updates with its own gradient, or not at all."""
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(50, 50))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for synchronized in (True, False):
        for parameter in model.parameters():
            if synchronized or rank == 1:
                parameter.grad = torch.full_like(parameter, float(rank))
        if synchronized:
            model.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()
    kind = pydist.InvalidUsage if rank == 1 else pydist.Error
    match = r"by hand.*sync_gradients\(\)" if rank == 1 or is_exact() else "rank 1|by hand"
    with pytest.raises(kind, match=match):  # noqa: PT012
        optimizer.step()
        _ = model.weight + 1


def test_gradients_put_by_hand(run_sharded: Runner) -> None:
    run_sharded(put_gradients)
