"""`pydist.ShardedOptimizer` on GPUs, by NCCL and staged: on one GPU for all ranks, or on fakes.

Everything is compared with the whole optimizer in one process, on the CPU. What is the same on the
CPU (classes, options, layouts, refusals) is in the other test_sharded_*.py.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import gpu_ranks
import pytest
import torch
from gpu_ranks import Graph, needs_gpu_ranks
from launch import Ranks, rank_outcomes, run_ranks
from thorough import everyday
from torch import Tensor, nn
from training import Runner, batch, joined

import pydist

LIMIT_S = 40.0

pytestmark = [needs_gpu_ranks, pytest.mark.timeout(60)]

# Parts of 64 KiB, so that a bucket may take several.
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "nccl": {"PYDIST_BACKEND": "nccl"},
    "native": {"PYDIST_BACKEND": "native", "PYDIST_STAGING_BYTES": "65536"},
    "gloo": {"PYDIST_BACKEND": "gloo", "PYDIST_STAGING_BYTES": "65536"},
}
STAGES = pytest.mark.parametrize("stage", [1, 2])


@pytest.fixture(
    scope="module", params=everyday("nccl-2", "native-3", thorough=("native-2", "gloo-2", "gloo-3"))
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    backend, count = request.param.split("-")
    with Ranks(int(count), ENVIRONMENTS[backend]) as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def start(delay_us: int = 50) -> tuple[int, int]:
    if os.environ["PYDIST_BACKEND"] == "nccl":
        gpu_ranks.install(delay_us=delay_us)
    elif gpu_ranks.IS_REAL:
        torch.cuda.set_device(0)
    else:
        fake_cuda.install()
        fake_cuda.set_delay_us(delay_us)
    return joined()


def is_on_nccl() -> bool:
    return pydist.backend() == "nccl"


def synchronize() -> None:
    torch.cuda.synchronize() if gpu_ranks.IS_REAL else fake_cuda.synchronize()


@contextlib.contextmanager
def other_stream() -> Iterator[None]:
    """Another stream than the default one, which has waited for nothing but the host."""
    if gpu_ranks.IS_REAL:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    else:
        with fake_cuda.Stream():
            yield


@contextlib.contextmanager
def stream_in_turn() -> Iterator[None]:
    """Another stream, which comes after what was there before; what follows comes after it."""
    if gpu_ranks.IS_REAL:
        outside, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            yield
        outside.wait_stream(stream)
    else:
        fake_cuda.synchronize()
        with fake_cuda.Stream():
            yield
        fake_cuda.synchronize()


class Parts(nn.Module):
    """Sizes that nothing divides, complex numbers, a shared weight, what nobody uses or trains."""

    def __init__(self, turn: torch.dtype) -> None:
        super().__init__()
        self.inside = nn.Linear(10, 33, dtype=torch.float64)
        self.norm = nn.LayerNorm(33, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(33, 71, dtype=torch.float64) for _ in range(3))
        self.turn = nn.Parameter(torch.randn(71, dtype=turn))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(7, 71, dtype=torch.float64).div(20).t())
        self.single = nn.Parameter(torch.randn(301))
        self.never = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.randn(7, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        y = self.norm(self.inside(x.to(self.frozen.device)).tanh())
        y = sum(self.branches[i](y) for i in which)
        y = (y * self.turn).abs() @ self.transposed + self.frozen
        # In float32, and so of little weight.
        single = (self.single * 0.7).cos().mean().double() * 1e-3
        return (y * self.scalar).square().mean() + single + self.empty.sum()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    # Ranks use other branches, and no rank uses the second one at first.
    which = [[0], [0, 2], [2]][(rank + step) % 3] + ([1] if step > 2 else [])
    loss: Tensor = model(batch(rank, 6, 10, step=step), which)
    return loss


class Twins:
    """A model on the GPU with a sharded optimizer, and the whole of it in this process."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        stage: Any = 1,
        cap_mb: float = 0.004,
        turn: torch.dtype = torch.complex128,
        **options: Any,
    ) -> None:
        self.rank, self.size = start()
        torch.manual_seed(1)
        self.reference = Parts(turn)
        module = copy.deepcopy(self.reference).to("cuda")
        self.model = pydist.DataParallel(module, bucket_cap_mb=cap_mb)
        options = {"lr": 0.01, **options}
        self.ours = pydist.ShardedOptimizer(self.model, optimizer_class, stage=stage, **options)
        self.theirs = optimizer_class(self.reference.parameters(), **options)

    def backward(self, step: int) -> None:
        """On both, with the mean of all ranks' losses on the reference."""
        loss = loss_of(self.model, self.rank, step)
        loss.backward()
        for rank in range(self.size):
            theirs = loss_of(self.reference, rank, step)
            if rank == self.rank:
                assert_near(loss, theirs, f"loss of step {step}")
            (theirs / self.size).backward()

    def step(self, number: int) -> None:
        self.ours.zero_grad()
        self.theirs.zero_grad()
        self.backward(number)
        self.ours.step()
        self.theirs.step()

    def check(self, what: str) -> None:
        pairs = zip(self.model.named_parameters(), self.reference.parameters(), strict=True)
        for (name, ours), theirs in pairs:
            assert ours.device.type == "cuda"
            assert_near(ours, theirs, f"{what}: {name}")


