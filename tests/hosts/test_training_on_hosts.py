"""Training over hosts gives what one process gives on the batches of all ranks.

Two ranks are on one host, one is on another; the backend is the one that pydist chooses.
"""

import contextlib
import copy
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from namespaces import Hosts
from ranks_on import RanksOn
from thorough import everyday
from torch import Tensor, nn
from training import (
    LIMIT_S,
    Branches,
    Waves,
    assert_like_reference,
    batch,
    joined,
    train_beside_reference,
    train_like_reference,
    wave_loss,
)

import pydist

pytestmark = pytest.mark.timeout(60)

# Up to here all ranks' gradients are added up in rank order; beyond it each host's are first
# (docs/network.md, "Which way data goes").
ONE_SHOT_BYTES = (128 << 10) // 2


@pytest.fixture(scope="module", params=everyday([2, 1], thorough=([1, 2],)), ids=str)
def ranks_per_host(request: pytest.FixtureRequest) -> list[int]:
    """In float64, (x0 + x1) + x2 of the first is what one host gives, x0 + (x1 + x2) is not."""
    counts: list[int] = request.param
    return counts


@pytest.fixture(scope="module")
def ranks(hosts: Hosts, ranks_per_host: list[int]) -> Iterator[Ranks]:
    with RanksOn(hosts, ranks_per_host) as ranks:
        yield ranks


def run(ranks: Ranks, function: Callable[..., Any], *args: Any) -> None:
    """Calls what returns a model's digest: all ranks end with the same bits."""
    digests = ranks.run(function, *args, timeout=LIMIT_S)
    assert len(set(digests)) == 1, digests


def digest(model: nn.Module) -> str:
    """Of each bit of the parameters and buffers. Between hosts the native backend has made them."""
    assert pydist.backend() == "native"
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def follow_one_process(steps: int) -> tuple[float, str]:
    worst = train_beside_reference("float64", steps, None)
    return worst, pydist.backend()


def test_parity_on_the_whole_batch(ranks: Ranks) -> None:
    """With AdamW, in float64; the bound is that of docs/numerics.md for the ranks of one host."""
    for worst, backend in ranks.run(follow_one_process, 50, timeout=LIMIT_S):
        assert worst < 1e-9
        assert backend == "native"


