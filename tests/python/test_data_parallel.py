"""DataParallel against training in one process on the whole batch, and where models get awkward.

Every rank computes the reference itself: the same model, on the batches of all ranks.
"""

import copy
import inspect
import io
import pickle
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from launch import Outcome, Ranks, run_command
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import pydist
from pydist.gradient_arena import plan_buckets

pytestmark = pytest.mark.timeout(30)

LIMIT_S = 25.0
Runner = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=["native", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, backend: str) -> Iterator[Ranks]:
    with Ranks(request.param, {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(backend: str) -> Iterator[Ranks]:
    with Ranks(3, {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run(three: Ranks) -> Runner:
    return lambda function, *args: three.run(function, *args, timeout=LIMIT_S)


def joined() -> tuple[int, int]:
    torch.set_num_threads(1)
    pydist.init()
    return pydist.rank(), pydist.world_size()


def assert_near(ours: Tensor | None, theirs: Tensor | None, tolerance: float = 1e-12) -> None:
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def batch(rank: int, *shape: int, step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# -- the plan


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(0, 50)
        ),
        max_size=30,
    ),
    st.integers(1, 120),
)
def test_plan_holds_every_parameter_once(
    sizes: list[tuple[torch.dtype, int]], cap_bytes: int
) -> None:
    plan = plan_buckets(sizes, cap_bytes)
    assert sorted(index for members in plan for index in members) == list(range(len(sizes)))
    for members in plan:
        assert len({sizes[index][0] for index in members}) == 1
        assert members == sorted(members, reverse=True)
        # All but the last member leave room.
        assert sum(sizes[index][1] for index in members[:-1]) < cap_bytes


# -- parity


class Tied(nn.Module):
    """A shared weight, a frozen one, one in channels-last layout, and mixed precision inside."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 16, dtype=dtype)
        self.image = nn.Conv2d(2, 3, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(16, dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))
        self.outside = nn.Linear(16, 8, bias=False, dtype=dtype)
        self.outside.weight = nn.Parameter(self.inside.weight.detach().t().clone().t())
        self.again = nn.Linear(8, 16, dtype=dtype)
        self.again.weight = self.inside.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x).tanh() + self.frozen
        z = self.outside.weight.reshape(16, 8)
        y = self.again((y * self.scale).to(x.dtype) @ z)
        return y.square().mean(-1) + self.image(x.view(-1, 2, 2, 2)).square().mean((1, 2, 3))


def train_beside_reference(dtype_name: str, steps: int, cap_mb: float | None) -> float:
    dtype = getattr(torch, dtype_name)
    rank, size = joined()
    torch.manual_seed(3)
    reference = Tied(dtype)
    torch.manual_seed(3 if rank == 0 else 4)  # the values come from rank 0
    module = Tied(dtype)
    model = pydist.DataParallel(module, bucket_cap_mb=cap_mb)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    worst = 0.0
    for step in range(steps):
        batches = [batch(r, 6, 8, step=step, dtype=dtype) for r in range(size)]
        ours.zero_grad(set_to_none=step % 2 == 0)
        model(batches[rank]).mean().backward()
        ours.step()
        theirs.zero_grad()
        reference(torch.cat(batches)).mean().backward()
        theirs.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            worst = max(worst, (a - b).abs().max().item())
    return worst


def test_parity_in_float64(ranks: Ranks) -> None:
    assert max(ranks.run(train_beside_reference, "float64", 50, None, timeout=LIMIT_S)) < 1e-9


def test_parity_in_float32(ranks: Ranks) -> None:
    # 20 steps of Adam: rounding differences grow where a gradient is near zero.
    assert max(ranks.run(train_beside_reference, "float32", 20, None, timeout=LIMIT_S)) < 2e-3


def test_parity_with_a_bucket_for_each_parameter(run: Runner) -> None:
    assert max(run(train_beside_reference, "float64", 20, 1e-6)) < 1e-9


class ManyDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ("float64", "float32", "bfloat16", "float16", "complex64", "complex128")
        self.values = nn.ParameterList(
            [torch.ones(5, 3, dtype=getattr(torch, name)) for name in names]
            + [torch.empty(0, 4), torch.ones(())]
        )

    def forward(self, rank: int) -> Tensor:
        # The derivative of the real part of p * conj(v) reaches the gradient of p as v.
        parts = [(p * self.factor(rank, p).conj()).sum().real for p in self.values]
        return torch.stack([part.double() for part in parts]).sum()

    def factor(self, rank: int, parameter: Tensor) -> Tensor:
        values = batch(rank, *parameter.shape).to(parameter.dtype)
        return values * (1 + 2j) if parameter.is_complex() else values


def mean_of_dtypes(cap_mb: float) -> None:
    rank, size = joined()
    model = pydist.DataParallel(ManyDtypes(), bucket_cap_mb=cap_mb)
    model(rank).backward()
    for parameter in model.values:
        wide = torch.complex128 if parameter.is_complex() else torch.float64
        everyone = [model.factor(r, parameter).to(wide) for r in range(size)]
        assert parameter.grad is not None
        tolerance = 4 * torch.finfo(parameter.dtype).eps
        assert_near(parameter.grad.to(wide), torch.stack(everyone).mean(0), tolerance)


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_dtypes(run: Runner, cap_mb: float) -> None:
    run(mean_of_dtypes, cap_mb)


# -- which parameters are used


class Branches(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(4, 1, dtype=torch.float64) for _ in range(count))
        self.never = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](self.trunk(x).tanh()).mean()


def use_different_branches(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Branches(size + 1), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    assert isinstance(reference, Branches)
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        # In the last step only rank 0 leaves the trunk's own branch.
        chosen = [(r + step) % size if step < 2 else int(r == 0) for r in range(size)]
        model(batch(rank, 5, 4, step=step), chosen[rank]).backward()
        losses = [reference(batch(r, 5, 4, step=step), chosen[r]) for r in range(size)]
        (torch.stack(losses).sum() / size).backward()
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            if theirs.grad is None:
                assert ours.grad is None, name
            else:
                assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_unused_parameters(ranks: Ranks, cap_mb: float) -> None:
    ranks.run(use_different_branches, cap_mb, timeout=LIMIT_S)


def use_nothing_on_one_rank() -> None:
    rank, size = joined()
    linear = nn.Linear(2, 2, bias=False, dtype=torch.float64)

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return x.square() if rank == 0 else self.linear(x)

    model = pydist.DataParallel(Sometimes())
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 2, dtype=torch.float64, requires_grad=True)).sum().backward()
        expected = torch.ones(2, 2, dtype=torch.float64) * (size - 1) / size
        assert_near(linear.weight.grad, expected)


def test_a_rank_that_uses_no_parameter(run: Runner) -> None:
    run(use_nothing_on_one_rank)


def keep_what_nobody_touches() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Branches(2))
    model(batch(rank, 5, 4), 0).backward()
    kept = model.branches[0].weight.grad.clone()
    # No zero_grad: an average of three equal numbers could differ in the last bit.
    for step in range(20):
        model(batch(rank, 5, 4, step=step), 1).backward()
    assert torch.equal(model.branches[0].weight.grad, kept)
    assert model.never.weight.grad is None
    # Accumulation onto what is averaged already.
    model.zero_grad()
    for step in range(3):
        model(batch(rank, 5, 4, step=step), 1).backward()
    reference = copy.deepcopy(model)
    for step in range(3):
        losses = [reference(batch(r, 5, 4, step=step), 1) for r in range(size)]
        (torch.stack(losses).sum() / size).backward()
    assert_near(model.trunk.weight.grad, reference.trunk.weight.grad)


def test_unused_gradients_stay_as_they_are(run: Runner) -> None:
    run(keep_what_nobody_touches)


# -- accumulation


def accumulate(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Branches(3), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        rounds = model.stats().rounds
        for micro in range(3):
            # Branches 0 and 1 get their gradient under no_sync alone.
            if micro < 2:
                with model.no_sync():
                    model(batch(rank, 5, 4, step=micro), micro).backward()
                    with model.no_sync():
                        pass
                    model(batch(rank, 5, 4, step=micro + 10), micro).backward()
            else:
                model(batch(rank, 5, 4, step=micro), 2).backward()
        assert model.stats().rounds == rounds + 1
        for r in range(size):
            for micro in range(3):
                steps = (micro, micro + 10) if micro < 2 else (micro,)
                for step in steps:
                    (reference(batch(r, 5, 4, step=step), micro) / size).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None
            else:
                assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_no_sync(run: Runner, cap_mb: float) -> None:
    run(accumulate, cap_mb)


def gradients_stay_in_place() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Tied(torch.float64))

    def places() -> list[int]:
        model(batch(rank, 6, 8)).mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                assert parameter.grad.stride() == parameter.stride()
        return [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]

    first = places()
    assert len(set(first)) == 7
    for set_to_none in (True, False, True):
        model.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters() if p.requires_grad)
        assert places() == first
    # Under no_sync as well, and with a gradient of the user's own.
    model.zero_grad()
    with model.no_sync():
        assert places() == first
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    assert places() == first
    # Module.to() moves the gradients' memory under their feet.
    model.to(torch.float32).to(torch.float64)
    model.zero_grad(set_to_none=False)
    before = [p.detach().clone() for p in model.parameters()]
    assert places() == first
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_gradients_stay_in_the_arena(run: Runner) -> None:
    run(gradients_stay_in_place)


# -- construction


def wrap_different_modules(kind: str) -> None:
    rank, size = joined()
    odd = rank == size - 1
    module: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    if odd and kind == "shape":
        module[1] = nn.Linear(3, 4)
    elif odd and kind == "name":
        module = nn.Sequential(OrderedDict(a=module[0], b=module[1], c=module[2]))
    elif odd and kind == "dtype":
        module[1].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    elif odd and kind == "frozen":
        module[1].bias.requires_grad_(False)
    elif odd and kind == "count":
        module[1] = nn.Linear(3, 2, bias=False)
    elif odd and kind == "buffer":
        module[2] = nn.BatchNorm1d(2, track_running_stats=False)
    pydist.DataParallel(module)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("shape", "rank 0 has parameter 1.weight: (2, 3) torch.float32, where rank 2 has"),
        ("name", "rank 0 has parameter 0.weight: (3, 2) torch.float32, where rank 2 has"),
        ("dtype", "rank 2 has parameter 1.bias: (2,) torch.float64"),
        ("frozen", "rank 2 has frozen parameter 1.bias"),
        ("count", "rank 0 has parameter 1.bias: (2,) torch.float32, where rank 2 has"),
        ("buffer", "rank 0 has buffer 2.running_mean: (2,) torch.float32, which rank 2 lacks"),
    ],
)
def test_mismatch_is_named_on_every_rank(three: Ranks, kind: str, named: str) -> None:
    outcomes = three.outcomes(wrap_different_modules, kind, timeout=LIMIT_S)
    assert [outcome.error for outcome in outcomes] == ["Mismatch"] * 3
    for outcome in outcomes:
        assert named in outcome.message
    # The job goes on.
    three.run(wrap_different_modules, "same", timeout=LIMIT_S)


def start_from_different_values() -> None:
    rank, _ = joined()
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[0].weight.requires_grad_(False)
    module[1].running_mean.fill_(rank + 5)
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    alone = pydist.DataParallel(copy.deepcopy(module), init_sync=False, broadcast_buffers=False)
    assert alone.module[1].running_mean[0] == rank + 5
    model = pydist.DataParallel(module)
    assert torch.equal(model.module[0].weight, first.weight)
    assert torch.equal(model.module[0].bias, first.bias)
    assert model.module[1].running_mean.tolist() == [5.0] * 3
    kept = nn.BatchNorm1d(3)
    kept.running_mean.fill_(rank)
    model = pydist.DataParallel(kept, broadcast_buffers=False)
    assert model.running_mean[0] == rank
    model = pydist.DataParallel(kept, forward_sync_buffers=False)
    assert model.running_mean[0] == 0


def test_values_come_from_rank_0(run: Runner) -> None:
    run(start_from_different_values)


def test_takes_the_arguments_of_torch() -> None:
    ours = inspect.signature(pydist.DataParallel.__init__).parameters
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)


def wrap_wrongly() -> None:
    joined()
    for wrong in (
        lambda: pydist.DataParallel(nn.Linear(2, 2, device="meta")),
        lambda: pydist.DataParallel(nn.LazyLinear(2)),
        lambda: pydist.DataParallel(nn.Linear(2, 2), bucket_cap_mb=0),
        lambda: pydist.DataParallel(nn.Linear(2, 2), bucket_cap_mb_list=[1]),
        lambda: pydist.DataParallel(pydist.DataParallel(nn.Linear(2, 2))),
    ):
        with pytest.raises(pydist.InvalidUsage):
            wrong()
    # Nothing to train is nothing to average.
    frozen = pydist.DataParallel(nn.Linear(2, 2).requires_grad_(False))
    frozen(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert frozen.stats().rounds == 0


def test_invalid_usage(run: Runner) -> None:
    run(wrap_wrongly)


# -- buffers


def train_with_buffers() -> None:
    rank, _ = joined()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    module.register_buffer("flags", torch.tensor([True, False]))
    module.register_buffer("big", torch.arange(5.0)[::2])
    alone = copy.deepcopy(module)
    model = pydist.DataParallel(module)
    local = pydist.DataParallel(copy.deepcopy(module), broadcast_buffers=False)
    for step in range(3):
        # Two forwards, one backward: as a GAN's discriminator does.
        xs = [batch(rank, 8, 4, step=step + i, dtype=torch.float32) for i in (0, 50)]
        (model(xs[0]).mean() + model(xs[1]).square().mean()).backward()
        (local(xs[0]).mean() + local(xs[1]).square().mean()).backward()
        for i in (0, 50):
            alone(batch(0, 8, 4, step=step + i, dtype=torch.float32))
    # What rank 0 has seen is what it would have seen alone, and everybody has it.
    assert_near(model.module[1].running_mean, alone[1].running_mean, 1e-6)
    assert model.module[1].num_batches_tracked == 6
    if rank != 0:
        assert not torch.allclose(local.module[1].running_mean, alone[1].running_mean)
    if rank == 0:  # a forward talks to nobody
        model.eval()
        assert not module.training
        with torch.no_grad():
            model(batch(0, 8, 4, dtype=torch.float32))
        model.train()
    model(batch(rank, 8, 4, dtype=torch.float32)).mean().backward()


def test_buffers_follow_rank_0(run: Runner) -> None:
    run(train_with_buffers)


# -- the shapes that a backward can have


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
def test_activation_checkpointing(run: Runner, reentrant: bool, cap_mb: float) -> None:
    run(train_checkpointed, reentrant, False, cap_mb)


def test_weight_shared_by_reentrant_checkpoints(three: Ranks) -> None:
    outcomes = three.outcomes(train_checkpointed, True, True, 1e-6, timeout=LIMIT_S)
    # A rank may find that another one has already given up.
    assert {outcome.error for outcome in outcomes} <= {"InvalidUsage", "PeerLost"}, outcomes
    refused = [outcome for outcome in outcomes if outcome.error == "InvalidUsage"]
    assert refused
    for outcome in refused:
        assert "parameter first.bias received a second gradient" in outcome.message
        assert "use_reentrant=False" in outcome.message
    three.run(train_checkpointed, False, True, 1e-6, timeout=LIMIT_S)


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
    # Without the outputs of forward.
    model.zero_grad()
    with torch.no_grad():
        model(batch(rank, 5, 4))
    model.module(batch(rank, 5, 4)).sum().backward()
    assert_near(model.weight.grad, mean)
    # An output changed in place.
    model.zero_grad()
    model(batch(rank, 5, 4)).mul_(2).sum().backward()
    assert_near(model.weight.grad, 2 * mean)


def test_odd_backwards(run: Runner) -> None:
    run(go_backward_in_odd_ways)


# -- errors


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArithmeticError("boom")


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.explode_before: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == self.explode_before:
                x = Explode.apply(x)
        return x


def survive_explosions(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Fragile(), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    for step, culprits in enumerate(([], [1], [], list(range(size)), [0, 1], [])):
        # 3: before any parameter has its gradient. 1: half way. Never after the last bucket.
        for place in (3, 1):
            model.zero_grad()
            reference.zero_grad()
            model.module.explode_before = place if rank in culprits else None
            loss = model(batch(rank, 5, 4, step=step)).mean()
            if rank in culprits:
                with pytest.raises(ArithmeticError, match="boom"):
                    loss.backward()
            elif culprits:
                names = ", ".join(map(str, culprits))
                with pytest.raises(pydist.Error, match=f"backward raised on rank {names},"):
                    loss.backward()
            else:
                loss.backward()
                for r in range(size):
                    (reference(batch(r, 5, 4, step=step)).mean() / size).backward()
                for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    assert_near(ours.grad, theirs.grad)
    # Other collectives of the job were never in the way.
    total = torch.ones(1)
    pydist.all_reduce(total)
    assert total == size


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_backward_that_raised(run: Runner, cap_mb: float) -> None:
    run(survive_explosions, cap_mb)


class TiedSparsely(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) @ self.table.weight.t()


def tie_sparsely() -> None:
    joined()
    pydist.DataParallel(TiedSparsely())(torch.tensor([1, 2])).sum().backward()


class Tables(nn.Module):
    def __init__(self, with_head: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
        self.rare = nn.EmbeddingBag(5, 3, sparse=True, mode="sum", dtype=torch.float64)
        self.never = nn.Embedding(2, 3, sparse=True)
        self.head = nn.Linear(3, 2, dtype=torch.float64) if with_head else nn.Identity()

    def forward(self, words: Tensor, rare: Tensor | None) -> Tensor:
        x = self.words(words).sum(0)
        if rare is not None:
            x = x + self.rare(rare.view(1, -1))[0]
        out: Tensor = self.head(x)
        return out.square().sum()


def train_tables(with_head: bool, set_to_none: bool) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Tables(with_head))
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]

    def loss(net: nn.Module, r: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + r)
        words = torch.randint(0, 7, (r + 1,), generator=generator)
        # On one rank alone; with step 3 on none.
        rare = torch.tensor([step % 5, 4]) if r == step % size and step != 3 else None
        out: Tensor = net(words, rare)
        return out

    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        with model.no_sync():
            loss(model, rank, 10 + step).backward()
        loss(model, rank, step).backward()
        for r in range(size):
            ((loss(reference, r, step) + loss(reference, r, 10 + step)) / size).backward()
        assert model.module.never.weight.grad is None
        for name, theirs in reference.named_parameters():
            ours = model.get_parameter(name)
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad is not None:
                assert ours.grad.layout == theirs.grad.layout
                assert_near(ours.grad.to_dense(), theirs.grad.to_dense())
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_sparse_gradients(ranks: Ranks, with_head: bool, set_to_none: bool) -> None:
    ranks.run(train_tables, with_head, set_to_none, timeout=LIMIT_S)


def raise_and_zero_in_place(set_to_none: bool) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double())
    reference = copy.deepcopy(model)
    # So that gradients lie in the arena already.
    model(batch(rank, 2, 3)).sum().backward()
    model.zero_grad(set_to_none=set_to_none)

    def explode(_: Tensor) -> None:
        raise ValueError("in the middle of backward")

    out = model.module[0](batch(rank, 2, 3))
    if rank == 1:
        out.register_hook(explode)
    else:
        time.sleep(0.3)  # the round goes on after rank 1 has zeroed its gradients
    with pytest.raises((ValueError, pydist.Error), match=r"in the middle|raised on rank 1"):
        model.module[1](out).sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    model(batch(rank, 2, 3, step=1)).sum().backward()
    for r in range(size):
        (reference(batch(r, 2, 3, step=1)).sum() / size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_clean_after_a_backward_that_raised(run: Runner, set_to_none: bool) -> None:
    run(raise_and_zero_in_place, set_to_none)


def raise_at_the_very_end() -> str:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(3, 1))

    def explode(_: Tensor) -> None:
        raise ValueError("after the last parameter")

    x = torch.ones(1, 3, requires_grad=True)
    if rank == 2:
        x.register_hook(explode)
    with pytest.raises((ValueError, pydist.Error)) as caught:
        model(x).sum().backward()
    pydist.barrier()  # whoever leaves earlier is lost to the others
    return str(caught.value)


def test_backward_that_raises_after_its_last_parameter(run: Runner) -> None:
    first, second, third = run(raise_at_the_very_end)
    assert "raised on rank 2" in first
    assert "raised on rank 2" in second
    assert third == "after the last parameter"


def average_twice() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Tables(with_head=True))
    reference = copy.deepcopy(model)
    everywhere, here = torch.tensor([1, 2]), torch.tensor([3])
    model(everywhere, here).backward()
    # Without zeroing, and the second table on rank 0 alone.
    model(everywhere, here if rank == 0 else None).backward()
    for _ in range(size):
        (reference(everywhere, here) / size).backward()
    for r in range(size):
        (reference(everywhere, here if r == 0 else None) / size).backward()
    for name, theirs in reference.named_parameters():
        ours = model.get_parameter(name)
        if theirs.grad is not None:
            assert_near(ours.grad.to_dense(), theirs.grad.to_dense())


def test_averaged_gradients_may_be_added_to(run: Runner) -> None:
    run(average_twice)


def clip_out_of_place() -> None:
    rank, size = joined()
    module = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})
    model = pydist.DataParallel(module)
    with model.no_sync():
        model.b(torch.full((1, 2), rank + 1.0)).sum().backward()
    model.module.b.weight.grad = model.module.b.weight.grad.clamp(max=100.0)
    model.module.a(torch.ones(1, 2)).sum().backward()
    mean = sum(range(1, size + 1)) / size
    assert model.module.b.weight.grad.tolist() == [[mean, mean]]


def test_a_gradient_that_was_moved_is_averaged(run: Runner) -> None:
    run(clip_out_of_place)


def step_in_a_hook() -> None:
    joined()
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(parameter: Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    module.weight.register_post_accumulate_grad_hook(step)
    pydist.DataParallel(module)(torch.ones(1, 2)).sum().backward()


def drop_the_wrapper() -> None:
    rank, size = joined()
    module = nn.Linear(3, 1)
    pydist.DataParallel(module)(torch.full((1, 3), rank + 1.0)).sum().backward()
    mean = sum(range(1, size + 1)) / size
    assert torch.equal(module.weight.grad, torch.full((1, 3), mean))


def test_wrapper_may_go_before_backward(run: Runner) -> None:
    run(drop_the_wrapper)


# --- communication hooks -------------------------------------------------------------------------


def halve(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, in other memory and in another dtype."""
    mean = bucket.buffer().double()
    work = dist.all_reduce(mean, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


HOOKS: dict[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "wrapped": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "powersgd": lambda: (
        powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        ),
        powerSGD_hook.powerSGD_hook,
    ),
    "local": lambda: (
        post_localSGD_hook.PostLocalSGDState(
            process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=2
        ),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "quantized": lambda: (None, quantization_hooks.quantization_pertensor_hook),
    "other memory": lambda: (None, halve),
}


def train_hooked(name: str) -> None:
    rank, _ = joined()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Tanh(), nn.Linear(128, 6))
    module = module.to(memory_format=torch.channels_last)
    nets = {
        "ours": pydist.DataParallel(copy.deepcopy(module), bucket_cap_mb=100),
        "torch's": DistributedDataParallel(copy.deepcopy(module)),
    }
    nets["ours"].register_comm_hook(*HOOKS[name]())
    # Torch's own wrapper refuses bfloat16 on the CPU.
    nets["torch's"].register_comm_hook(*HOOKS["allreduce" if name == "bf16" else name]())
    for step in range(5):
        for net in nets.values():
            net.zero_grad()
            # PowerSGD starts from random numbers.
            torch.manual_seed(step)
            np.random.seed(step)
            net(
                batch(rank, 4, 3 * 6 * 6, step=step).float().view(4, 3, 6, 6)
            ).square().mean().backward()
        tolerance = 2e-2 if name in ("quantized", "bf16") else 1e-5
        for ours, theirs in zip(nets["ours"].parameters(), module_of(nets), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


def module_of(nets: dict[str, nn.Module]) -> list[nn.Parameter]:
    return list(nets["torch's"].parameters())


@pytest.mark.parametrize("name", list(HOOKS))
def test_communication_hooks(run: Runner, name: str) -> None:
    run(train_hooked, name)


def train_hooked_oddly(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    seen: list[tuple[int, bool, int]] = []

    def hook(state: str, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        assert state == "state"
        shapes = [p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters()]
        assert [g.numel() for g in bucket.gradients()] == shapes
        seen.append((bucket.index(), bucket.is_last(), len(shapes)))
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model = pydist.DataParallel(Odd(), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    model.register_comm_hook("state", hook)
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        with model.no_sync():
            model(rank, step).backward()
        model(rank, step + 1).backward()
        for r in range(size):
            ((reference(r, step) + reference(r, step + 1)) / size).backward()
        for name, theirs in reference.named_parameters():
            ours = model.get_parameter(name)
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad is not None:
                assert_near(ours.grad.to_dense(), theirs.grad.to_dense())
    count = max(index for index, _, _ in seen) + 1
    assert [index for index, _, _ in seen] == list(range(count)) * 3
    assert all(last == (index == count - 1) for index, last, _ in seen)


class Odd(nn.Module):
    """Several dtypes, a sparse gradient, a parameter of some ranks and one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True, dtype=torch.float64)
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.transposed = nn.Parameter(torch.randn(3, 5, dtype=torch.float64).t())
        self.sometimes = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.never = nn.Parameter(torch.randn(2))

    def forward(self, rank: int, step: int) -> Tensor:
        x = self.table(torch.tensor([rank % 4, step % 4])).sum(0)
        y = self.transposed @ (x * self.complex.abs() + self.complex.real)
        if (rank + step) % 2 == 0:
            y = y * self.sometimes
        return y.square().sum()


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_communication_hooks_of_odd_models(run: Runner, cap_mb: float) -> None:
    run(train_hooked_oddly, cap_mb)


def raise_in_hook() -> None:
    rank, _ = joined()

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if rank == 1:
            raise ValueError("a hook that fails")
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model = pydist.DataParallel(nn.Linear(3, 1))
    model.register_comm_hook(None, hook)
    if rank == 1:
        with pytest.raises(ValueError, match="a hook that fails"):
            model(torch.ones(1, 3)).sum().backward()
    else:
        # Not waiting for what rank 1 has never started.
        with pytest.raises(pydist.Error, match=r"on rank 1, .* hooks of the ranks are out of step"):
            model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    # Rank 1 and the others would meet in all-reduces of different steps.
    with pytest.raises(pydist.Error, match="out of step: start again"):
        model(torch.ones(1, 3)).sum().backward()


def test_a_hook_that_raises(backend: str) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend}) as ranks:
        ranks.run(raise_in_hook, timeout=LIMIT_S)


def register_wrongly() -> None:
    joined()
    model = pydist.DataParallel(nn.Linear(3, 1))
    for hook, message in (
        (3, "must be callable"),
        (lambda bucket: bucket, "two arguments"),
        (lambda state, bucket, more: bucket, "two arguments"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=message):
            model.register_comm_hook(None, hook)  # type: ignore[arg-type]
    model.register_comm_hook(None, halve)
    with pytest.raises(pydist.InvalidUsage, match="already"):
        model.register_comm_hook(None, halve)
    late = pydist.DataParallel(nn.Linear(3, 1))
    late(torch.ones(1, 3)).sum().backward()
    with pytest.raises(pydist.InvalidUsage, match="before the first backward"):
        late.register_comm_hook(None, halve)


def test_hooks_that_cannot_be_registered(run: Runner) -> None:
    run(register_wrongly)


def differentiate_twice() -> None:
    joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).square().sum().backward(create_graph=True)


def convert_afterwards() -> None:
    joined()
    model = pydist.DataParallel(nn.Sequential(OrderedDict(head=nn.Linear(2, 1)))).double()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()


def unfreeze_afterwards() -> None:
    joined()
    module = nn.Linear(2, 1)
    module.bias.requires_grad_(False)
    model = pydist.DataParallel(module)
    model(torch.ones(1, 2)).sum().backward()
    module.bias.requires_grad_(True)
    model(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (tie_sparsely, "the gradient of parameter table.weight is dense"),
        (differentiate_twice, "create_graph=True"),
        (step_in_a_hook, "parameter weight was taken away by a hook"),
        (convert_afterwards, "parameter head.weight was (1, 2) torch.float32"),
        (unfreeze_afterwards, "parameter bias was frozen"),
    ],
)
def test_what_cannot_work_says_so(three: Ranks, function: Callable[[], None], message: str) -> None:
    outcomes: list[Outcome] = three.outcomes(function, timeout=LIMIT_S)
    for outcome in outcomes:
        assert outcome.error == "InvalidUsage", outcome.describe()
        assert message in outcome.message
    three.run(gradients_stay_in_place, timeout=LIMIT_S)


# -- the wrapper stands for the module


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

    assert type(copy.deepcopy(model)) is Named
    assert type(pickle.loads(pickle.dumps(model))) is Named
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Named
    assert copy.deepcopy(model).fc.weight.grad is None or model.stats().rounds == 1


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
        assert stats.wait_s > 0
        model.reset_stats()
        assert model.stats().rounds == 0
        del model
    # The last wrapper is gone, and its hooks are.
    module.zero_grad()
    module(torch.full((1, 2), float(rank))).sum().backward()
    assert_near(module.weight.grad, torch.full((1, 2), float(rank)), 1e-6)


def test_wrapper_lets_go_of_the_module(run: Runner) -> None:
    run(let_go)


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


def test_world_of_one_needs_no_launcher() -> None:
    code = (
        "import torch, pydist\n"
        "model = pydist.DataParallel(torch.nn.Linear(2, 1))\n"
        "model(torch.ones(4, 2)).sum().backward()\n"
        "assert model.weight.grad.tolist() == [[4.0, 4.0]]\n"
        "pydist.shutdown()\n"
        "print('done')\n"
    )
    done = run_command([sys.executable, "-c", code], timeout=LIMIT_S)
    assert done.stdout.strip() == "done", done.stderr
