"""Bytes that a sharded optimizer takes on each rank, as the system and torch count them."""

import gc
import itertools
import os
import time
from typing import Any

import pytest
import torch
from launch import run_ranks
from thorough import everyday
from torch import Tensor, nn

import pydist

pytestmark = pytest.mark.timeout(90)

WIDTH = 1024
LAYERS = 4


def shared_bytes() -> int:
    """What backs the shared memory that this process has mapped, all ranks' together."""
    seen = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = f"/proc/self/fd/{descriptor}"
            target = os.readlink(path)
            if "memfd:pydist:heap" in target or "memfd:pydist:one-copy" in target:
                status = os.stat(path)
                seen[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(seen.values())


def storages() -> dict[int, int]:
    """Ordinary tensors' memory, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and type(thing) in (Tensor, nn.Parameter):
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def is_shared(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
            if begin <= address < end:
                return "memfd:pydist" in line
    return False


EVEN = (WIDTH,) * (LAYERS + 1)
# 8 MB in one layer, and 1.3 MB in the others.
UNEVEN = (256, 64, 512, 4096, 64, 16)


def measure(
    dtype: torch.dtype, stage: Any, is_one_copy: bool, widths: tuple[int, ...] = EVEN
) -> tuple[float, ...]:
    """Bytes per parameter of this rank; those of buckets in flight; what was planned for both.

    And those of gradients that stay, and what was planned for them.
    """
    before, shared_before = storages(), shared_bytes()
    layers = [nn.Linear(*pair, bias=False, dtype=dtype) for pair in itertools.pairwise(widths)]
    model = pydist.DataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    del layers
    plan = pydist.plan(model, pydist.world_size(), bucket_cap_mb=0.5, share_parameters=is_one_copy)
    planned = plan.stage1 if stage == 1 else plan.stage2
    optimizer = pydist.ShardedOptimizer(
        model, torch.optim.AdamW, stage=stage, share_parameters=is_one_copy
    )
    for _ in range(2):
        model(torch.ones(2, widths[0], dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.finish()
        optimizer.zero_grad()
    pydist.barrier()
    count = sum(p.numel() for p in model.parameters())
    after = storages()
    own = sum(
        size for address, size in after.items() if address not in before and not is_shared(address)
    )
    shared = (shared_bytes() - shared_before) / pydist.world_size()
    in_flight = optimizer.bytes_in_flight()
    # In shared memory are parameters and, in stage 1, gradients; shards of those alone are not.
    parameters = sum(bucket.memory.nbytes for bucket in optimizer._layout.buckets)
    gradients = shared - in_flight - parameters / (pydist.world_size() if is_one_copy else 1)
    shards = [part.untyped_storage() for _, part in optimizer._layout.gradients.values()]
    sizes = {shard.data_ptr(): shard.nbytes() for shard in shards}
    gradients += sum(size for address, size in sizes.items() if not is_shared(address))
    pydist.barrier()
    found = (own + shared - in_flight, in_flight, planned.total, gradients, planned.gradients)
    return tuple(size_bytes / count for size_bytes in found)


Account = list[tuple[str, float, float]]


def account() -> Account:
    torch.set_num_threads(1)
    pydist.init()
    n = pydist.world_size()
    results = []
    cases = [
        (torch.float32, 1, False, 8 + 8 / n),
        (torch.float32, 2, False, 4 + 12 / n),
        (torch.bfloat16, 1, False, 4 + 12 / n),
        (torch.bfloat16, 2, False, 2 + 14 / n),
        (torch.float32, 2, True, 16 / n),
        (torch.bfloat16, 2, True, 16 / n),
    ]
    if n == 2:
        cases += [(torch.bfloat16, 1, True, 2 + 14 / n)]
    uneven = [(torch.float32, 2, False, 4 + 12 / n, UNEVEN)]
    for dtype, stage, is_one_copy, expected, widths in [*((*c, EVEN) for c in cases), *uneven]:
        what = f"{dtype}, stage {stage}, one copy: {is_one_copy}, layers of {widths}"
        found, in_flight, planned, gradients, planned_gradients = measure(
            dtype, stage, is_one_copy, widths
        )
        results.append((what, found, expected))
        results.append((f"{what}, planned with buckets in flight", found + in_flight, planned))
        results.append((f"{what}, planned gradients", gradients, planned_gradients))
    return results


@pytest.mark.parametrize("nprocs", everyday(2, thorough=(4,)))
def test_bytes_per_parameter(nprocs: int) -> None:
    """Those of the literature, and those that `pydist.plan` predicts."""
    for results in run_ranks(account, nprocs, timeout=60, env={"PYDIST_BACKEND": "native"}):
        for what, found, expected in results:
            assert found == pytest.approx(expected, rel=0.02), f"{what}, {nprocs} ranks"


class LayersButOne(nn.Sequential):
    """Layers one after the other, of which a forward may skip one."""

    skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self):
            if number != self.skipped:
                x = layer(x)
        return x


def hold_whole_gradients() -> None:
    """Rank 0 is ahead of the others. Nor does it hang where those do without a parameter."""
    torch.set_num_threads(1)
    pydist.init()
    rank = pydist.rank()
    width, layers = 256, 16
    torch.manual_seed(0)
    module = LayersButOne(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    module.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    each = width * width * 4
    model = pydist.DataParallel(module, bucket_cap_mb=each / 2**20)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, stage=2, lr=0.1)
    held = []

    def look(_: Tensor) -> None:
        gradients = (p.grad for p in model.parameters())
        with torch._C.DisableTorchFunctionSubclass():
            held.append(sum(g.nbytes for g in gradients if type(g) is Tensor))

    module[0].weight.register_hook(look)
    for skipped in (None, None, None, 8, 8, None):
        optimizer.zero_grad()
        module.skipped = skipped if rank else None
        out = model(torch.ones(8, width))
        if rank:
            time.sleep(0.2)
        out.square().mean().backward()
        optimizer.step()
    in_flight = optimizer.bytes_in_flight()
    assert in_flight < 4 * each
    # Not where ranks do without a parameter: what comes behind it waits for the end of backward.
    for step in (0, 1, 2):
        assert held[step] <= in_flight + each, f"{held[step] / each} gradients in step {step}"


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_whole_gradients_do_not_pile_up(backend: str) -> None:
    run_ranks(hold_whole_gradients, 3, timeout=60, env={"PYDIST_BACKEND": backend})
