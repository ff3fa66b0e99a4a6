"""`pydist.ShardedOptimizer` on GPUs, by NCCL and staged: on one GPU for all ranks, or on fakes.

Everything is compared with the whole optimizer in one process, on the CPU. What is the same on the
CPU (classes, options, layouts, refusals) is in the other test_sharded_*.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import fake_cuda
import gpu_ranks
import pytest
import torch
from gpu_ranks import needs_gpu_ranks
from gpu_twins import ENVIRONMENTS, LIMIT_S, STAGES, Twins, assert_near, is_on_nccl, loss_of, start
from launch import run_ranks
from thorough import everyday
from torch import Tensor, nn
from training import Runner, batch

import pydist

pytestmark = [needs_gpu_ranks, pytest.mark.timeout(60)]


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
def test_training(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(train, stage)


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
def test_streams(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(train_on_streams, stage)


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
def test_accumulation(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(accumulate, stage)


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
def test_clipping_and_scaling(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(clip, stage)
    run_on_gpus(scale, stage)


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
def test_freezing_and_unfreezing(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(unfreeze, stage)


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
def test_16_bits(run_on_gpus: Runner, stage: int) -> None:
    run_on_gpus(train_in_16_bits, stage)


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


def compare_calls() -> None:
    """With all checks on, which compare what the ranks call."""
    for stage in (1, 2):
        train_in_16_bits(stage)
        clip(stage)


@pytest.mark.parametrize("kind", ["nccl", "native"])
def test_debug_mode(kind: str) -> None:
    env = {**ENVIRONMENTS[kind], "PYDIST_DEBUG": "1"}
    run_ranks(compare_calls, 2, env=env, timeout=LIMIT_S)
