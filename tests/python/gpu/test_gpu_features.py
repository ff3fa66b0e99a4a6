"""What models are trained and measured with, on GPUs: by NCCL and staged.

On a GPU that the ranks share, or on fakes. Everything is compared with one process on the CPU; what
is the same there is in the tests of each feature.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import gpu_ranks
import pytest
import staged_gpu
import torch
import torch.distributed as dist
from gpu_ranks import needs_gpu_ranks
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import TensorDataset
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    Waves,
    assert_like_reference,
    batch,
    joined,
    train_like_reference,
    wave_loss,
)

import pydist
from pydist import metrics

pytestmark = [needs_gpu_ranks, TIME_LIMIT]


@pytest.fixture(
    scope="module", params=everyday("nccl-2", "native-2", thorough=("native-3", "gloo-2"))
)
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


# -- gradients


class Tables(nn.Module):
    """Tables with sparse gradients; not every rank takes the second one, and none the third."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
        self.rare = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)
        self.never = nn.Embedding(2, 3, sparse=True)
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, words: Tensor, takes_rare: bool) -> Tensor:
        words = words.to(self.words.weight.device)
        x = self.words(words).sum(0)
        if takes_rare:
            x = x + self.rare(words % 5).sum(0)
        out: Tensor = self.head(x)
        return out.square().sum()


def train_tables(device: str) -> None:
    rank, size = start()
    torch.manual_seed(0)
    reference = Tables()
    model = pydist.DataParallel(copy.deepcopy(reference).to(device))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference)]

    def loss(net: nn.Module, r: int, step: int) -> Tensor:
        words = torch.arange(r + step + 2) * (step + 1) % 7
        out: Tensor = net(words, r == step % size and step != 1)
        return out

    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, rank, step).backward()
        for r in range(size):
            (loss(reference, r, step) / size).backward()
        for name, theirs in reference.named_parameters():
            ours = model.get_parameter(name).grad
            assert (ours is None) == (theirs.grad is None), name
            if ours is not None and theirs.grad is not None:
                assert ours.layout == theirs.grad.layout, name
                assert ours.device.type == device, name
                torch.testing.assert_close(ours.to_dense().cpu(), theirs.grad.to_dense())
        for optimizer in optimizers:
            optimizer.step()
    assert_like_reference(model, reference, 1e-10, gradients=False)


@pytest.mark.skipif(not gpu_ranks.IS_REAL, reason="the fake device has no sparse tensors")
def test_sparse_gradients(run: Runner) -> None:
    run(train_tables, "cuda")