def assert_near(ours: Tensor, theirs: Tensor, what: str) -> None:
    tolerance = 1e-9 if ours.dtype in (torch.float64, torch.complex128) else 1e-5
    torch.testing.assert_close(
        ours.detach().cpu(),
        theirs.detach(),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )


def train(stage: int) -> None:
    """Few buckets, and more than there are buffers for gradients in stage 2."""
    classes: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ]
    for optimizer_class, options in classes:
        for cap_mb in (1e-6, 0.004, 1.0):
            twins = Twins(optimizer_class, stage=stage, cap_mb=cap_mb, **options)
            for step in range(6):
                twins.step(step)
            twins.check(f"{optimizer_class.__name__}, buckets of {cap_mb} MB")
            assert (twins.ours.bytes_in_flight() > 0) == (stage == 2)


@STAGES
def test_training(run: Runner, stage: int) -> None:
    run(train, stage)


def train_on_three() -> None:
    """Shards that no power of two makes: the stages in turn, and what is called around a step."""
    for stage, act in (
        (2, accumulate),
        (1, clip),
        (2, scale),
        (1, unfreeze),
        (2, train_in_16_bits),
    ):
        act(stage)


def test_three_ranks_on_nccl() -> None:
    if gpu_ranks.IS_REAL:
        pytest.skip("three ranks that share a real GPU by sockets take minutes")
    run_ranks(train_on_three, 3, env=ENVIRONMENTS["nccl"], timeout=LIMIT_S)


