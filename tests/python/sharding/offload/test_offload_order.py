"""Offloaded steps: what is waited for and by whom, how long memory stays, and what raises."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any
from unittest import mock

import fake_cuda
import pytest
import torch
from fake_cuda import needs_fake_cuda
from gpu_ranks import needs_gpu_ranks
from gpu_twins import ENVIRONMENTS
from launch import rank_outcomes, run_ranks
from offload_twins import Offloaded, flat
from torch import Tensor

import pydist
from pydist.sharding.offload.host_shard import HostShard
from pydist.sharding.offload.offload import Offload
from pydist.sharding.offload.offloaded_step import OffloadedStep

LIMIT_S = 40.0

pytestmark = [needs_gpu_ranks, needs_fake_cuda, pytest.mark.timeout(60)]

NCCL = ENVIRONMENTS["nccl"]


def copies_in(act: Any) -> list[str]:
    """The threads on which gradients have started on their way to the host."""
    threads: list[str] = []
    copy = HostShard._copy_reduced_here

    def copying(self: HostShard) -> torch.Event:
        threads.append(threading.current_thread().name)
        return copy(self)

    with mock.patch.object(HostShard, "_copy_reduced_here", copying):
        act()
    return threads


def copy_during_backward(dtype: torch.dtype) -> None:
    """All gradients go in backward. Clipping copies them again only where it rounds."""
    training = Offloaded(dtype=dtype)
    steps = training.optimizer._shard_step.steps
    for number in range(4):
        training.optimizer.zero_grad()
        sent = [s for s in steps if s.host._reduced is not None and s.host._reduced.numel()]
        in_backward = copies_in(lambda step=number: training.backward(step))
        if number > 1:  # the plan of the buckets is settled, and no gradient comes late
            assert len(in_backward) == len(sent)
        training.optimizer.clip_grad_norm_(0.01)
        in_step = copies_in(training.step)
        if number > 1:
            # One that no rank uses is in a bucket that has no gradient at all.
            rounded = len(sent) if dtype == torch.bfloat16 else 0
            assert len(in_step) <= rounded
        training.check(f"step {number}")
    training.optimizer.zero_grad()
    training.backward(9)
    assert copies_in(training.step) == []
    training.check("not clipped")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_during_backward(dtype: torch.dtype) -> None:
    run_ranks(copy_during_backward, 2, dtype, env=NCCL, timeout=LIMIT_S)


def count_waits(delayed: bool) -> None:
    """The host waits for events of copies alone, and of a delayed step for none."""
    training = Offloaded(delayed=delayed)
    waits: list[str] = []
    on_host = OffloadedStep.run_on_host
    may_go_on = threading.Event()

    def run_on_host(self: OffloadedStep) -> None:
        # What the thread that steps waits for is no wait of step().
        assert not delayed or may_go_on.wait(LIMIT_S)
        on_host(self)

    for number in range(4):
        training.optimizer.zero_grad()
        training.backward(number)
        training.optimizer.clip_grad_norm_(0.01)
        fake_cuda.synchronize()
        training.optimizer._shard_step.join()
        fake_cuda.take_host_waits()
        may_go_on.clear()
        with mock.patch.object(OffloadedStep, "run_on_host", run_on_host):
            with fake_cuda.Stream():  # the copies are done long before the host asks, or never
                training.optimizer.step()
            in_step = fake_cuda.take_host_waits()
            may_go_on.set()
            training.optimizer._shard_step.join()
        assert not (delayed and in_step), in_step
        waits += in_step + fake_cuda.take_host_waits()
    assert set(waits) <= {"an event"}


@pytest.mark.parametrize("delayed", [False, True])
def test_the_host_waits_for_copies_alone(delayed: bool) -> None:
    run_ranks(count_waits, 2, delayed, env=NCCL, timeout=LIMIT_S)


def step_before_the_host_has() -> None:
    """step() returns while the host has yet to step, and the next one waits for that."""
    training = Offloaded(delayed=True)
    step = OffloadedStep.run_on_host
    may_go_on = threading.Event()

    def run_on_host(self: OffloadedStep) -> None:
        assert may_go_on.wait(LIMIT_S)
        step(self)

    with mock.patch.object(OffloadedStep, "run_on_host", run_on_host):
        for number in range(3):
            training.optimizer.zero_grad()
            training.backward(number)
            may_go_on.set()
            training.optimizer._shard_step.join()
            may_go_on.clear()
            training.step()
            # The twin is as late: forward and backward see nothing of this step.
            training.check(f"step {number}")
        may_go_on.set()
        training.finish()
    training.check("finished")


def test_a_delayed_step_returns_at_once() -> None:
    run_ranks(step_before_the_host_has, 2, env=NCCL, timeout=LIMIT_S)


def finish_amid_gathers() -> None:
    """finish() right after a step, whose upload is still gathered where that of the next one goes.

    By the host, which takes part: on NCCL it is the streams that keep the order.
    """
    training = Offloaded(delayed=True, delay_us=3000)
    take_over = Offload.take_over
    is_gathering: list[bool] = []

    def taking_over(self: Offload) -> None:
        works = [
            g._work for g in (s.bucket.gather for s in training.optimizer._shard_step.steps) if g
        ]
        is_gathering.append(not all(work.is_completed() for work in works))
        take_over(self)

    training.train(0)
    training.train(1)
    with mock.patch.object(Offload, "take_over", taking_over):
        training.finish()
    assert is_gathering == [False]
    training.check("finished")


def test_finish_waits_for_what_is_still_gathered() -> None:
    run_ranks(finish_amid_gathers, 2, env=ENVIRONMENTS["native"], timeout=LIMIT_S)


def fill_options_amid_a_step() -> None:
    """A scheduler fills a rate that is a tensor while the host has yet to step by the old one."""
    rate = torch.tensor(0.5)
    training = Offloaded(torch.optim.SGD, delayed=True, lr=rate)
    held = Held()
    with mock.patch.object(OffloadedStep, "update", lambda *args: held.update(*args)):
        training.optimizer.zero_grad()
        training.backward(0)
        training.optimizer.step()
        late = (training.gradients(), [{**group, "lr": 0.5} for group in training.options()])
        training.optimizer.param_groups[0]["lr"].fill_(0.25)
        held.may_go_on.set()
        training.optimizer.finish()
    training.twin.step(*late)
    training.check("by the rate of before")


def test_options_of_a_delayed_step_are_those_of_its_beginning() -> None:
    run_ranks(fill_options_amid_a_step, 2, env=NCCL, timeout=LIMIT_S)


def ask_one_rank_for_its_state() -> None:
    """One rank alone looks at its state, and takes it over, while a delayed step is under way."""
    training = Offloaded(delayed=True)
    for number in range(2):
        training.train(number)
    if training.rank == 0:
        training.optimizer.sharded_state()
        training.optimizer.load_state_dict(training.optimizer.state_dict())
    # A gather of rank 0 alone would have met this one.
    assert pydist.all_reduce(torch.ones(1)).item() == training.size
    training.finish()
    training.check("finished")


def test_the_state_of_one_rank_talks_to_nobody() -> None:
    run_ranks(ask_one_rank_for_its_state, 2, env=NCCL, timeout=LIMIT_S)


def forget_all() -> None:
    """Nobody has the optimizer any more while its copies travel, on streams that dawdle."""
    for delayed in (False, True):
        training = Offloaded(delayed=delayed, delay_us=3000)
        training.train(0)
        training.finish()
        values = dict(training.twin.values)
        pinned = weakref.ref(training.optimizer._shard_step.steps[0].host._values)
        model = training.model
        del training.optimizer, training.parameters, training
        gc.collect()
        for p in values:
            assert torch.equal(flat(p), values[p])
        fake_cuda.synchronize()
        # The model stays, whose reducer has watched for the optimizer.
        assert pinned() is None
        assert model is not None
        del model, values, p
        gc.collect()
    fake_cuda.synchronize()
    gc.collect()


def test_memory_stays_until_copies_are_done() -> None:
    run_ranks(forget_all, 2, env=NCCL, timeout=LIMIT_S)


class Held:
    """Steps on the host that wait until somebody lets them go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.ended = 0
        self._update = OffloadedStep.update

    def update(self, step: OffloadedStep, *args: Any) -> None:
        assert self.may_go_on.wait(LIMIT_S)
        self._update(step, *args)
        self.ended += 1


