"""Device tensors over native and gloo: streams, lifetimes, order, failure.

On a real GPU that the ranks share, or on the fake CUDA device. What they compute is the conformance
suite's.
"""

from __future__ import annotations

import os
import threading
import time
import warnings

import fake_cuda
import pytest
import staged_gpu
import torch
import torch.distributed as dist
from fake_cuda import needs_fake_cuda
from launch import run_ranks
from staged_gpu import devices, needs_gpu
from staged_tensors import BACKENDS, BIG, filled, on_device, start
from torch import Tensor, nn
from training import TIME_LIMIT, Cut, batch, joined, loss_of_cut, train_like_reference

import pydist

pytestmark = [needs_gpu, TIME_LIMIT]


def streams_and_lifetimes() -> None:
    rank, size = start()
    total = float(sum(range(1, size + 1)))

    # What the current stream was given before comes before, on any stream and device.
    for device in devices():
        with staged_gpu.stream(device):
            mine = filled(rank + 1.0, device=device)
            pydist.all_reduce(mine)
        # Finished for all streams, also those that have waited for nothing.
        assert bool((mine == total).all())

    # Results that only the handle holds, inputs that are let go of at once.
    works = [pydist.all_reduce(filled(1.0), async_op=True) for _ in range(4)]
    out = torch.empty(size * BIG, device="cuda")
    works.append(pydist.all_gather(filled(rank + 1.0), out=out, async_op=True))
    junk = [torch.full((BIG,), -1.0, device="cuda") for _ in range(4)]
    for work in works:
        work.wait()
    assert [float(block[0]) for block in out.view(size, -1)] == [1.0, 2.0]
    assert all(bool((block == block[0]).all()) for block in out.view(size, -1))
    del junk

    # An output that an earlier kernel still reads is not overwritten under it.
    source = torch.full((BIG,), 5.0, device="cuda")
    seen = torch.zeros(BIG, device="cuda").copy_(source)
    seen.add_(source)
    pydist.broadcast(source.fill_(rank + 7.0), 0)
    assert bool((source == 7.0).all())
    assert bool((seen == 10.0).all())

    # Non-contiguous results are in place for every stream when the handle says so.
    staged_gpu.set_delay_us(20_000)
    for _ in range(3):
        grid = filled(rank + 1.0, 300).view(3, -1).t()
        work = pydist.all_reduce(grid, async_op=True)
        work.wait()
        with staged_gpu.stream():
            assert bool((grid == total).all())
    staged_gpu.set_delay_us(300)

    # Host and device in turn: one order, on all ranks.
    host = [torch.full((7,), float(i)) for i in range(20)]
    device = [filled(i + 1.0, 20_000) for i in range(20)]
    handles = []
    for a, b in zip(host, device, strict=True):
        handles.append(pydist.all_reduce(b, async_op=True))
        handles.append(pydist.all_reduce(a, async_op=True))
        if rank == 0:
            time.sleep(0.001)
    handles[-1].wait()
    assert all(handle.is_completed() for handle in handles)
    for i, (a, b) in enumerate(zip(host, device, strict=True)):
        assert a.tolist() == [2.0 * i] * 7
        assert bool((b == 2.0 * (i + 1)).all())

    # Messages keep their order whatever they are made of, and pass collectives by.
    peer = 1 - rank
    late = pydist.all_reduce(filled(1.0), async_op=True) if rank == 0 else None
    sent = []
    for i in range(6):
        message = filled(float(i), 500) if i % 2 else torch.full((500,), float(i))
        sent.append(pydist.send(message, peer, async_op=True))
    for i in range(6):
        got = torch.empty(500, device="cpu" if i % 2 else "cuda")
        assert pydist.recv(got, peer) == peer
        assert bool((got == float(i)).all())
    late = late or pydist.all_reduce(filled(1.0), async_op=True)
    for work in [*sent, late]:
        work.wait()

    # Slots are pinned, in the heap where there is one, and go with their group.
    if not staged_gpu.IS_REAL:
        assert fake_cuda.pinned_bytes() + fake_cuda.registered_bytes() >= 3 * 65536
        assert (fake_cuda.registered_bytes() > 0) == (pydist.backend() == "native")
    memory = pydist.symmetric_empty(5, device=devices()[-1])
    assert str(memory.device) == devices()[-1]
    pydist.shutdown()
    staged_gpu.synchronize()
    assert staged_gpu.IS_REAL or fake_cuda.registered_bytes() == 0