class Forked(nn.Module):
    """Half of it runs on a stream of its own, and so does its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(10, 10, dtype=torch.float64) for _ in range(6))
        self.right = nn.ModuleList(nn.Linear(10, 10, dtype=torch.float64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.left[0].weight.device)
        for left, right in zip(self.left, self.right, strict=True):
            if x.device.type == "cuda":
                with stream_in_turn():
                    y = right(x).tanh()
            else:
                y = right(x).tanh()
            x = left(x).tanh() + y
        return x.square().mean()


def train_on_streams(stage: int) -> None:
    """Backward, step and forward on streams of their own, and on several at a time."""
    rank, size = start(delay_us=300)
    torch.manual_seed(3)
    reference = Forked()
    model = pydist.DataParallel(copy.deepcopy(reference).to("cuda"), bucket_cap_mb=0.002)
    ours = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        with stream_in_turn():
            ours.zero_grad()
            model(batch(rank, 4, 10, step=step)).backward()
        with stream_in_turn():
            ours.step()
        theirs.zero_grad()
        for r in range(size):
            (reference(batch(r, 4, 10, step=step)) / size).backward()
        theirs.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(a, b, "streams")


@STAGES
def test_streams(run: Runner, stage: int) -> None:
    run(train_on_streams, stage)


def accumulate(stage: int) -> None:
    """Under no_sync(), on top of what was averaged, by weight, and outside of backward."""
    twins = Twins(torch.optim.SGD, stage=stage, lr=0.05)
    for number in range(2):
        for micro in range(3):
            with twins.model.no_sync(enabled=micro < 2):
                twins.backward(10 * number + micro)
        twins.ours.step()
        twins.theirs.step()
        twins.ours.zero_grad(set_to_none=number == 0)
        twins.theirs.zero_grad()
    twins.ours.zero_grad()
    for number in range(2):
        twins.backward(40 + number)
    twins.ours.step()
    twins.theirs.step()
    twins.ours.zero_grad()
    twins.theirs.zero_grad()
    with twins.model.weighted(twins.rank + 1):
        loss_of(twins.model, twins.rank, 50).backward()
    total = sum(range(1, twins.size + 1))
    for rank in range(twins.size):
        (loss_of(twins.reference, rank, 50) * ((rank + 1) / total)).backward()
    twins.ours.step()
    twins.theirs.step()
    twins.ours.zero_grad()
    twins.theirs.zero_grad()
    with twins.model.no_sync():
        twins.backward(51)
    twins.model.sync_gradients()
    twins.ours.step()
    twins.theirs.step()
    twins.check("accumulated")


@STAGES
def test_accumulation(run: Runner, stage: int) -> None:
    run(accumulate, stage)


def clip(stage: int) -> None:
    twins = Twins(torch.optim.SGD, stage=stage, lr=0.05)
    with no_host_syncs() as watching:
        for number, order in enumerate((2.0, 1.0, float("inf"))):
            for own_method in (False, True):
                twins.ours.zero_grad()
                twins.theirs.zero_grad()
                twins.backward(number)
                with watching():
                    norm = (
                        twins.ours.clip_grad_norm_(0.05, order)
                        if own_method
                        else torch.nn.utils.clip_grad_norm_(
                            twins.model.parameters(), 0.05, order, foreach=bool(number % 2) or None
                        )
                    )
                assert norm.device.type == "cuda"
                # What torch finds no maximum of is left out.
                whole = [p for p in twins.reference.parameters() if p.numel() != 0]
                theirs = torch.nn.utils.clip_grad_norm_(whole, 0.05, order)
                assert_near(norm, theirs, f"norm {order}")
                with watching():
                    twins.ours.step()
                twins.theirs.step()
    twins.check("clipped by norm")
    twins.ours.zero_grad()
    twins.theirs.zero_grad()
    twins.backward(9)
    for net in (twins.model, twins.reference):
        real = [p for p in net.parameters() if not p.is_complex()]
        torch.nn.utils.clip_grad_value_(real, 1e-3)
    first = twins.model.get_parameter("inside.weight")
    gathered = twins.ours.gradient_of(first)
    assert gathered is not None
    assert gathered.device == first.device
    theirs_grad = twins.reference.inside.weight.grad
    assert theirs_grad is not None
    assert_near(gathered, theirs_grad, "gathered")
    twins.ours.step()
    twins.theirs.step()
    twins.check("clipped by value")


@contextlib.contextmanager
def no_host_syncs() -> Iterator[Callable[[], Any]]:
    """What runs under `with watching():` may not wait for the GPU, where NCCL is real."""

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        is_watched = gpu_ranks.IS_REAL and is_on_nccl()
        if is_watched:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if is_watched:
                torch.cuda.set_sync_debug_mode("default")

    yield watching


def scale(stage: int) -> None:
    """A step that one rank's shard alone can't take is left out by all."""
    # torch's scaler takes no complex gradients.
    twins = Twins(torch.optim.SGD, stage=stage, turn=torch.float64, lr=0.05)
    # The fake has no torch.cuda; the scale is on the loss's device in either case.
    device = "cuda" if gpu_ranks.IS_REAL else "cpu"
    ours, theirs = (
        torch.amp.GradScaler(name, init_scale=2.0**8, growth_interval=2) for name in (device, "cpu")
    )
    for step in range(6):
        twins.ours.zero_grad()
        twins.theirs.zero_grad()
        is_bad = step == 2
        loss = loss_of(twins.model, twins.rank, step)
        if is_bad and twins.rank == 1:
            loss = loss + twins.model.get_parameter("inside.weight").sum() * float("inf")
        ours.scale(loss).backward()
        for rank in range(twins.size):
            loss = loss_of(twins.reference, rank, step) / twins.size
            if is_bad and rank == 1:
                loss = loss + twins.reference.inside.weight.sum() * float("inf")
            theirs.scale(loss).backward()
        for scaler, optimizer, net in (
            (ours, twins.ours, twins.model),
            (theirs, twins.theirs, twins.reference),
        ):
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert ours.get_scale() == theirs.get_scale(), step
        twins.check(f"step {step}")


@STAGES
def test_clipping_and_scaling(run: Runner, stage: int) -> None:
    run(clip, stage)
    run(scale, stage)


def unfreeze(stage: int) -> None:
    twins = Twins(stage=stage)
    for net in (twins.model, twins.reference):
        net.get_parameter("inside.weight").requires_grad_(False)
    for step in range(2):
        twins.step(step)
    for net in (twins.model, twins.reference):
        net.get_parameter("inside.weight").requires_grad_(True)
        net.get_parameter("frozen").requires_grad_(True)
    for step in range(2, 6):
        twins.step(step)
    twins.check("unfrozen")


@STAGES
def test_freezing_and_unfreezing(run: Runner, stage: int) -> None:
    run(unfreeze, stage)


def train_in_16_bits(stage: int) -> None:
    """float32 copies are on the GPU, and what the parameters are rounded from."""
    rank, size = start()
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 7)).to(torch.bfloat16)
    theirs = [p.detach().float().requires_grad_() for p in module.parameters()]
    model = pydist.DataParallel(copy.deepcopy(module).to("cuda"), bucket_cap_mb=0.0005)
    ours = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, stage=stage)
    reference = torch.optim.AdamW(theirs, lr=0.01)
    for step in range(5):
        inputs = [batch(r, 6, 10, step=step, dtype=torch.bfloat16) for r in range(size)]
        ours.zero_grad()
        model(inputs[rank].to("cuda")).square().mean().backward()
        module.zero_grad()
        means = [torch.zeros_like(master) for master in theirs]
        for x in inputs:
            module.zero_grad()
            module(x).square().mean().backward()
            for mean, parameter in zip(means, module.parameters(), strict=True):
                assert parameter.grad is not None
                mean.add_(parameter.grad.float(), alpha=1 / size)
        for master, mean in zip(theirs, means, strict=True):
            master.grad = mean.bfloat16().float()
        ours.step()
        reference.step()
        with torch.no_grad():
            for parameter, master in zip(module.parameters(), theirs, strict=True):
                parameter.copy_(master)
    for a, b in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=0.02, atol=0.02)
    names = dict(model.named_parameters())
    for name, state in ours.sharded_state().parameters.items():
        for piece in state.ranges:
            master = piece.values["master"]
            assert master.dtype == torch.float32
            assert master.device.type == "cuda"
            values = names[name].detach().reshape(-1)[piece.begin : piece.end]
            assert torch.equal(master.bfloat16(), values)


@STAGES
def test_16_bits(run: Runner, stage: int) -> None:
    run(train_in_16_bits, stage)


class Spread(nn.Module):
    """On the GPU, on another one where there is one, and on the CPU."""

    def __init__(self, places: tuple[str, str, str]) -> None:
        super().__init__()
        self.places = places
        self.parts = nn.ModuleList(
            nn.Linear(width, height, dtype=torch.float64).to(place)
            for width, height, place in zip((10, 61, 9), (61, 9, 5), places, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        for place, part in zip(self.places, self.parts, strict=True):
            x = part(x.to(place)).tanh()
        return x.square().mean()


def train_on_devices(stage: int) -> None:
    rank, size = start()
    torch.manual_seed(4)
    has_second = not is_on_nccl() and not gpu_ranks.IS_REAL
    reference = Spread(("cpu", "cpu", "cpu"))
    module = Spread(("cuda:0", "cuda:1" if has_second else "cuda:0", "cpu"))
    module.load_state_dict(reference.state_dict())
    model = pydist.DataParallel(module, bucket_cap_mb=0.0005)
    ours = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02, stage=stage)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.02)
    for step in range(5):
        ours.zero_grad()
        theirs.zero_grad()
        model(batch(rank, 4, 10, step=step)).backward()
        for r in range(size):
            (reference(batch(r, 4, 10, step=step)) / size).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        assert_near(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3), "norm")
        ours.step()
        theirs.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(a, b, "spread")
    with pytest.raises(pydist.InvalidUsage, match="share_parameters=True maps memory of the host"):
        pydist.ShardedOptimizer(
            pydist.DataParallel(nn.Linear(2, 2).to("cuda")), torch.optim.SGD, share_parameters=True
        )
    # Gradients that something else has averaged.
    torch.manual_seed(4)
    module = Spread(("cuda:0", "cuda:0", "cpu"))
    plain = pydist.ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=0.02)
    reference = Spread(("cpu", "cpu", "cpu"))
    reference.load_state_dict(module.state_dict())
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.02)
    for step in range(3):
        for net, optimizer in ((module, plain), (reference, theirs)):
            optimizer.zero_grad()
            net(batch(0, 4, 10, step=step)).backward()
            optimizer.step()
    for a, b in zip(module.parameters(), reference.parameters(), strict=True):
        assert_near(a, b, "of another wrapper")
    module.to("cpu")
    with pytest.raises(pydist.InvalidUsage, match=r"was .* on cuda:0 when .* is .* on cpu now"):
        plain.step()


@pytest.mark.parametrize("kind", everyday("nccl", "native", thorough=("gloo",)))
@STAGES
def test_devices(kind: str, stage: int) -> None:
    # The last refusal ends the group.
    run_ranks(train_on_devices, 2, stage, env=ENVIRONMENTS[kind], timeout=LIMIT_S)


class NoLayer(nn.Module):
    """Whose parameter is read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))