def shut_down_amid_a_step() -> int:
    training = Offloaded(delayed=True)
    held = Held()
    with mock.patch.object(OffloadedStep, "update", lambda *args: held.update(*args)):
        training.optimizer.zero_grad()
        training.backward(0)
        training.optimizer.step()
        threading.Timer(0.3, held.may_go_on.set).start()
        assert held.ended == 0
        pydist.shutdown()
        # The thread is over, and has touched no memory that is gone.
        assert held.ended == len(training.optimizer._shard_step.steps)
    return held.ended


def test_shutdown_waits_for_a_delayed_step() -> None:
    outcomes = rank_outcomes(shut_down_amid_a_step, 2, env=NCCL, timeout=LIMIT_S)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        assert "the last delayed step of a pydist.ShardedOptimizer has reached no" in outcome.output


def fail_on_one_rank(call: str) -> str:
    training = Offloaded(delayed=True)
    for number in range(2):
        training.train(number)

    def update(self: OffloadedStep, *args: Any) -> None:
        raise RuntimeError("the step has no luck")

    training.optimizer.zero_grad()
    training.backward(2)
    training.optimizer._shard_step.join()

    def step() -> None:
        if training.rank == 1:
            with mock.patch.object(OffloadedStep, "update", update):
                training.optimizer.step()
                threads = [t for t in threading.enumerate() if t.name == "pydist-offload"]
                for thread in threads:
                    thread.join()
        else:
            training.optimizer.step()

    def go_on() -> None:
        step()  # another rank may hear of it here already
        if call == "step":
            training.optimizer.zero_grad()
            training.backward(3)
            training.optimizer.step()
            training.optimizer.finish()
        elif call == "finish":
            training.optimizer.finish()
            for p in training.parameters:
                flat(p)
        else:
            training.optimizer.state_dict()  # which talks to nobody
            training.optimizer.finish()

    with pytest.raises((RuntimeError, pydist.Error)) as raised:
        go_on()
    if training.rank == 1:
        assert str(raised.value) == "the step has no luck"
    with pytest.raises(pydist.Error):
        training.optimizer.step()
    return str(raised.value)


