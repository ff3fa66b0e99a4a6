"""Weights of backwards that a GPU computes, on NCCL: nobody waits for them.

What they leave has to be what the same weights leave as numbers of the host on another backend: to
the last bit with two ranks, whose sums have one order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import fake_cuda
import gpu_ranks
import pytest
import staged_gpu
import torch
from gpu_ranks import needs_gpu_ranks
from launch import Ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from training import LIMIT_S, TIME_LIMIT, Runner, batch, joined

import pydist

pytestmark = [needs_gpu_ranks, TIME_LIMIT]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, {"PYDIST_BACKEND": "nccl"}) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def other_ranks() -> Iterator[Ranks]:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


@pytest.fixture
def run_natively(other_ranks: Ranks) -> Runner:
    return lambda function, *args: other_ranks.run(function, *args, timeout=LIMIT_S)


def start(delay_us: int = 50) -> int:
    (gpu_ranks if os.environ["PYDIST_BACKEND"] == "nccl" else staged_gpu).install(delay_us)
    rank, _ = joined()
    return rank


class Tables(nn.Module):
    """Parameters of every type, of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for dtype in DTYPES:
            for name, shape in (("wide", (3, 5)), ("long", (71,)), ("single", ()), ("empty", (0,))):
                values = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
                self.register_parameter(f"{name}_{str(dtype)[6:]}", nn.Parameter(values))

    def forward(self, pulls: list[Tensor]) -> Tensor:
        sums = [(x * pull).sum() for x, pull in zip(self.parameters(), pulls, strict=True)]
        parts = [each.real if each.is_complex() else each for each in sums]
        return torch.stack([each.double() for each in parts]).sum()


def gradients_of(
    weights: list[list[Any]], options: dict[str, Any], spoiled: float = 1.0
) -> list[Tensor]:
    """What two steps leave.

    Args:
        weights: of each rank, for each backward of a step.
        options: of the wrapper.
        spoiled: the loss of a backward that counts for nothing is multiplied by this.
    """
    rank = torch.distributed.get_rank()
    model = pydist.DataParallel(Tables().to("cuda"), bucket_cap_mb=2e-4, **options)
    for step in range(2):
        model.zero_grad()
        mine = weights[rank]
        for number, weight in enumerate(mine):
            pulls = [
                batch(rank, *each.shape, step=10 * step + number).to(
                    device="cuda", dtype=each.dtype
                )
                for each in model.parameters()
            ]
            with model.no_sync(enabled=number + 1 < len(mine)), model.weighted(weight):
                loss = model(pulls)
                (loss * (spoiled if float(weight) == 0 else 1.0)).backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


WEIGHTS: dict[str, list[list[float]]] = {
    "one backward": [[3], [5]],
    "several": [[3, 1, 2], [5, 7, 1]],
    "of different numbers": [[3, 4], [2]],
    "a rank that counts for nothing": [[0], [5]],
    "first for nothing": [[0, 2, 1], [5, 0, 0]],
    "all for nothing": [[0], [0, 0]],
    "fractions": [[0.1, 1e-3], [7.3, 1e5]],
}


def compare(name: str, options: dict[str, Any]) -> list[Tensor]:
    start()
    on_device = os.environ["PYDIST_BACKEND"] == "nccl"
    # Rank 1 gives its first weight as a number: what it launches is the same.
    weights: list[list[Any]] = [
        [
            torch.tensor(weight, dtype=torch.float64, device="cuda")
            if on_device and (rank, i) != (1, 0)
            else weight
            for i, weight in enumerate(each)
        ]
        for rank, each in enumerate(WEIGHTS[name])
    ]
    return gradients_of(weights, options)


@pytest.mark.parametrize(
    ("name", "reduction"),
    [*((name, "mean") for name in WEIGHTS), ("several", "sum"), ("first for nothing", "sum")],
)
def test_as_numbers_on_the_host(
    run: Runner, run_natively: Runner, name: str, reduction: str
) -> None:
    options = {"reduction": reduction}
    ours = run(compare, name, options)
    theirs = run_natively(compare, name, options)
    for one, other, expected in zip(*ours, theirs[0], strict=True):
        assert torch.equal(one, other)
        # On the CPU, what is multiplied by a fraction is not rounded before it is added.
        last_bits = 0.0 if name != "fractions" else 2 * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, expected, rtol=last_bits, atol=0)


def spoil() -> None:
    start()
    nothing = torch.zeros((), device="cuda")
    some = torch.tensor(3, device="cuda")
    for weights in (
        [[nothing], [some]],
        [[nothing, some], [some, nothing]],
        [[nothing], [nothing]],
    ):
        clean = gradients_of(weights, {})
        for loss in (torch.nan, torch.inf):
            for one, other in zip(clean, gradients_of(weights, {}, loss), strict=True):
                assert torch.equal(one, other)


def test_what_counts_for_nothing_may_be_nan(run: Runner) -> None:
    run(spoil)