def stepped() -> tuple[Any, Any]:
    """A model whose weight goes from 1 to 0.5, which may not have arrived."""
    model = pydist.DataParallel(NoLayer().to("cuda"))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.5)
    model.weight.grad = torch.ones(1000, device="cuda")
    model.sync_gradients()
    synchronize()
    dawdle(100_000)
    optimizer.step()
    dawdle(0)
    optimizer.zero_grad()
    return model, optimizer


def dawdle(longest_us: int) -> None:
    """The fake's streams that belong to NCCL are late."""
    if not gpu_ranks.IS_REAL and is_on_nccl():
        ctypes.CDLL("libcuda.so.1").fake_driver_delay_us(longest_us)


def assert_halved(values: Tensor) -> None:
    assert torch.equal(values.detach().cpu().reshape(-1), torch.full((1000,), 0.5))


def read_on_streams() -> None:
    """Each stream that reads waits, whoever has read before."""
    start()
    is_late = is_on_nccl() and not gpu_ranks.IS_REAL
    model, optimizer = stepped()
    first = torch.empty(1000, device="cuda").copy_(model.weight)
    # The host went on at once.
    assert not is_late or type(model.weight) is not nn.Parameter
    with other_stream():
        assert_halved(model.weight + 0)
    assert_halved(first)

    readers: list[Callable[[Any], Tensor]] = [
        lambda model: model.weight.detach(),
        lambda model: model.state_dict()["weight"],
        lambda model: torch._foreach_add([model.weight], 0.0)[0],
        lambda model: copy.deepcopy(model).weight,
        lambda model: copy.deepcopy(model.weight),
    ]
    for read in readers:
        model, optimizer = stepped()
        torch.empty(1000, device="cuda").copy_(model.weight)
        with other_stream():
            assert_halved(read(model))

    # Who takes over the order of all streams makes it ordinary.
    model, optimizer = stepped()
    optimizer.finish()
    assert type(model.weight) is nn.Parameter
    assert_halved(model.weight + 0)

    # So does its arrival, once somebody looks.
    model, optimizer = stepped()
    limit = time.monotonic() + 20
    while type(model.weight) is not nn.Parameter:
        _ = model.weight.data
        time.sleep(0.01)
        assert time.monotonic() < limit
    with other_stream():
        assert_halved(model.weight + 0)

    # What nobody reads any more goes, and what travels keeps its memory.
    model, optimizer = stepped()
    gone = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert gone() is None
    synchronize()