@BACKENDS
def test_streams_and_lifetimes(backend: str) -> None:
    on_device(backend, streams_and_lifetimes)


def training() -> None:
    rank, size = start()
    # On one device, then cut over two devices and the CPU: three threads run hooks.
    for first, second in (("cuda:0", device) for device in devices()):
        module, reference = Cut.with_reference(first, second)
        if rank != 0:
            for parameter in module.parameters():
                parameter.data.add_(1.0)  # the values come from rank 0
        model = pydist.DataParallel(module, bucket_cap_mb=0.0005)
        assert {str(p.device) for p in model.parameters()} == {first, second, "cpu"}
        for step in range(4):
            with staged_gpu.streams_in_turn():
                train_like_reference(model, reference, loss_of_cut, steps=[step])
            for name, parameter in model.named_parameters():
                unused = name.startswith("never")
                assert unused or parameter.grad.device == parameter.device, name
        with model.no_sync():
            loss_of_cut(model, rank, 8).backward()
        loss_of_cut(model, rank, 9).backward()

    # Half the bytes between hosts, of which there is one, and hooks of torch's, whose futures know
    # the device.
    for compress, hook in (("bf16", None), (None, "fp16_compress_hook"), (None, "noop")):
        torch.manual_seed(6)
        model = pydist.DataParallel(nn.Linear(40, 30).to("cuda"), compress=compress)
        if hook == "fp16_compress_hook":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
        for step in range(3):
            inputs = [batch(r, 4, 40, step=step, dtype=torch.float32) for r in range(size)]
            model.zero_grad()
            model(inputs[rank].to("cuda")).square().mean().backward()
            copy = nn.Linear(40, 30)
            copy.load_state_dict(model.state_dict())
            copy(torch.cat(inputs)).square().mean().backward()
            # A GPU adds in an order of its own.
            exact = 1e-5 if staged_gpu.IS_REAL else 1e-6
            tolerance = 0.02 if hook == "fp16_compress_hook" else exact
            torch.testing.assert_close(
                model.weight.grad.cpu(), copy.weight.grad, rtol=tolerance, atol=tolerance
            )

    # torch's own wrapper, on the process group.
    torch.manual_seed(7)
    module = nn.Linear(4, 2, dtype=torch.float64).to("cuda")
    wrapped = nn.parallel.DistributedDataParallel(module)
    wrapped(batch(rank, 3, 4).to("cuda")).sum().backward()
    mean = torch.stack([batch(r, 3, 4).sum(0) for r in range(size)]).mean(0)
    torch.testing.assert_close(module.weight.grad.cpu(), mean.expand(2, 4))


class Pair(nn.Module):
    """Two weights, each on a device of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False).to("cuda:0")
        self.second = nn.Linear(3, 2, bias=False).to("cuda:1")

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x.to("cuda:0")), self.second(x.to("cuda:1"))
        return first.cpu().sum() + second.cpu().sum()


def bucket_of_another_thread() -> None:
    """A bucket that another device's thread launches waits for the stream of its own gradients."""
    rank, size = start()
    with fake_cuda.Stream(0), fake_cuda.Stream(1):
        model = pydist.DataParallel(Pair(), bucket_cap_mb=1)
        stalls: list[object] = []

        def stall(_gradient: Tensor) -> None:
            stalls.append(fake_cuda.Stall(0))
            threading.Timer(0.6, stalls[-1].release).start()  # type: ignore[attr-defined]

        # Buckets go in the order second, first; here the first is complete before.
        model.first.weight.register_hook(stall)
        model.second.weight.register_hook(lambda _gradient: time.sleep(0.3))
        inputs = [batch(r, 4, 3, dtype=torch.float32) for r in range(size)]
        model(inputs[rank]).backward()
        assert len(stalls) == 1
    mean = torch.stack([x.sum(0) for x in inputs]).mean(0).expand(2, 3)
    for weight in (model.first.weight, model.second.weight):
        torch.testing.assert_close(weight.grad.cpu(), mean)


