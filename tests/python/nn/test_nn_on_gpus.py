"""Differentiable collectives of CUDA tensors: on native, through the host, and on NCCL."""

import copy

import gpu_ranks
import pytest
import staged_gpu
import torch
from gpu_ranks import needs_gpu_ranks
from launch import Ranks
from staged_gpu import needs_gpu
from torch import nn
from training import LIMIT_S, batch, joined

import pydist

pytestmark = pytest.mark.timeout(60)


def as_on_the_cpu(backend: str) -> None:
    """Every function gives what it gives on the CPU, and so does its backward."""
    install = gpu_ranks.install if backend == "nccl" else staged_gpu.install
    install()
    rank, size = joined()
    found = []
    for device in ("cpu", "cuda:0"):
        leaf = batch(rank, 2 * size, 3).to(device).requires_grad_()
        scale = torch.tensor(2.0, dtype=torch.float64, device=device, requires_grad=rank == 0)
        rows = leaf[: size + rank]
        made = [
            *(pydist.nn.all_reduce(leaf, op) for op in ("sum", "mean", "max", "prod")),
            *(pydist.nn.reduce_scatter(leaf, op) for op in ("sum", "min")),
            pydist.nn.all_gather(rows),
            pydist.nn.all_to_all(leaf),
            pydist.nn.gather(rows),
            pydist.nn.scatter(leaf if rank == 0 else None),
            pydist.nn.broadcast(leaf if rank == 0 else None),
            pydist.nn.contrastive_loss(rows, rows.sin(), scale),
        ]
        if rank == 0:
            made.append(pydist.nn.send(leaf, 1))
        elif rank == 1:
            made.append(pydist.nn.recv(0, device=device))
        whole = pydist.nn.whole_batch(rows)
        assert all(each.device == torch.device(device) for each in (*made, whole))
        own = sum((each.sin().sum() * (rank + 2) for each in made), torch.zeros((), device=device))
        (own + whole.cos().sum()).backward()
        found.append([*made, whole, leaf.grad, *([scale.grad] if rank == 0 else [])])
    for ours, expected in zip(found[1], found[0], strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-12, atol=1e-12)


def train(backend: str) -> None:
    """A loss over the whole batch through DataParallel, against one process on the CPU."""
    install = gpu_ranks.install if backend == "nccl" else staged_gpu.install
    install()
    rank, size = joined()
    torch.manual_seed(0)
    reference = nn.Linear(4, 5, dtype=torch.float64)
    model = pydist.DataParallel(copy.deepcopy(reference).to("cuda:0"))
    inputs = [batch(each, 2 + each, 4) for each in range(size)]
    rows = pydist.nn.whole_batch(model(inputs[rank].to("cuda:0")))
    (rows @ rows.t()).tanh().logsumexp(1).mean().backward()
    rows = reference(torch.cat(inputs))
    (rows @ rows.t()).tanh().logsumexp(1).mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-12, atol=1e-12)


BACKENDS = [
    pytest.param("native", marks=needs_gpu),
    pytest.param("nccl", marks=needs_gpu_ranks),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_on_gpus(backend: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        ranks.run(as_on_the_cpu, backend, timeout=LIMIT_S)
        ranks.run(train, backend, timeout=LIMIT_S)
