"""SyncBatchNorm in groups, in a world of one, in evaluation, and where ranks join."""

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import NO_LAUNCHER, Ranks, run_ranks
from normalized_batches import batches
from torch import nn
from training import LIMIT_S, Runner, assert_near, joined

import pydist
from pydist.job import groups
from pydist.parallel.sync_batch_norm import refuse_under_join

pytestmark = pytest.mark.timeout(30)


def evaluate_alone() -> None:
    rank, size = joined()
    inputs = batches(size, 3)
    ours = pydist.SyncBatchNorm(3, dtype=torch.float64)
    theirs = nn.BatchNorm1d(3, dtype=torch.float64)
    untracked = pydist.SyncBatchNorm(3, track_running_stats=False, dtype=torch.float64)
    if rank == 0:  # before anybody has trained: nobody may be waited for
        assert_near(ours.eval()(inputs[0]), theirs.eval()(inputs[0]))
    for layer, x in ((ours, inputs[rank]), (theirs, torch.cat(inputs)), (untracked, inputs[rank])):
        layer.train()(x)
        layer.eval()
    if rank == 0:
        before = copy.deepcopy(ours.state_dict())
        assert_near(ours(inputs[0]), theirs(inputs[0]))
        assert all(torch.equal(before[name], value) for name, value in ours.state_dict().items())
        # Without running statistics: those of this rank's batch.
        mean, variance = inputs[0].mean(0), inputs[0].var(0, correction=0)
        expected = (inputs[0] - mean) / (variance + untracked.eps).sqrt()
        assert_near(untracked(inputs[0]), expected)
    # The ranks are still in step.
    ours.train()(inputs[rank])


def test_evaluation_talks_to_nobody(run: Runner) -> None:
    run(evaluate_alone)


def in_sub_groups(kind: str) -> None:
    rank, _ = joined()
    make: Callable[[list[int]], Any] = {
        "pydist": pydist.new_group,
        "torch": dist.new_group,
    }[kind]
    made = [make([0, 2]), make([1])]
    group, members = (made[1], [1]) if rank == 1 else (made[0], [0, 2])
    inputs = batches(3, 3, step=1)  # 0, 1 and 5 samples
    inputs[1] = torch.ones(2, 3, dtype=torch.float64) * torch.arange(2).view(2, 1)
    ours = pydist.SyncBatchNorm(3, process_group=group, dtype=torch.float64)
    theirs = nn.BatchNorm1d(3, dtype=torch.float64)
    mine = inputs[rank].clone().requires_grad_()
    whole = torch.cat([inputs[member] for member in members]).requires_grad_()
    output = ours(mine)
    output.pow(3).sum().backward()
    expected = theirs(whole)
    expected.pow(3).sum().backward()
    lengths = [len(inputs[member]) for member in members]
    assert whole.grad is not None
    assert_near(output, expected.split(lengths)[members.index(rank)])
    assert_near(mine.grad, whole.grad.split(lengths)[members.index(rank)])
    assert_near(ours.running_var, theirs.running_var)
    # A copy talks in the same group.
    twin = copy.deepcopy(ours)
    assert twin.process_group is group
    assert_near(twin(mine), expected.split(lengths)[members.index(rank)])
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(ours)
    # One layer over all in the same model.
    everyone = pydist.SyncBatchNorm(3, momentum=1.0, dtype=torch.float64)
    everyone(mine)
    assert_near(everyone.running_mean, torch.cat(inputs).mean(0))


@pytest.mark.parametrize("kind", ["pydist", "torch"])
def test_sub_groups(run: Runner, kind: str) -> None:
    run(in_sub_groups, kind)


def not_a_member() -> None:
    rank, _ = joined()
    group = dist.new_group([0, 1])
    layer = pydist.SyncBatchNorm(3, process_group=group)
    if rank == 2:
        with pytest.raises(pydist.InvalidUsage, match="not a member"):
            layer(torch.ones(2, 3))
    else:
        layer(torch.ones(2, 3))


def test_a_group_of_others(run: Runner) -> None:
    run(not_a_member)


def share_one_communicator() -> None:
    _, size = joined()
    group = pydist.new_group(range(size))
    assert groups.layer_communicator() is groups.layer_communicator()
    assert groups.layer_communicator(group) is groups.layer_communicator(group)
    assert groups.layer_communicator(group) is not groups.layer_communicator()
    assert groups.layer_communicator() is not groups.communicator_of()


def test_layers_share_a_communicator(run: Runner) -> None:
    run(share_one_communicator)


def on_a_group_of_gloo() -> None:
    """The script has its own default group, on torch's gloo; pydist leaves it and comes back."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = batches(size, 3)
    sub_group = dist.new_group([1, 2])
    for _ in range(2):
        layer = pydist.SyncBatchNorm(3, momentum=1.0, dtype=torch.float64)
        layer(inputs[rank])
        assert_near(layer.running_mean, torch.cat(inputs).mean(0))
        if rank != 0:
            layer = pydist.SyncBatchNorm(
                3, momentum=1.0, dtype=torch.float64, process_group=sub_group
            )
            layer(inputs[rank] if rank == 2 else torch.zeros(4, 3, dtype=torch.float64))
            assert_near(layer.running_mean, inputs[2].sum(0) / (4 + len(inputs[2])))
        # Else a rank could be gone while another still reads what it sent.
        dist.barrier()
        pydist.shutdown()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_groups_of_another_backend(backend: str) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend}) as ranks:
        ranks.run(on_a_group_of_gloo, timeout=LIMIT_S)


def normalize_alone() -> None:
    torch.manual_seed(0)
    ours, theirs = pydist.SyncBatchNorm(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3, requires_grad=True)
    assert torch.equal(ours(x), theirs(x))
    assert ours.running_var is not None
    assert theirs.running_var is not None
    assert torch.equal(ours.running_var, theirs.running_var)
    assert pydist.world_size() == 1
    # As torch's own: second derivatives, and what is refused.
    (gradient,) = torch.autograd.grad(ours(x).pow(3).sum(), x, create_graph=True)
    gradient.sum().backward()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ours(torch.ones(1, 3))
    pydist.shutdown()


def test_a_world_of_one_without_a_launcher() -> None:
    run_ranks(normalize_alone, 1, timeout=LIMIT_S, env=NO_LAUNCHER)


def test_join_is_refused() -> None:
    refuse_under_join(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.InstanceNorm1d(2)))
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(pydist.SyncBatchNorm(2)))
    net.append(nn.SyncBatchNorm(2))
    with pytest.raises(pydist.InvalidUsage, match=r"^1\.0 is a pydist\.SyncBatchNorm.*join"):
        refuse_under_join(net)
    with pytest.raises(pydist.InvalidUsage, match=r"^2 is a torch\.nn\.SyncBatchNorm.*join"):
        refuse_under_join(nn.Sequential(nn.ReLU(), nn.ReLU(), net[2]))
    with pytest.raises(pydist.InvalidUsage, match=r"^the module itself is a pydist"):
        refuse_under_join(pydist.SyncBatchNorm(2))