@needs_fake_cuda
def test_a_bucket_waits_for_its_streams() -> None:
    on_device("native", bucket_of_another_thread)


@BACKENDS
def test_training(backend: str) -> None:
    on_device(backend, training)


def alone() -> None:
    start()
    communicator = pydist.job.groups.communicator_of()
    mine = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for op, factor in (("sum", 1.0), ("mean", 1.0), ("premul_sum", 0.3)):
        for wire in (None, torch.bfloat16, torch.float16):
            expected = torch.empty_like(mine)
            communicator.all_reduce(mine, expected, op, factor=factor, wire_dtype=wire)
            result = torch.empty(1000, device="cuda")
            communicator.all_reduce(mine.to("cuda"), result, op, factor=factor, wire_dtype=wire)
            assert torch.equal(result.cpu(), expected), (op, wire)


def test_one_rank_alone_gets_the_bits_of_the_cpu() -> None:
    run_ranks(alone, 1, env={"PYDIST_BACKEND": "native"}, timeout=35)


def without_devices() -> list[str]:
    joined()
    devices: list[str] = pydist.job.groups.communicator_of().capabilities()["devices"]
    return devices


@pytest.mark.skipif(staged_gpu.IS_REAL, reason="torch sees a GPU")
def test_torch_without_cuda_stages_nothing() -> None:
    assert run_ranks(without_devices, 1) == [["cpu"]]


def pinned_for_this_rank() -> None:
    fake_cuda.install()
    if os.environ["RANK"] == "1":
        fake_cuda.refuse_to_register(True)
    _, size = start()
    # All on the second device: the first has nothing to do with it, and keeps its memory.
    for _ in range(2):
        tensor = filled(1.0, device="cuda:1")
        pydist.all_reduce(tensor)
        assert bool((tensor == size).all())
    # A refusal is nobody's but the memory's: the next kernel would be blamed for what stays.
    assert fake_cuda.last_error() == 0
    assert (fake_cuda.registered_bytes() > 0) == (pydist.rank() == 0)
    pydist.shutdown()
    assert fake_cuda.registering_devices() == [1]


@needs_fake_cuda
def test_memory_is_pinned_for_the_device_at_work() -> None:
    on_device("native", pinned_for_this_rank)


def on_the_second_device() -> dict[str, list[int]]:
    fake_cuda.install()
    fake_cuda.set_device(1)  # as pydist.init does where it deals out real ones
    rank, _ = start()
    device = "cuda:1"
    opened: dict[str, list[int]] = {}

    def note(step: str) -> None:
        staged_gpu.synchronize()
        opened[step] = fake_cuda.contexts()

    pydist.all_reduce(filled(1.0, device=device))
    note("a collective")
    pydist.all_reduce(filled(1.0, 300, device=device).view(3, -1).t(), async_op=True).wait()
    note("results that are copied into place")
    for kind in (pydist.send, pydist.recv) if rank == 0 else (pydist.recv, pydist.send):
        kind(filled(1.0, device=device), 1 - rank)
    note("messages")
    model = pydist.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(device))
    for _ in range(2):
        model(torch.ones(3, 4, device=device)).sum().backward()
    note("training")
    devices_of_callbacks: list[int] = []
    future = dist.all_reduce(filled(1.0, device=device), async_op=True).get_future()
    future.then(lambda _: devices_of_callbacks.append(fake_cuda.current_device())).wait()
    del future
    note("a future")
    assert devices_of_callbacks == [1]
    # Threads have not chosen what the main one has.
    thread = threading.Thread(target=pydist.all_reduce, args=[filled(1.0, device=device)])
    thread.start()
    thread.join()
    note("another thread of the user's")
    pydist.shutdown()
    note("the end")
    return opened


@needs_fake_cuda
@BACKENDS
def test_no_thread_opens_the_context_of_another_device(backend: str) -> None:
    for opened in on_device(backend, on_the_second_device):
        assert isinstance(opened, dict)
        assert opened == {step: [1] for step in opened}


