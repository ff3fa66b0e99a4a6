"""DDP, FSDP2, DTensor and distributed checkpoints of torch, on the engine."""

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_groups import join, loss_of, model

pytestmark = pytest.mark.timeout(60)

Runner = Callable[..., list[Any]]


def train(net: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Parameters after a few steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def batches_of(rank: int, steps: int = 3) -> list[Tensor]:
    return [
        torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        for step in range(steps)
    ]


def whole_batches(size: int) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*map(batches_of, range(size)), strict=True)]


def stock_ddp(kind: str) -> None:
    rank, size = join()
    reference = train(model(), whole_batches(size))
    net = DistributedDataParallel(model(), bucket_cap_mb=1)
    tolerance = 1e-5
    if kind == "allreduce_hook":
        net.register_comm_hook(None, default_hooks.allreduce_hook)
    elif kind == "fp16_hook":
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        tolerance = 1e-2
    elif kind == "powersgd_hook":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        tolerance = 1.0
    got = train(net, batches_of(rank))
    for ours, theirs in zip(got, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["default", "allreduce_hook", "fp16_hook", "powersgd_hook"])
def test_stock_ddp(run: Runner, kind: str) -> None:
    run(stock_ddp, kind)


def ddp_sparse() -> None:
    _, size = join()
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True)
    reference = copy.deepcopy(table)
    net = DistributedDataParallel(table)
    net(torch.tensor([dist.get_rank(), 5])).sum().backward()
    for rank in range(size):
        (reference(torch.tensor([rank, 5])).sum() / size).backward()
    assert table.weight.grad is not None
    assert reference.weight.grad is not None
    torch.testing.assert_close(table.weight.grad.to_dense(), reference.weight.grad.to_dense())


def test_stock_ddp_with_sparse_gradients(run: Runner) -> None:
    run(ddp_sparse)


def fsdp() -> None:
    rank, size = join()
    reference = train(model(), whole_batches(size))
    net = model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, batches_of(rank))
    for parameter, theirs in zip(net.parameters(), reference, strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), theirs, rtol=1e-5, atol=1e-5)


def test_fsdp2(run: Runner) -> None:
    run(fsdp)


def dtensor() -> None:
    _, size = join()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(3)
    left, right = torch.randn(7, 5), torch.randn(5, 6)
    sharded = distribute_tensor(left, mesh, [Shard(0)])
    product = sharded @ distribute_tensor(right, mesh, [Replicate()])
    torch.testing.assert_close(product.full_tensor(), left @ right)
    inner = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    torch.testing.assert_close(inner.full_tensor(), left @ right)
    moved = product.redistribute(mesh, [Shard(1)])
    torch.testing.assert_close(moved.full_tensor(), left @ right)


def test_dtensor(run: Runner) -> None:
    run(dtensor)


def checkpointed(folder: str) -> None:
    _, size = join()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(5)
    weight = torch.randn(9, 2)
    state = {"weight": distribute_tensor(weight, mesh, [Shard(0)]), "step": 3}
    dcp.save(state, checkpoint_id=folder)
    loaded = {"weight": distribute_tensor(torch.zeros(9, 2), mesh, [Shard(0)]), "step": 0}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["weight"].full_tensor(), weight)
    assert loaded["step"] == 3


def test_distributed_checkpoint(run: Runner) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(checkpointed, folder)