def test_each_stream_that_reads_waits(run: Runner) -> None:
    run(read_on_streams)


def step_and_leave() -> None:
    """The ranks that go first wait for the others, and for what NCCL's stream has not done yet."""
    rank, size = start()
    for how in ("optimizer", "model and optimizer"):
        module = NoLayer().to("cuda")
        model = pydist.DataParallel(module)
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.5)
        model.weight.grad = torch.ones(1000, device="cuda")
        model.sync_gradients()
        synchronize()
        pydist.barrier()
        dawdle(100_000)
        if rank == size - 1:
            time.sleep(0.3)
        optimizer.step()
        dawdle(0)
        if how == "model and optimizer":
            del model
        del optimizer
        assert type(module.weight) is nn.Parameter
        assert_halved(module.weight + 0)
        pydist.barrier()


def test_who_leaves_waits(run: Runner) -> None:
    run(step_and_leave)


def refuse_capture(who: str) -> None:
    rank, _ = start()
    torch.manual_seed(3)
    model = pydist.DataParallel(nn.Linear(10, 7).to("cuda"))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    inputs = torch.ones(2, 10, device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    if who == "backward":
        with pytest.raises(pydist.InvalidUsage, match="a ShardedOptimizer takes"), Graph():
            model(inputs).sum().backward()
        # All ranks know, and go on.
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        assert bool(model.weight.isfinite().all())
        # Lives on: NCCL's part in the end of a model breaks a capture that nobody knows of.
        before = model, optimizer
        # A graph can't wait for what it doesn't hold, so what it reads has arrived.
        model, optimizer = stepped()
        graph = Graph()
        with graph:
            read = model.weight + 0
        assert type(model.weight) is nn.Parameter
        graph.replay()
        assert_halved(read)
        del before
        return
    model(inputs).sum().backward()
    pydist.barrier()  # whoever raises first ends the backward of those that are still in theirs
    if who == "everybody" or rank == 1:
        with pytest.raises(pydist.InvalidUsage, match="cannot be captured"), Graph():
            optimizer.step()
        return
    with pytest.raises(pydist.Error, match="cannot be captured"):  # noqa: PT012
        for _ in range(100):
            optimizer.step()
            float(model.weight.sum())


@pytest.mark.parametrize("who", ["backward", "everybody", "one rank"])
def test_captures_are_refused_on_all_ranks(who: str) -> None:
    run_ranks(refuse_capture, 2, who, env=ENVIRONMENTS["nccl"], timeout=LIMIT_S)


def refuse_staged_capture(stage: int) -> None:
    """What goes by the host can't be captured; whoever tries tells those that don't."""
    gpu_ranks.install(delay_us=50)
    rank, _ = joined()
    torch.manual_seed(3)
    # More buckets than stage 2 has buffers for.
    layers = [nn.Linear(10, 10).to("cuda") for _ in range(6)]
    model = pydist.DataParallel(nn.Sequential(*layers), bucket_cap_mb=0.0005)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage)
    inputs = torch.ones(2, 10, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    step()
    for captures in ([0, 1], [1]):
        optimizer.zero_grad()
        began = time.monotonic()
        if rank in captures:
            refused = pytest.raises(pydist.InvalidUsage, match="cannot be part of a CUDA graph")
            with refused, Graph():
                model(inputs).sum().backward()
        else:
            with pytest.raises(pydist.Error, match="backward raised on rank 1"):
                model(inputs).sum().backward()
        assert time.monotonic() - began < 10, "of 600 seconds that an operation has"
        step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("kind", everyday("native", thorough=("gloo",)))
@STAGES
def test_staged_captures_leave_nobody_waiting(kind: str, stage: int) -> None:
    run_ranks(refuse_staged_capture, 2, stage, env=ENVIRONMENTS[kind], timeout=LIMIT_S)


def compare_calls() -> None:
    """With all checks on, which compare what the ranks call."""
    for stage in (1, 2):
        train_in_16_bits(stage)
        clip(stage)


@pytest.mark.parametrize("kind", ["nccl", "native"])
def test_debug_mode(kind: str) -> None:
    env = {**ENVIRONMENTS[kind], "PYDIST_DEBUG": "1"}
    run_ranks(compare_calls, 2, env=env, timeout=LIMIT_S)


class Dying(torch.optim.SGD):
    """Ends one rank's process in a step, once it is to."""

    is_armed = False

    def step(self, closure: Any = None) -> Any:
        if self.is_armed and pydist.rank() == 1:
            os._exit(9)
        return super().step(closure)


def die() -> float:
    start()
    model = pydist.DataParallel(nn.Linear(50, 50).to("cuda"))
    optimizer = pydist.ShardedOptimizer(model, Dying, lr=0.1)
    Dying.is_armed = True
    model(torch.ones(2, 50, device="cuda")).sum().backward()
    began = time.monotonic()
    with pytest.raises(pydist.Error, match=r"rank 1|peer|closed"):  # noqa: PT012
        for _ in range(100):
            optimizer.step()
            float(model.weight.sum())
    return time.monotonic() - began


@pytest.mark.parametrize("kind", everyday("nccl", "native", thorough=("gloo",)))
def test_a_rank_that_dies_in_a_step(kind: str) -> None:
    first, second = rank_outcomes(die, 2, env=ENVIRONMENTS[kind], timeout=LIMIT_S)
    assert second.exit_code == 9
    assert first.ok, first.describe()
    assert first.value < 20


# -- checkpoints

ROWS = 12


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 33, dtype=torch.float64),
        nn.Tanh(),
        nn.Linear(33, 7, dtype=torch.float64),
    )