@pytest.mark.parametrize("call", ["step", "finish", "state_dict"])
def test_what_a_delayed_step_raises_all_ranks_raise(call: str) -> None:
    told = run_ranks(fail_on_one_rank, 2, call, env=NCCL, timeout=LIMIT_S)
    assert "the delayed step of pydist.ShardedOptimizer raised on rank 1" in told[0]
    assert "the step has no luck" in told[0]


def write_amid_a_delayed_step(how: str) -> str:
    training = Offloaded(delayed=True)
    training.optimizer.zero_grad()
    training.backward(0)
    training.optimizer.step()
    weight = training.model.get_parameter("inside.weight")
    if how == "in place":
        weight.data.mul_(2)
    else:
        weight.data = weight.data * 2

    def go_on() -> None:
        for number in range(1, 3):
            training.optimizer.zero_grad()
            training.backward(number)
            training.optimizer.step()

    with pytest.raises(pydist.Error) as raised:
        go_on()
    return str(raised.value)


@pytest.mark.parametrize("how", ["in place", "other memory"])
def test_writes_amid_a_delayed_step_are_refused(how: str) -> None:
    for told in run_ranks(write_amid_a_delayed_step, 2, how, env=NCCL, timeout=LIMIT_S):
        assert "call optimizer.finish() on all ranks before parameters are written" in told


def refuse(device: str) -> None:
    pydist.init()
    weights: list[Tensor] = [torch.nn.Parameter(torch.ones(3))]
    adam: Any = torch.optim.AdamW

    def message(parameters: Any = weights, optimizer_class: Any = adam, **options: Any) -> str:
        with pytest.raises(pydist.InvalidUsage) as raised:
            pydist.ShardedOptimizer(parameters, optimizer_class, lr=0.1, **options)
        return str(raised.value)

    assert "offload is 'gpu'; it must be None or 'cpu'" in message(offload="gpu")
    assert "delayed is 1; it must be a bool" in message(offload="cpu", delayed=1)
    assert "takes offload='cpu'" in message(delayed=True)
    told = message(optimizer_class=torch.optim.Adagrad, offload="cpu")
    for name in ("torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD", "Adagrad"):
        assert name in told
    assert "share_parameters=True" in message(offload="cpu", share_parameters=True)
    assert "is on cpu, and offload='cpu' keeps" in message(offload="cpu")


def refuse_dtypes() -> None:
    training = Offloaded()
    for dtype, told, options in (
        (torch.complex64, "is torch.complex64, and offload='cpu' takes float16", {}),
        (torch.bfloat16, "which master_weights=False leaves out", {"master_weights": False}),
    ):
        weight = torch.nn.Parameter(torch.ones(3, dtype=dtype, device="cuda"))
        with pytest.raises(pydist.InvalidUsage, match=told):
            pydist.ShardedOptimizer([weight], torch.optim.SGD, lr=0.1, offload="cpu", **options)
    assert training.size == 1


def test_refusals() -> None:
    run_ranks(refuse, 1, "cpu", timeout=LIMIT_S)
    run_ranks(refuse_dtypes, 1, env=NCCL, timeout=LIMIT_S)
