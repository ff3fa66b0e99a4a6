"""Offloaded steps: streams that stand still while the host and all other streams go on."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from unittest import mock

import fake_cuda
import pytest
import torch
from fake_cuda import needs_fake_cuda
from gpu_ranks import needs_gpu_ranks
from gpu_twins import ENVIRONMENTS, start
from launch import run_ranks
from offload_twins import KernelTwin, Offloaded, flat
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import pydist
from pydist.gpu.late_number import LateNumber
from pydist.sharding.offload import host_shard
from pydist.sharding.offload.host_shard import HostShard

LIMIT_S = 40.0

pytestmark = [needs_gpu_ranks, needs_fake_cuda, pytest.mark.timeout(60)]

NCCL = ENVIRONMENTS["nccl"]


@contextlib.contextmanager
def streams_alone() -> Iterator[None]:
    """Nothing but streams and events keeps order: digests make the stand-in wait for a stream."""
    # Made before, as the stand-in waits for the stream on which memory is allocated, too.
    nothing = torch.zeros((), dtype=torch.int64, device="cuda")

    def look(self: HostShard) -> LateNumber:
        return LateNumber(torch.zeros(()), None)

    with (
        mock.patch.object(host_shard, "digest_of", return_value=nothing),
        mock.patch.object(HostShard, "look_for_writes", look),
    ):
        yield


def stalled(stream: torch.Stream) -> fake_cuda.Stall:
    with stream:
        return fake_cuda.Stall()


def release_soon(stall: fake_cuda.Stall, after_s: float = 0.2) -> threading.Timer:
    """Lets a stream go on once the host has had the time to run ahead of it."""
    timer = threading.Timer(after_s, stall.release)
    timer.start()
    return timer


def hold_up(direction: str) -> None:
    """One direction of the bus stands still as a step begins, and all others go on."""
    for delayed in (False, True):
        training = Offloaded(delayed=delayed, delay_us=0)
        streams = training.optimizer._shard_step.steps[0]._streams
        looker = Looker(training)
        with streams_alone():
            for number in range(4):
                training.optimizer.zero_grad()
                loss = training.loss(number)
                if direction == "to_host":
                    stall = stalled(streams.to_host)
                loss.backward()
                late = (training.gradients(), training.options())
                if direction == "to_device":
                    stall = stalled(streams.to_device)
                timer = release_soon(stall)
                training.optimizer.step()
                training._late.append(late)
                while len(training._late) > delayed:
                    training.twin.step(*training._late.pop(0))
                if direction == "to_host":
                    # Its gradients go where the copies still read those of before.
                    training.backward(50 + number)
                looker.look(number)
                training.check(f"step {number}, {direction}")
                timer.join()
            training.finish()
        training.check(f"finished, {direction}")


class Looker:
    """Looks at a parameter at once after a step, on another stream than the one that stepped."""

    def __init__(self, training: Offloaded) -> None:
        self._weight = training.model.get_parameter("inside.weight")
        self._values = training.twin.values
        self._stream = fake_cuda.Stream()
        self._seen: Tensor = torch.empty_like(self._weight)

    def look(self, number: int) -> None:
        """By turns: the host waits for the values, or another stream waits before this one."""
        seen = self._seen
        if number % 2:
            with self._stream:
                seen = copy.deepcopy(self._weight)
        else:
            self._seen.copy_(self._weight.detach())
            with self._stream:
                self._seen.copy_(self._weight.detach())
        with self._stream:
            assert torch.equal(flat(seen), self._values[self._weight]), f"seen in step {number}"


@pytest.mark.parametrize(
    ("direction", "count"), [("to_host", 2), ("to_device", 2), ("to_device", 1)]
)
def test_a_direction_of_the_bus_is_late(direction: str, count: int) -> None:
    run_ranks(hold_up, count, direction, env=NCCL, timeout=LIMIT_S)


def clip_before_the_copy() -> None:
    """Gradients are clipped before they have been copied; the step multiplies them once."""
    training = Offloaded(delay_us=0)
    to_host = training.optimizer._shard_step.steps[0]._streams.to_host
    with streams_alone():
        for number in range(2):
            training.optimizer.zero_grad()
            loss = training.loss(number)
            stall = stalled(to_host)
            loss.backward()
            timer = release_soon(stall)
            training.optimizer.clip_grad_norm_(0.01)
            training.step()
            timer.join()
            training.check(f"step {number}")


def test_clipping_waits_for_copies() -> None:
    run_ranks(clip_before_the_copy, 2, env=NCCL, timeout=LIMIT_S)


def compute_late(delayed: bool) -> None:
    """What the program computes on its own stream is late: it reads, and changes gradients."""
    training = Offloaded(delayed=delayed, delay_us=0)
    kept = {p: torch.empty_like(p) for p in training.parameters}
    with streams_alone():
        for number in range(4):
            training.optimizer.zero_grad()
            training.backward(number)
            gradients = training.gradients()
            before = {p: values.clone() for p, values in training.twin.values.items()}
            timer = release_soon(fake_cuda.Stall())
            if number % 2:
                with torch.no_grad():
                    for p, values in kept.items():
                        values.copy_(p)
            else:
                # Past `p.grad`, which allocates where this rank has no part of it.
                for _, part in training.optimizer._layout.gradients.values():
                    part.zero_()
                gradients = {
                    p: None if gradient is None else torch.zeros_like(gradient, device="cpu")
                    for p, gradient in gradients.items()
                }
            training._late.append((gradients, training.options()))
            training.optimizer.step()
            while len(training._late) > delayed:
                training.twin.step(*training._late.pop(0))
            timer.join()
            if number % 2:
                for p, values in kept.items():
                    assert torch.equal(flat(values), before[p]), f"read before step {number}"
            training.check(f"step {number}")
        training.finish()
    training.check("finished")


@pytest.mark.parametrize("delayed", [False, True])
def test_the_stream_that_computes_is_late(delayed: bool) -> None:
    run_ranks(compute_late, 2, delayed, env=NCCL, timeout=LIMIT_S)


def write_late() -> None:
    """The program writes parameters on its own stream, late; the step looks for that."""
    training = Offloaded(delay_us=0)
    for number in range(2):
        training.train(number)
    training.optimizer.zero_grad()
    training.backward(2)
    late = (training.gradients(), training.options())
    halves = {p: p.detach() * 0.5 for p in training.parameters}
    for p, half in halves.items():
        training.twin.values[p].copy_(flat(half))
    timer = release_soon(fake_cuda.Stall())
    for p, half in halves.items():
        p.data.copy_(half)
    training.optimizer.step()
    training.twin.step(*late)
    timer.join()
    training.check("written late")


def test_what_the_program_writes_late_counts() -> None:
    run_ranks(write_late, 2, env=NCCL, timeout=LIMIT_S)


def look_late() -> None:
    """The digest of values that are about to be replaced is late: it is not taken for a write."""
    training = Offloaded(delayed=True, delay_us=0)
    send = host_shard.send_number
    timers: list[threading.Timer] = []

    def send_and_stall(number: Tensor) -> LateNumber:
        # On the stream that looks: what is known of the values is not written yet.
        sent = send(number)
        timers.append(release_soon(fake_cuda.Stall(), 0.05))
        return sent

    for number in range(3):
        training.optimizer.zero_grad()
        training.backward(number)
        with mock.patch.object(host_shard, "send_number", send_and_stall):
            training.step()
    training.finish()
    for timer in timers:
        timer.join()
    training.check("finished")


def test_a_late_digest_is_no_write() -> None:
    run_ranks(look_late, 2, env=NCCL, timeout=LIMIT_S)


def keep_sources() -> None:
    """Copies of gradients that are made on the GPU, to be sent, stay until they have been sent."""
    start(delay_us=0)
    weight = nn.Parameter(torch.ones(40, 30, device="cuda"))
    optimizer = pydist.ShardedOptimizer(
        [weight], torch.optim.SGD, lr=0.1, offload="cpu", delayed=True
    )
    weight.grad = torch.ones(30, 40, device="cuda").t()  # lies otherwise than its parameter
    copies: list[StorageWeakRef] = []
    send = HostShard.send_gradients

    def send_gradients(self: HostShard, gradients: list[Tensor | None], is_reduced: bool) -> None:
        copies.extend(StorageWeakRef(g.untyped_storage()) for g in gradients if g is not None)
        send(self, gradients, is_reduced)

    with streams_alone(), mock.patch.object(HostShard, "send_gradients", send_gradients):
        stall = stalled(optimizer._shard_step.steps[0]._streams.to_host)
        optimizer.step()
        on_their_way = [copy.expired() for copy in copies]
        stall.release()
        optimizer.finish()
    assert on_their_way == [False]
    assert [copy.expired() for copy in copies] == [True]


def test_copies_of_gradients_stay_until_they_are_sent() -> None:
    run_ranks(keep_sources, 2, env=NCCL, timeout=LIMIT_S)


class Own(nn.Parameter):
    """A class that does not wait for values by itself."""


def step_by_hand(delayed: bool) -> None:
    """Gradients of something else, which are late, and parameters that don't wait when read."""
    rank, size = start(delay_us=0)
    assert size == 2
    torch.manual_seed(3)
    parameters: list[Tensor] = [
        kind(torch.randn(40, 30, device="cuda")) for kind in (Own, nn.Parameter)
    ]
    optimizer = pydist.ShardedOptimizer(
        parameters, torch.optim.AdamW, lr=0.1, offload="cpu", delayed=delayed
    )
    twin = KernelTwin(optimizer, {p: p for p in parameters})
    to_device = optimizer._shard_step.steps[0]._streams.to_device
    kept = [torch.empty_like(p) for p in parameters]
    options = [dict(group) for group in optimizer.param_groups]
    for number in range(2):
        for p in parameters:
            p.grad = torch.zeros(40, 30, device="cuda")
        gradients = [torch.randn(40, 30) for p in parameters]
        given = [gradient.to("cuda") for gradient in gradients]
        with streams_alone():
            stall = fake_cuda.Stall()
            for p, gradient in zip(parameters, given, strict=True):
                assert p.grad is not None
                p.grad.copy_(gradient)
            timers = [release_soon(stall)]
            # The ranks' values come one after the other.
            timers.append(release_soon(stalled(to_device), 0.35 + 0.25 * rank))
            optimizer.step()
            if delayed:
                optimizer.finish()
            with torch.no_grad():
                for p, values in zip(parameters, kept, strict=True):
                    values.copy_(p)
            for timer in timers:
                timer.join()
        twin.step(dict(zip(parameters, gradients, strict=True)), options)
        for p, values in zip(parameters, kept, strict=True):
            assert torch.equal(flat(values), twin.values[p]), f"step {number}"


@pytest.mark.parametrize("delayed", [False, True])
def test_late_gradients_of_something_else(delayed: bool) -> None:
    run_ranks(step_by_hand, 2, delayed, env=NCCL, timeout=LIMIT_S)
