"""Buffers: everybody has those of rank 0."""

import copy

import gpu_ranks
import pytest
import torch
from launch import run_ranks
from torch import Tensor, nn
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


def test_buffers_follow_rank_0(run_on_each: Runner) -> None:
    run_on_each(train_with_buffers)


class Counting(nn.Module):
    """Buffers of many kinds, all of which a forward changes, some by assignment."""

    scalar: Tensor
    hidden: Tensor
    assigned: Tensor
    spaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("scalar", torch.tensor(0))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("none", None)
        self.register_buffer("hidden", torch.zeros(2, dtype=torch.complex64), persistent=False)
        self.register_buffer("assigned", torch.zeros(2, 3).t())
        self.register_buffer("spaced", torch.zeros(5, dtype=torch.bfloat16)[::2])
        self.other = nn.Module()
        self.other.register_buffer("shared", self.scalar)

    def forward(self, rank: int) -> Tensor:
        self.scalar += rank + 1
        self.hidden += complex(rank, 1)
        self.assigned = self.assigned + rank + 1
        self.spaced.add_(rank + 1)
        return (self.weight * (rank + 1)).sum()


def count_in_buffers() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Counting())
    for step in range(1, 4):
        model(rank).backward()
        assert model.scalar == step
        assert model.hidden.tolist() == [step * 1j] * 2
        assert torch.equal(model.assigned, torch.full((3, 2), float(step)))
        assert model.spaced.tolist() == [step] * 3
        assert model.none is None
    assert model.stats().rounds == 3


def test_buffers_of_all_kinds(run: Runner) -> None:
    run(count_in_buffers)


def reshape_a_buffer(everywhere: bool) -> None:
    rank, _ = joined()
    module = Counting()
    model = pydist.DataParallel(module)
    if everywhere or rank == 0:
        module.spaced = torch.zeros(7)
    message = "buffer spaced was" if everywhere or rank == 0 else "raised on rank 0"
    with pytest.raises(pydist.Error, match=message):
        model(rank).backward()
    pydist.barrier()  # whoever leaves earlier is lost to the others


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_buffer_that_changed_its_shape(run: Runner, everywhere: bool) -> None:
    run(reshape_a_buffer, everywhere)


def keep_graphs_alive() -> None:
    """In eval mode backward reads the running statistics, which a backward before it has set."""
    rank, size = joined()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def losses(net: nn.Module, r: int) -> list[Tensor]:
        net.eval()
        first = net(batch(r, 5, 4)).sin().mean()
        second = net(batch(r, 5, 4, step=1)).sin().mean()
        return [first, second]

    for loss in losses(model, rank):
        loss.backward()
    for r in range(size):
        for loss in losses(reference, r):
            (loss / size).backward()
    assert_like_reference(model, reference)


def test_graphs_that_outlive_a_backward(run: Runner) -> None:
    run(keep_graphs_alive)


def normalize_in_both_modes() -> None:
    """Two forwards with BatchNorm before each backward, one of them in eval mode."""
    joined()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        one = net.train()(batch(rank, 5, 4, step=step))
        # With the statistics that this rank's forward has just left: they are its own.
        other = net.eval()(batch(rank, 5, 4, step=step + 50))
        return one.sin().mean() + other.sin().mean()  # type: ignore[no-any-return]

    train_like_reference(model, reference, loss)


def test_batch_norm_in_both_modes(run: Runner) -> None:
    run(normalize_in_both_modes)


class Rescaled(nn.Module):
    """Backward reads a buffer that each rank has set itself."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 0.5 + x.abs() * 0.5
        return (self.weight * self.scale).sum()


def go_back_twice() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Rescaled())
    x = torch.full((2,), rank + 1.0, dtype=torch.float64)
    loss = model(x)
    loss.backward(retain_graph=True)
    assert model.weight.grad.tolist() == [1 + size * 0.25 - 0.25] * 2
    # Rank 0's statistics are in the buffer by now: that gradient would be another's.
    model.zero_grad()
    assert model.scale.tolist() == [1.0] * 2
    message = "modified by an inplace operation|backward raised on rank"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
    pydist.barrier()


def test_a_graph_that_needs_a_replaced_buffer_is_refused(run: Runner) -> None:
    run(go_back_twice)


def move_a_buffer() -> None:
    gpu_ranks.install()
    rank, _ = joined()
    module = nn.Linear(3, 2).to("cuda")
    module.register_buffer("count", torch.zeros(3, device="cuda"))
    model = pydist.DataParallel(module)
    module.count = torch.full((3,), rank + 1.0)
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    assert module.count.device.type == "cpu"
    assert module.count.tolist() == [1.0] * 3


@gpu_ranks.needs_gpu_ranks
def test_a_buffer_may_move_off_its_device() -> None:
    run_ranks(move_a_buffer, 2, env={"PYDIST_BACKEND": "nccl"}, timeout=35)


# --- buffers that the program changes between steps ----------------------------------------------