def features() -> None:
    """Each feature on numbers of the GPU, and on the same numbers of the host."""
    rank = start()

    def step(make: Callable[[], pydist.DataParallel], weight: Any, spoiled: float) -> list[Tensor]:
        model = make()
        torch.manual_seed(rank)
        with model.weighted(weight):
            out = model(torch.randint(7, (4,)).to("cuda"))
            (out.sin().mean() * (spoiled if float(weight) == 0 else 1.0)).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        return [each.to_dense().cpu() for each in gradients]

    def module() -> nn.Module:
        torch.manual_seed(0)
        # The stand-in has no sparse tensors.
        sparse = gpu_ranks.IS_REAL
        return nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 3)).to("cuda")

    def hooked() -> pydist.DataParallel:
        model = pydist.DataParallel(module())
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        return model

    def sharded(stage: int) -> pydist.DataParallel:
        model = pydist.DataParallel(module())
        model.optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage)
        return model

    for make in (
        lambda: pydist.DataParallel(module()),
        lambda: pydist.DataParallel(module(), compress="bf16"),
        hooked,
    ):
        for weight in ((2, 7)[rank], (0, 5)[rank]):
            plain = step(make, float(weight), 1.0)
            there = step(make, torch.tensor(weight, device="cuda"), torch.nan)
            for one, other in zip(plain, there, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    for stage in (1, 2):
        results = []
        for weight in (float((2, 7)[rank]), torch.tensor((2, 7)[rank], device="cuda")):
            model = sharded(stage)
            torch.manual_seed(rank)
            with model.weighted(weight):
                model(torch.randint(7, (4,)).to("cuda")).sin().mean().backward()
            model.optimizer.step()
            results.append([each.detach().cpu() for each in model.parameters()])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_with_hooks_sparse_gradients_compression_and_shards(run: Runner) -> None:
    run(features)


def join_unevenly() -> list[Tensor]:
    rank = start()
    torch.manual_seed(0)
    model = pydist.DataParallel(nn.Linear(4, 3).double().to("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range((1, 3)[rank]):
            optimizer.zero_grad()
            weight = torch.tensor(float(step + rank + 1), device="cuda")
            with model.weighted(
                weight if os.environ["PYDIST_BACKEND"] == "nccl" else float(weight)
            ):
                model(batch(rank, 5, 4, step=step).to("cuda")).sin().mean().backward()
            optimizer.step()
    return [each.detach().cpu() for each in model.parameters()]


def test_ranks_without_batches(run: Runner, run_natively: Runner) -> None:
    ours = run(join_unevenly)
    theirs = run_natively(join_unevenly)
    for one, other in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def give_no_weight(value: float) -> None:
    rank = start(delay_us=0)
    model = pydist.DataParallel(nn.Linear(4, 3).to("cuda"))
    inputs = batch(rank, 5, 4, dtype=torch.float32).to("cuda")
    good = torch.tensor(2.0, device="cuda")
    loss = model(inputs).sum()
    with model.weighted(torch.tensor(value, device="cuda") if rank == 1 else good):
        loss.backward()
    # It is not silently wrong, on no rank.
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isnan().all()
    gpu_ranks.synchronize()
    if rank == 1:
        with pytest.raises(pydist.InvalidUsage, match=r"an earlier backward .*NaN on every rank"):
            model.weighted(good).__enter__()
    # Said once.
    model.zero_grad()
    with model.weighted(good):
        model(inputs).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("value", [-1.0, torch.inf, torch.nan])
def test_what_is_no_weight_is_told_later(run: Runner, value: float) -> None:
    run(give_no_weight, value)


def refuse() -> None:
    start()
    model = pydist.DataParallel(nn.Linear(4, 3).to("cuda"))
    with pytest.raises(pydist.InvalidUsage, match="must be a number"):
        model.weighted(torch.ones(2, device="cuda")).__enter__()
    with model.weighted(torch.tensor([[5]], device="cuda")):
        assert isinstance(model.weight_of_backward, Tensor)
        assert model.weight_of_backward.item() == 5


def test_what_has_not_one_number_is_refused(run: Runner) -> None:
    run(refuse)


def read_on_host() -> int:
    start()
    model = pydist.DataParallel(nn.Linear(4, 3).to("cuda"))
    with model.weighted(torch.ones((), device="cuda")):
        assert isinstance(model.weight_of_backward, float)
        model(torch.ones(2, 4, device="cuda")).sum().backward()
    return len(fake_cuda.take_host_waits())


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="counted on the stand-in")
@pytest.mark.parametrize(
    "env", [{"PYDIST_ALGORITHM": "ring"}, {"FAKE_CUDA_KERNELS": "foreign"}], ids=str
)
def test_where_the_host_reads_them(env: dict[str, str]) -> None:
    for waits in run_ranks(read_on_host, 2, env={"PYDIST_BACKEND": "nccl", **env}, timeout=LIMIT_S):
        assert waits > 0