def wide(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Its gradients are added up host by host."""
    net = nn.Sequential(nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, 6)).to(dtype)
    assert sum(p.nbytes for p in net.parameters()) > ONE_SHOT_BYTES
    return net


def wide_loss(net: nn.Module, rank: int, step: int) -> Tensor:
    dtype = next(net.parameters()).dtype
    loss: Tensor = net(batch(rank, 5, 6, step=step).to(dtype)).sin().mean()
    return loss


def branch_loss(net: nn.Module, rank: int, step: int) -> Tensor:
    """Each rank takes another branch, and nobody the last one, nor what is never used."""
    loss: Tensor = net(batch(rank, 5, 4, step=step), (rank + step) % 3)
    return loss


Loss = Callable[[nn.Module, int, int], Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], Loss, dict[str, Any]]] = {
    "sums by hosts": (wide, wide_loss, {}),
    "a bucket for each parameter": (wide, wide_loss, {"bucket_cap_mb": 1e-6}),
    "unused parameters": (lambda: Branches(4), branch_loss, {"find_unused_parameters": True}),
    "buffers": (Waves, wave_loss, {}),
}


def train(case: str) -> str:
    """Steps of SGD. Gradients are sums of three values, in one order or another."""
    rank, _ = joined()
    make, loss, options = CASES[case]
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(rank)  # the values come from rank 0
    model = pydist.DataParallel(make(), **options)
    train_like_reference(model, reference, loss, steps=range(5))
    return digest(model)


@pytest.mark.parametrize("case", CASES)
def test_parity_after_each_step(ranks: Ranks, case: str) -> None:
    run(ranks, train, case)


def accumulate() -> str:
    rank, size = joined()
    torch.manual_seed(0)
    reference = wide()
    model = pydist.DataParallel(copy.deepcopy(reference))
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        rounds = model.stats().rounds
        for micro in range(3):
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                wide_loss(model, rank, 10 * step + micro).backward()
            for r in range(size):
                (wide_loss(reference, r, 10 * step + micro) / size).backward()
        assert model.stats().rounds == rounds + 1, "only the last backward talks to other ranks"
        ours.step()
        theirs.step()
        assert_like_reference(model, reference)
    return digest(model)


def test_gradient_accumulation(ranks: Ranks) -> None:
    run(ranks, accumulate)


def train_in_16_bits(ranks_per_host: list[int]) -> str:
    """The mean of what the ranks' own gradients are, and these are rounded to bfloat16 already."""
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(wide(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rounding = torch.finfo(torch.bfloat16).eps / 2
    for step in range(3):
        one = copy.deepcopy(model.module)
        each = []
        for r in range(size):
            one.zero_grad()
            wide_loss(one, r, step).backward()
            each.append([p.grad.double() for p in one.parameters() if p.grad is not None])
        optimizer.zero_grad()
        wide_loss(model, rank, step).backward()
        for parameter, *own in zip(model.parameters(), *each, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
            mean = torch.stack(own).mean(0)
            # A sum of two ranks on a host is rounded once, and the mean of all once more.
            first = ranks_per_host.index(2)
            of_host = torch.stack(own[first : first + 2]).sum(0).abs() / size
            bound = rounding * (of_host + mean.abs()) * (1 + 2 * rounding)
            off = (parameter.grad.double() - mean).abs()
            # Numbers below the normal ones are as far apart as the least of these.
            assert bool((off <= bound + torch.finfo(torch.bfloat16).smallest_normal).all())
        optimizer.step()
    return digest(model)


def test_a_model_in_16_bits(ranks: Ranks, ranks_per_host: list[int]) -> None:
    run(ranks, train_in_16_bits, ranks_per_host)


def train_unevenly(counts: list[int]) -> str:
    rank, size = joined()
    torch.manual_seed(0)
    reference = wide()
    model = pydist.DataParallel(copy.deepcopy(reference))
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=True):
        for step in range(counts[rank]):
            ours.zero_grad()
            wide_loss(model, rank, step).backward()
            ours.step()
    for step in range(max(counts)):
        theirs.zero_grad()
        for r in range(size):
            if step < counts[r]:
                (wide_loss(reference, r, step) / size).backward()
        theirs.step()
    assert_like_reference(model, reference, gradients=False)
    return digest(model)


@pytest.mark.parametrize("counts", [[4, 3, 1], [0, 1, 3]], ids=["second ends", "first ends"])
def test_uneven_inputs(ranks: Ranks, counts: list[int]) -> None:
    """All ranks of one host have used up their batches, and those of the other one go on."""
    run(ranks, train_unevenly, counts)


def steps_until_one_has_waited(begun: Path) -> Iterator[int]:
    """Until one has taken a second, on whichever rank, and three more; makes `begun` amid them."""
    left = None
    last = time.monotonic()
    for step in range(100):
        time.sleep(0.1)  # few steps, in which roundings don't add up
        if step == 2:
            begun.touch()
        yield step
        last, longest = time.monotonic(), torch.tensor(time.monotonic() - last)
        pydist.all_reduce(longest, op="max")
        if left is None and longest > 1:
            left = 3
        elif left is not None:
            left -= 1
            if left == 0:
                return
    raise AssertionError("no step has waited for the link")


def train_until_one_step_has_waited(begun: Path) -> str:
    joined()
    torch.manual_seed(0)
    reference = wide()
    model = pydist.DataParallel(copy.deepcopy(reference))
    steps = steps_until_one_has_waited(begun)
    train_like_reference(model, reference, wide_loss, steps=steps)
    return digest(model)


def test_a_link_that_is_cut_for_a_while_only_delays_a_step(
    ranks: Ranks, hosts: Hosts, tmp_path: Path
) -> None:
    """TCP sends again what was lost."""
    begun = tmp_path / "begun"

    def cut_for_a_while() -> None:
        while not begun.exists():
            time.sleep(0.01)
        hosts[1].cut(silently=True)
        time.sleep(2)
        hosts[1].restore()

    cutting = threading.Thread(target=cut_for_a_while, daemon=True)
    cutting.start()
    run(ranks, train_until_one_step_has_waited, begun)
    cutting.join()