def rows(step: int) -> Tensor:
    return batch(0, ROWS, 10, step=step)


class Resumable:
    """Every number of ranks trains the same: they share out the rows of a step."""

    def __init__(self, stage: Any, seed: int, **options: Any) -> None:
        self.rank, self.size = start()
        torch.manual_seed(seed)
        self.model = pydist.DataParallel(small_model().to("cuda"), bucket_cap_mb=0.001)
        self.optimizer = pydist.ShardedOptimizer(
            self.model, torch.optim.AdamW, lr=0.02, stage=stage, **options
        )

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            self.optimizer.zero_grad()
            share = rows(step).view(self.size, -1, 10)[self.rank]
            self.model(share.to("cuda")).square().mean().backward()
            self.optimizer.step()
        return [p.detach().cpu() for p in self.model.parameters()]


def alone(first: dict[str, Any] | None, seed: int, steps: range) -> list[Tensor]:
    """The same in plain torch on the CPU, from the beginning or a state."""
    torch.manual_seed(seed)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if first is not None:
        model.load_state_dict(first["model"])
        optimizer.load_state_dict(first["optimizer"])
    for step in steps:
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_all_near(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b, what)


def save(folder: str, stage: int) -> None:
    training = Resumable(stage, seed=7)
    training.train(range(4))
    pydist.save(
        f"{folder}/now", model=training.model, optimizer=training.optimizer, extra={"step": 4}
    )
    handle = pydist.save(
        f"{folder}/later", model=training.model, optimizer=training.optimizer, asynchronous=True
    )
    # What is saved is what was there at the call.
    ours = training.train(range(4, 8))
    handle.wait()
    assert_all_near(ours, alone(None, 7, range(8)), "saved")


