"""What models are trained and measured with, on GPUs: by NCCL and staged.

On a GPU that the ranks share, or on fakes. Everything is compared with one process on the CPU; what
is the same there is in the tests of each feature.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import gpu_ranks
import pytest
import staged_gpu
import torch
from gpu_ranks import needs_gpu_ranks
from launch import Ranks
from torch import Tensor, nn
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    assert_like_reference,
    batch,
    joined,
)

import pydist

pytestmark = [needs_gpu_ranks, TIME_LIMIT]


@pytest.fixture(scope="module", params=["nccl-2", "native-3", "gloo-2"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    backend, count = request.param.split("-")
    env: dict[str, str | None] = {
        "PYDIST_BACKEND": backend,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes
    }
    with Ranks(int(count), env) as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def start() -> tuple[int, int]:
    (gpu_ranks if os.environ["PYDIST_BACKEND"] == "nccl" else staged_gpu).install(delay_us=50)
    rank, size = joined()
    assert pydist.backend() == os.environ["PYDIST_BACKEND"]
    return rank, size


def assert_near(ours: Tensor | None, theirs: Tensor | None, tolerance: float = 1e-10) -> None:
    """Whether what is on the GPU is what one process has on the CPU."""
    assert ours is not None
    assert theirs is not None
    assert ours.device.type == "cuda"
    ours = ours.detach().cpu()
    torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=tolerance, atol=tolerance)


# -- SyncBatchNorm


def normalize(dtype_name: str, layout: torch.memory_format, affine: bool) -> None:
    """Layers on uneven batches, one of them empty, against a batch of all samples in float64."""
    rank, size = start()
    dtype = getattr(torch, dtype_name)
    is_exact = dtype == torch.float64
    ours = pydist.SyncBatchNorm(
        3, affine=affine, device="cuda", dtype=dtype if is_exact else torch.float32
    )
    theirs = nn.BatchNorm2d(3, affine=affine, dtype=torch.float64)
    if affine:
        for place, value in (("weight", [0.5, 1.0, 1.5]), ("bias", [0.1, -0.2, 0.3])):
            for layer in (ours, theirs):
                getattr(layer, place).data.copy_(torch.tensor(value))
    # What is rounded once to the dtype of the input, and sums in float32.
    tolerance, sum_tolerance = (1e-10, 1e-10) if is_exact else (0.6 * torch.finfo(dtype).eps, 1e-4)
    for step in range(2):
        counts = [(5, 0, 3)[(r + step) % 3] for r in range(size)]
        inputs = [batch(r, counts[r], 3, 4, 2, step=step, dtype=dtype) + r for r in range(size)]
        pulls = [x + (7 * x).cos() for x in inputs]
        mine = inputs[rank].to("cuda").to(memory_format=layout).requires_grad_()
        whole = torch.cat(inputs).double().requires_grad_()
        output = ours(mine)
        output.backward(pulls[rank].to("cuda").to(memory_format=layout))
        expected = theirs(whole)
        expected.backward(torch.cat(pulls).double())
        assert output.dtype == dtype
        assert_near(output, expected.detach().split(counts)[rank], tolerance)
        assert whole.grad is not None
        assert_near(mine.grad, whole.grad.split(counts)[rank], tolerance)
        for parameter, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert parameter.grad is not None
            assert_near(pydist.all_reduce(parameter.grad), reference.grad, sum_tolerance)
            parameter.grad = reference.grad = None
    for buffer, reference in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert_near(buffer, reference, 1e-10 if is_exact else 1e-5)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_sync_batch_norm(
    run: Runner, dtype: str, layout: torch.memory_format, affine: bool
) -> None:
    run(normalize, dtype, layout, affine)


def train_normalized() -> None:
    rank, size = start()
    torch.manual_seed(1)
    reference = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)
    ).double()
    module = pydist.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference).to("cuda"))
    model = pydist.DataParallel(module)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference)]
    for step in range(3):
        inputs = [batch(r, 4, 2, 3, 3, step=step) for r in range(size)]
        for net, x in ((model, inputs[rank].to("cuda")), (reference, torch.cat(inputs))):
            net.zero_grad()
            net(x).sin().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_like_reference(model, reference, 1e-10)


def test_training_with_sync_batch_norm(run: Runner) -> None:
    run(train_normalized)