def on_another_stream() -> list[str]:
    rank, _ = start()
    torch.set_warn_always(True)
    module, reference = Cut.with_reference("cuda:0", "cuda:0")
    model = pydist.DataParallel(module)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3):
            with staged_gpu.streams_in_turn():
                train_like_reference(model, reference, loss_of_cut, steps=[step])
        loss_of_cut(model, rank, 5).backward()
    return [str(warning.message) for warning in warned if "stream" in str(warning.message)]


def test_gradients_accumulate_on_the_stream_of_the_step() -> None:
    assert on_device("native", on_another_stream) == [[], []]


def inputs_are_moved() -> None:
    start()
    last = torch.device(devices()[-1])
    module = nn.Linear(3, 2).to(last)
    for device_ids in ([last.index], [last]):
        model = pydist.DataParallel(module, device_ids=device_ids)
        assert model(torch.ones(4, 3)).device == last
        assert model(input=torch.ones(4, 3, device="cuda:0")).device == last
    for wrong, said in (([0], f"parameters are on {last}: move"), ([0, 0], "one replica alone")):
        if wrong == [last.index]:
            continue
        with pytest.raises(pydist.InvalidUsage, match=said):
            pydist.DataParallel(module, device_ids=wrong)
    # As in torch.
    with pytest.raises(pydist.InvalidUsage, match="device_ids=None for a module on the CPU"):
        pydist.DataParallel(nn.Linear(3, 2), device_ids=[0])


def test_forward_moves_its_arguments_to_the_device_named() -> None:
    run_ranks(inputs_are_moved, 1, timeout=35)


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        for i in range(5):
            self.register_buffer(f"table{i}", torch.full((4,), float(i)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.inside(x))
        for i in range(5):
            y = y + getattr(self, f"table{i}")
        return y


def buffers_on_a_device() -> None:
    rank, _ = start()
    model = pydist.DataParallel(WithTable().to("cuda"))
    asked: list[object] = []
    look = Tensor.__bool__

    def note(tensor: Tensor) -> bool:
        asked.append(tensor)
        return look(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__bool__", note)
        # Of the first rounds in which no layer keeps statistics, three look at values.
        for is_training, questions in ((True, 0), *[(False, 1)] * 3, (True, 0), (False, 0)):
            model.train(is_training)
            asked.clear()
            model(torch.ones(4, 3, device="cuda") * (rank + 1)).sum().backward()
            assert len(asked) == questions, "each is a wait for the device"


def test_buffers_cost_a_wait_in_the_first_rounds_alone() -> None:
    on_device("native", buffers_on_a_device)


# More than there are buffers.
_WRITES = 11


def written_past_the_counters(rounds_before: int) -> list[tuple[float, list[str]]]:
    """What a buffer is after each of some rounds, before which every rank writes another."""
    rank, _ = start()
    model = pydist.DataParallel(WithTable().to("cuda")).eval()

    def step() -> None:
        model(torch.ones(4, 3, device="cuda")).sum().backward()

    for _ in range(rounds_before):
        step()
    found = []
    for number in range(1, _WRITES + 1):
        model.table3.data[2] = rank + 10.0 * number
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        told = [str(each.message) for each in caught if "past torch's version" in str(each.message)]
        found.append((float(model.table3[2]), told))
    assert float(model.table3[1]) == 3.0
    return found


def test_what_is_written_past_torchs_counters_is_found_in_the_first_rounds() -> None:
    for found in on_device("native", written_past_the_counters, 1):
        assert found == [(10.0 * number, []) for number in range(1, _WRITES + 1)]


def test_what_is_written_past_torchs_counters_later_is_found_late_and_told() -> None:
    """One of the eight buffers is looked at in each round, and another one in the first."""
    by_rank = on_device("native", written_past_the_counters, 4)
    for rank, found in enumerate(by_rank):
        values, told = zip(*found, strict=True)
        # Those of rank 0 are what the others get.
        are_right = [value == 10.0 * (n + 1) for n, value in enumerate(values)]
        late = are_right.index(True)
        assert late > 0 or rank == 0
        assert values[late:] == tuple(10.0 * (n + 1) for n in range(late, _WRITES))
        warned = [each for each in told if each]
        assert [len(each) for each in warned] == [1]
        assert "buffer table3 has changed past torch's version counters" in warned[0][0]