def other_memory(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, in other memory and in another dtype."""
    work = dist.all_reduce(bucket.buffer().double(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


def power_sgd() -> powerSGD_hook.PowerSGDState:
    # Of the rank that the larger matrix has, so that nothing is lost; from the third step on.
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.5
    )


HOOKS: dict[str, tuple[Callable[[], object], Callable[..., Any], float]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook, 1e-5),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook, 2e-3),
    "bf16": (lambda: None, default_hooks.bf16_compress_hook, 2e-2),
    "other memory": (lambda: None, other_memory, 1e-5),
    "powersgd": (power_sgd, powerSGD_hook.powerSGD_hook, 1e-4),
}


def train_hooked(name: str) -> None:
    rank, size = start()
    torch.manual_seed(2)
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    make_state, hook, tolerance = HOOKS[name]
    calls = 0

    def counted(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal calls
        calls += 1
        assert bucket.buffer().device.type == "cuda"
        future: torch.futures.Future[Tensor] = hook(state, bucket)
        return future

    model = pydist.DataParallel(copy.deepcopy(reference).to("cuda"), bucket_cap_mb=100)
    model.register_comm_hook(make_state(), counted)
    for step in range(4):
        inputs = [batch(r, 6, 4, step=step, dtype=torch.float32) for r in range(size)]
        for net, x in ((model, inputs[rank].to("cuda")), (reference, torch.cat(inputs))):
            net.zero_grad()
            net(x).sin().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_near(ours.grad, theirs.grad, tolerance)
    assert calls == 4


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hooks(run: Runner, name: str) -> None:
    run(train_hooked, name)


# -- uneven batches


def twins(**options: Any) -> tuple[pydist.DataParallel, nn.Module]:
    torch.manual_seed(3)
    reference = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    module = copy.deepcopy(reference).to("cuda")
    return pydist.DataParallel(module, bucket_cap_mb=1e-6, **options), reference


def weigh() -> None:
    rank, size = start()
    model, reference = twins()
    for step in range(3):
        rows = [(2 * r + 3 * step) % 5 + 1 for r in range(size)]
        inputs = [batch(r, rows[r], 4, step=step) for r in range(size)]
        mine = inputs[rank].to("cuda")
        # A number, a tensor on the GPU, and several backwards.
        weight = torch.tensor(rows[rank], device="cuda") if step == 1 else rows[rank]
        model.zero_grad()
        reference.zero_grad()
        for is_first in (True, False) if step == 2 else (False,):
            with model.no_sync(enabled=is_first), model.weighted(weight):
                model(mine).square().mean().backward()
        reference(torch.cat(inputs)).square().mean().backward()
        assert_like_reference(model, reference, 1e-10)
    # A batch that counts for nothing, on rank 0: the mean over it is NaN.
    mask = torch.arange(4, device="cuda") < rank
    model.zero_grad()
    reference.zero_grad()
    with model.weighted(mask.sum()):
        model(batch(rank, 4, 4).to("cuda"))[mask].square().mean().backward()
    reference(torch.cat([batch(r, 4, 4)[:r] for r in range(size)])).square().mean().backward()
    assert_like_reference(model, reference, 1e-10)


def test_weighted_means(run: Runner) -> None:
    run(weigh)


def run_out(by_world_size: bool, reduction: str) -> None:
    """Ranks with one batch, three batches and none."""
    rank, size = start()
    model, reference = twins(reduction=reduction)
    counts = [1, 3, 0][:size]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference)]
    with model.join(divide_by_initial_world_size=by_world_size):
        for step in range(counts[rank]):
            optimizers[0].zero_grad()
            model(batch(rank, 5, 4, step=step).to("cuda")).sin().mean().backward()
            optimizers[0].step()
    for step in range(max(counts)):
        optimizers[1].zero_grad()
        present = [r for r in range(size) if counts[r] > step]
        divisor = 1 if reduction == "sum" else size if by_world_size else len(present)
        for r in present:
            (reference(batch(r, 5, 4, step=step)).sin().mean() / divisor).backward()
        optimizers[1].step()
    assert_like_reference(model, reference, 1e-10, gradients=False)


@pytest.mark.parametrize(
    ("by_world_size", "reduction"), [(True, "mean"), (False, "mean"), (True, "sum")]
)
def test_join(run: Runner, by_world_size: bool, reduction: str) -> None:
    run(run_out, by_world_size, reduction)


# -- metrics

CLASSES = 5


def measures() -> dict[str, Any]:
    return {
        "accuracy": metrics.Accuracy(),
        "top 2": metrics.Accuracy(top_k=2, ignore_index=3),
        "confusion": metrics.ConfusionMatrix(CLASSES),
        "outputs": metrics.Rows(),
        "sum": metrics.Sum(),
        "mean": metrics.Mean(),
        "weighted": metrics.Mean(),
    }


def measure(model: nn.Module, samples: list[Tensor]) -> dict[str, Any]:
    inputs, targets = (tensor.to(next(model.parameters()).device) for tensor in samples)
    scores = model(inputs)
    each = scores.double().square().sum(1)
    return {
        "accuracy": (scores, targets),
        "top 2": (scores, targets),
        "confusion": (scores, targets),
        "outputs": scores,
        "sum": each,
        "mean": each,
        "weighted": (each, targets),
    }


def evaluate() -> None:
    rank, size = start()
    generator = torch.Generator().manual_seed(4)
    # Whole numbers and a fraction for each class: exact on every device, and no two are the same.
    module = nn.Linear(3, CLASSES)
    module.weight.data.copy_(torch.randint(-3, 4, (CLASSES, 3), generator=generator))
    module.bias.data.copy_(torch.arange(CLASSES) / 8)
    inputs = torch.randint(-4, 5, (53, 3), generator=generator).float()
    targets = torch.randint(0, CLASSES, (53,), generator=generator)
    expected = measures()
    with torch.no_grad():
        for name, values in measure(module, [inputs, targets]).items():
            expected[name].update(*(values if isinstance(values, tuple) else (values,)))
    model = pydist.DataParallel(copy.deepcopy(module).to("cuda"))
    found = pydist.evaluate(
        model, TensorDataset(inputs, targets), measure, metrics=measures(), batch_size=4
    )
    for name, metric in expected.items():
        if name == "outputs":
            assert found[name].device.type == "cuda"
            assert torch.equal(found[name].cpu(), module(inputs).detach())
        elif name == "confusion":
            assert torch.equal(found[name], metric.result(metric.state))
        else:
            assert found[name] == metric.result(metric.state), name

    # Sums of any float64, not a bit of them lost.
    values = torch.randn(999, generator=generator, dtype=torch.float64)
    values *= torch.randn(999, generator=generator, dtype=torch.float64).mul(30).exp()
    values[:3] = torch.tensor([5e-324, -1e300, 3e-310], dtype=torch.float64)
    weights = torch.randint(0, 9, (999,), generator=generator)
    whole, ours = metrics.Mean(), metrics.Mean()
    whole.update(values, weights)
    ours.update(values[rank::size].to("cuda"), weights[rank::size].to("cuda"))
    assert ours.state.device.type == "cuda"
    assert ours.compute() == whole.result(whole.state)

    # Rows by their positions, of which ranks have different numbers.
    mine = torch.arange(999) % (size + 1) == rank
    rows = values[mine].to("cuda")
    gathered = metrics.all_gather_ragged(rows, positions=torch.arange(999)[mine].to("cuda"))
    assert gathered.device.type == "cuda"
    assert torch.equal(gathered.cpu(), values[torch.arange(999) % (size + 1) < size])


def test_metrics(run: Runner) -> None:
    run(evaluate)


# -- torch.compile


def train_compiled(is_wrapped_first: bool, backend: str) -> None:
    start()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(5)
    reference = Waves()
    module: Any = copy.deepcopy(reference).to("cuda")
    if is_wrapped_first:
        model: Any = torch.compile(pydist.DataParallel(module), backend=backend)
    else:
        model = pydist.DataParallel(torch.compile(module, backend=backend))
    train_like_reference(model, reference, wave_loss, tolerance=1e-10)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1, counters
    assert counters["stats"]["calls_captured"] > 6, counters


# A first compilation imports much, on all ranks at once.
@pytest.mark.parametrize("is_wrapped_first", everyday(False, thorough=(True,)))
@pytest.mark.timeout(100)
def test_compiled_models(ranks: Ranks, is_wrapped_first: bool) -> None:
    ranks.run(train_compiled, is_wrapped_first, "aot_eager", timeout=90)


@pytest.mark.skipif(not gpu_ranks.IS_REAL, reason="the fake device runs no Triton kernels")
@pytest.mark.timeout(150)
def test_compiled_kernels(ranks: Ranks) -> None:
    ranks.run(train_compiled, True, "inductor", timeout=140)