def resume(folder: str, stage: int) -> None:
    """Of another number of ranks, in the other stage; from and to plain torch."""
    start()
    expected = alone(None, 7, range(8))
    for name, options in (("now", {}), ("later", {}), ("later", {"fused": True})):
        training = Resumable(3 - stage, seed=8, **options)
        training.train(range(50, 51))
        extra = pydist.load(f"{folder}/{name}", model=training.model, optimizer=training.optimizer)
        assert extra == ({"step": 4} if name == "now" else {})
        for state in training.optimizer.sharded_state().parameters.values():
            for piece in state.ranges:
                assert piece.values["exp_avg"].device.type == "cuda"
        assert_all_near(training.train(range(4, 8)), expected, f"{name}, {options}")
    plain = pydist.checkpoint.to_torch(f"{folder}/later")
    assert_all_near(alone(copy.deepcopy(plain), 9, range(4, 8)), expected, "in plain torch")
    training = Resumable(stage, seed=8)
    pydist.checkpoint.from_torch(plain, model=training.model, optimizer=training.optimizer)
    assert_all_near(training.train(range(4, 8)), expected, "from plain torch")
    training.optimizer.load_state_dict(training.optimizer.state_dict())


@pytest.mark.parametrize("kind", everyday("nccl", "native", thorough=("gloo",)))
@STAGES
def test_checkpoints_load_on_other_ranks(kind: str, stage: int, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), stage, env=ENVIRONMENTS[kind], timeout=LIMIT_S)
    for count in (1, 3):
        run_ranks(resume, count, str(tmp_path), stage, env=ENVIRONMENTS[kind], timeout=LIMIT_S)
