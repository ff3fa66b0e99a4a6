"""Capture into CUDA graphs: what a graph may hold, and who is told where it may not.

On a GPU that the ranks share, or on fakes.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from typing import Any

import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import Graph, needs_gpu_ranks
from launch import run_ranks
from torch import Tensor, nn
from training import TIME_LIMIT, batch, joined

import pydist

pytestmark = [needs_gpu_ranks, TIME_LIMIT]

NCCL: dict[str, str | None] = {"PYDIST_BACKEND": "nccl"}
# Tensors on the GPU pass through the host.
STAGED: dict[str, str | None] = {"PYDIST_BACKEND": "native", "PYDIST_STAGING_BYTES": "65536"}


def start() -> tuple[int, int]:
    gpu_ranks.install(delay_us=300)
    return joined()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.first(x)
        return self.second(y) if both else y


def backward_alone() -> None:
    rank, size = start()
    torch.manual_seed(3)
    model = pydist.DataParallel(Branches().to("cuda"))
    inputs = batch(rank, 3, 4).to("cuda")
    for _ in range(3):
        model(inputs, True).sum().backward()
        expected = model.second.weight.grad.clone()
        model.zero_grad(set_to_none=True)
    with Graph() as graph:
        model(inputs, True).sum().backward()
    graph.replay()
    gpu_ranks.synchronize()
    mine = model.second.weight.grad.clone()
    torch.testing.assert_close(mine, expected)
    theirs = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(theirs, mine)
    assert all(torch.equal(mine, other) for other in theirs)
    model.zero_grad(set_to_none=True)
    with (
        pytest.raises(pydist.InvalidUsage, match=r"second.weight got a gradient on 0 of 2"),
        Graph(),
    ):
        model(inputs, False).sum().backward()
    with pytest.raises(pydist.InvalidUsage, match="gave it a weight"), Graph(), model.weighted(2.0):
        model(inputs, True).sum().backward()


def test_a_backward_is_captured_or_says_why_not() -> None:
    run_ranks(backward_alone, 2, env=NCCL, timeout=35)


def hold_beside_a_graph() -> None:
    """A replay writes where gradients were when it was captured: nobody may hold others there."""
    rank, _ = start()
    model = pydist.DataParallel(Branches().to("cuda"))
    inputs = batch(rank, 3, 4).to("cuda")

    def backward() -> None:
        model(inputs, True).sum().backward()

    for _ in range(3):
        backward()
        expected = model.first.weight.grad.cpu()
        held = model.first.weight.grad
        model.zero_grad(set_to_none=True)
    message = "holds a gradient of parameter first.weight of an earlier step.*CUDA graph"
    with pytest.raises(pydist.InvalidUsage, match=message), Graph():
        backward()
    torch.testing.assert_close(held.cpu(), expected)
    del held
    for _ in range(2):
        backward()
        model.zero_grad(set_to_none=True)
    with Graph() as graph:
        backward()
    held = model.first.weight.grad
    graph.replay()
    gpu_ranks.synchronize()
    torch.testing.assert_close(held.cpu(), expected)
    # What the graph writes stays where it is; so does what it is added to.
    backward()
    assert model.first.weight.grad is held
    torch.testing.assert_close(held.cpu(), 2 * expected)
    model.zero_grad(set_to_none=True)
    with pytest.raises(pydist.InvalidUsage, match=message):
        backward()
    del held
    backward()
    torch.testing.assert_close(model.first.weight.grad.cpu(), expected)


def test_what_is_held_in_the_memory_of_a_graph_is_refused() -> None:
    run_ranks(hold_beside_a_graph, 2, env=NCCL, timeout=35)


def backward_that_is_compared() -> None:
    rank, _ = start()
    torch.manual_seed(3)
    model = pydist.DataParallel(Branches().to("cuda"))
    inputs = batch(rank, 3, 4).to("cuda")
    for _ in range(2):
        for _ in range(2):
            model(inputs, True).sum().backward()
            model.zero_grad(set_to_none=True)
        # Nothing has a value to compare before it is replayed.
        with pytest.raises(pydist.InvalidUsage, match="PYDIST_DEBUG"), Graph():
            model(inputs, True).sum().backward()
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_gradients_are_not_compared_in_a_capture(algorithm: str) -> None:
    env = {**NCCL, "PYDIST_DEBUG": "1", "PYDIST_ALGORITHM": algorithm}
    run_ranks(backward_that_is_compared, 2, env=env, timeout=35)


def whole_step() -> None:
    rank, size = start()
    torch.manual_seed(4)
    # Its gradients are the same in every step, so it does not matter that the fakes' graph has no
    # forward.
    reference = nn.Linear(4, 2, dtype=torch.float64)
    module = nn.Linear(4, 2, dtype=torch.float64).to("cuda")
    module.load_state_dict(reference.state_dict())
    model = pydist.DataParallel(module)
    ours, theirs = (
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for net in (model, reference)
    )
    inputs = batch(rank, 3, 4).to("cuda")

    def step() -> None:
        ours.zero_grad(set_to_none=True)
        model(inputs).sum().backward()
        ours.step()

    for _ in range(3):
        step()
    with Graph() as graph:
        step()
    rounds = model.stats().rounds
    for _ in range(4):
        graph.replay()
    gpu_ranks.synchronize()
    assert model.stats().rounds == rounds, "a replay is nothing of the hosts'"
    for _ in range(3 + 4):
        theirs.zero_grad()
        for r in range(size):
            (reference(batch(r, 3, 4)).sum() / size).backward()
        theirs.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.cpu(), reference.get_parameter(name))


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_with_its_optimizer_is_captured(size: int) -> None:
    run_ranks(whole_step, size, env=NCCL, timeout=35)


def future_in_a_capture() -> None:
    rank, size = start()
    tensor = torch.zeros(4, device="cuda")
    seen = torch.zeros(4, device="cuda")
    dist.all_reduce(tensor)
    with Graph() as graph:
        tensor.fill_(rank + 1.0)
        # As DDP does with its buckets.
        (result,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
        seen.copy_(result)
    tensor.zero_()
    graph.replay()
    gpu_ranks.synchronize()
    assert seen.tolist() == [size * (size + 1) / 2] * 4


def test_futures_are_captured() -> None:
    run_ranks(future_in_a_capture, 2, env=NCCL, timeout=35)


def copies_in_a_capture() -> None:
    """What is not dense is copied into place, and another stream waits for that too."""
    rank, size = start()
    tensor = torch.full((4, 3), rank + 1.0, device="cuda")
    seen = torch.zeros(4, 2, device="cuda")
    dist.all_reduce(torch.zeros(1, device="cuda"))
    with Graph() as graph:
        work = dist.all_reduce(tensor[:, :2], async_op=True)
        with gpu_ranks.stream():
            work.wait()
            seen.copy_(tensor[:, :2])
            done = torch.Event("cuda")
            done.record()
        done.wait()
    graph.replay()
    gpu_ranks.synchronize()
    total = size * (size + 1) / 2
    assert tensor.tolist() == [[total, total, rank + 1.0]] * 4
    assert seen.tolist() == [[total] * 2] * 4


def test_copies_are_captured() -> None:
    run_ranks(copies_in_a_capture, 2, env=NCCL, timeout=35)


def raise_in_a_capture(who_raises: set[int], who_captures: set[int], is_early: bool) -> None:
    """Whose steps after it average right, or end: no rank launches what another only records."""
    rank, size = start()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    alone = copy.deepcopy(net)
    # Buckets of one size, so that one could be taken for another.
    model = pydist.DataParallel(net.to("cuda"), broadcast_buffers=False, bucket_cap_mb=0.0002)

    def inputs(of: int) -> Tensor:
        return torch.full((4, 8), 1.0 + of)

    on_gpu = inputs(rank).to("cuda")  # which no capture takes

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss = model(on_gpu).sum()
        if fails_early:
            loss.grad_fn.next_functions[0][0].register_prehook(fail)
        loss.backward()

    def fail(_: Any) -> None:
        raise OSError("out of luck")

    fails_early = False
    for _ in range(3):
        step()
    # Before the first gradient, or in the last.
    fails_early = is_early and rank in who_raises
    hook = None
    if not is_early and rank in who_raises:
        hook = next(net.parameters()).register_hook(fail)
    captures = Graph() if rank in who_captures else contextlib.nullcontext()
    # On a GPU the end of the capture raises too: what was cut short is not joined.
    with pytest.raises((OSError, RuntimeError)), captures:
        step()
    fails_early = False
    if hook is not None:
        hook.remove()
    if who_captures != set(range(size)):
        # Somebody's GPU waits for what another's only records.
        with pytest.raises(pydist.Error, match="backward raised on rank 0"):
            step()
        return
    for _ in range(3):
        step()
        gpu_ranks.synchronize()
        alone.zero_grad()
        for of in range(size):
            (alone(inputs(of)).sum() / size).backward()
        for parameter, expected in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), expected.grad)


@pytest.mark.parametrize(
    ("who_raises", "who_captures"), [({0}, {0, 1}), ({0, 1}, {0, 1}), ({0}, {0}), ({0}, {1})]
)
@pytest.mark.parametrize("is_early", [False, True])
def test_what_raises_in_a_captured_backward(
    who_raises: set[int], who_captures: set[int], is_early: bool
) -> None:
    run_ranks(raise_in_a_capture, 2, who_raises, who_captures, is_early, env=NCCL, timeout=35)


def one_rank_captures_alone() -> None:
    rank, _ = start()
    model = pydist.DataParallel(nn.Linear(4, 2).to("cuda"))
    inputs = torch.ones(3, 4, device="cuda")
    model(inputs).sum().backward()
    began = time.monotonic()
    # The end of the group breaks the capture: on a GPU it is CUDA that says so, in the handling of
    # the error that says why.
    with (
        pytest.raises((pydist.InvalidUsage, RuntimeError)) as raised,
        Graph() if rank == 0 else contextlib.nullcontext(),
    ):
        model(inputs).sum().backward()
    why = f"{raised.value} {raised.value.__context__}"
    assert "rank 1 does not capture it; do so on all ranks" in why
    # What rank 1's GPU has been given for the bucket ends, though rank 0's never comes to it.
    gpu_ranks.synchronize()
    assert time.monotonic() - began < 15, "of 600 seconds that an operation has"
    with pytest.raises(pydist.Error, match=r"wrap the module anew|rank 1 does not"):
        model(inputs).sum().backward()


def test_a_rank_that_captures_alone_ends_the_others_step() -> None:
    run_ranks(one_rank_captures_alone, 2, env=NCCL, timeout=35)


def staged() -> None:
    rank, size = start()
    model = pydist.DataParallel(nn.Linear(4, 2).to("cuda"))
    inputs = torch.full((3, 4), rank + 1.0, device="cuda")

    def check_gradient() -> None:
        model.zero_grad()
        model(inputs).sum().backward()
        gradient = model.weight.grad
        assert bool((gradient == 3 * (size + 1) / 2).all()), gradient

    check_gradient()
    refused = pytest.raises(pydist.InvalidUsage, match="cannot be part of a CUDA graph")
    with refused, Graph():
        model(inputs).sum().backward()
    check_gradient()
    # Whoever doesn't capture is not left waiting for the one that does.
    began = time.monotonic()
    if rank == 0:
        with refused, Graph():
            model(inputs).sum().backward()
    else:
        with pytest.raises(pydist.Error, match="backward raised on rank 0"):
            model(inputs).sum().backward()
    assert time.monotonic() - began < 15, "of 600 seconds that an operation has"
    check_gradient()

    # What is under way on our threads and what another thread captures don't mind each other.
    there, back = (torch.full((100_000,), rank + 1.0, device="cuda") for _ in range(2))
    counter = torch.zeros(1, device="cuda")
    for _ in range(3):
        gpu_ranks.synchronize()
        works = [pydist.all_reduce(there, async_op=True)]
        works.append(pydist.send(back, 1 - rank, async_op=True))
        works.append(pydist.recv(torch.empty_like(back), 1 - rank, async_op=True))
        with Graph() as graph:
            counter.add_(1)
            time.sleep(0.1)
        for work in works:
            work.wait()
        graph.replay()
        del graph  # its end would break the next capture
    gpu_ranks.synchronize()
    assert counter.item() == 3
    assert bool((there == 3.0 * size**2).all())


def test_staged_operations_and_captures() -> None:
    run_ranks(staged, 2, env=STAGED, timeout=35)


def beside_a_capture() -> None:
    rank, size = start()
    total = float(size * (size + 1) / 2)
    captured = torch.zeros(4, device="cuda")
    source = torch.full((4,), rank + 1.0, device="cuda")
    other = torch.full((4,), rank + 1.0, device="cuda")
    pydist.all_reduce(other)
    gpu_ranks.synchronize()
    refusals: list[str] = []

    def on_another_stream() -> None:
        with gpu_ranks.stream():
            try:
                pydist.all_reduce(other)
            except pydist.InvalidUsage as error:
                refusals.append(str(error))

    with Graph() as graph:
        captured.copy_(source)
        work = pydist.all_reduce(captured, async_op=True)
        thread = threading.Thread(target=on_another_stream)
        thread.start()
        thread.join()
    work.wait()  # there is nothing to wait for, and no error
    assert len(refusals) == 1
    assert "whose operations another stream captures" in refusals[0]
    # Neither the graph nor the group has come to harm.
    graph.replay()
    gpu_ranks.synchronize()
    assert captured.tolist() == [total] * 4
    pydist.all_reduce(other)
    assert other.tolist() == [size * total] * 4


def test_what_comes_beside_a_capture_is_refused_and_does_no_harm() -> None:
    run_ranks(beside_a_capture, 2, env=NCCL, timeout=35)


def refused_in_a_capture() -> None:
    rank, size = start()
    total = float(size * (size + 1) / 2)
    everybody = list(range(size))
    model = pydist.DataParallel(nn.Linear(4, 2).to("cuda"))
    group = pydist.new_group(everybody)
    of_torch = dist.new_group(everybody)
    captured, source, other = (torch.full((4,), rank + 1.0, device="cuda") for _ in range(3))
    for each in (None, group, of_torch):
        pydist.all_reduce(other.clone(), group=each)
    gpu_ranks.synchronize()
    refused = pytest.raises(
        pydist.InvalidUsage,
        match="while a CUDA graph is being captured, which would not survive it: call it before",
    )
    with Graph() as graph:
        captured.copy_(source)
        pydist.all_reduce(captured)
        for call in (
            pydist.shutdown,
            group.shutdown,
            lambda: dist.destroy_process_group(of_torch),
            dist.destroy_process_group,
            lambda: pydist.new_group(everybody),
            lambda: pydist.DataParallel(nn.Linear(4, 2).to("cuda")),
        ):
            with refused:
                call()
    graph.replay()
    gpu_ranks.synchronize()
    assert captured.tolist() == [total] * 4
    # All of them live on.
    for each in (None, group, of_torch):
        tensor = other.clone()
        pydist.all_reduce(tensor, group=each)
        assert tensor.tolist() == [total] * 4
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    del graph
    group.shutdown()
    dist.destroy_process_group(of_torch)
    pydist.shutdown()
    assert not pydist.is_initialized()


def test_groups_neither_begin_nor_end_in_a_capture() -> None:
    run_ranks(refused_in_a_capture, 2, env=NCCL, timeout=35)


def ended_before_a_capture() -> None:
    rank, size = start()
    tensor = torch.full((4,), rank + 1.0, device="cuda")
    old = dist.new_group(list(range(size)))
    dist.all_reduce(tensor.clone(), group=old)
    gpu_ranks.synchronize()
    if rank == 1:
        time.sleep(0.3)  # NCCL waits for all ranks
    dist.destroy_process_group(old)
    with Graph() as graph:
        time.sleep(0.6)  # the forward, say: nobody knows of the capture yet
        dist.all_reduce(tensor)
    graph.replay()
    gpu_ranks.synchronize()
    assert tensor.tolist() == [size * (size + 1) / 2] * 4


def test_a_group_that_is_destroyed_before_a_capture_leaves_it_whole() -> None:
    run_ranks(ended_before_a_capture, 2, env=NCCL, timeout=35)
