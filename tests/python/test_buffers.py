"""Buffers: everybody has those of rank 0."""

import copy

import torch
from torch import nn
from training import TIME_LIMIT, Runner, assert_near, batch, joined

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


def test_buffers_follow_rank_0(run: Runner) -> None:
    run(train_with_buffers)
