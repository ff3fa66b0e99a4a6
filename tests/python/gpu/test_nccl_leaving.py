"""Ranks that die or leave while groups on NCCL go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import needs_gpu_ranks
from launch import rank_outcomes, run_ranks
from training import (
    TIME_LIMIT,
    joined,
)

import pydist

pytestmark = [needs_gpu_ranks, TIME_LIMIT]

NCCL: dict[str, str | None] = {"PYDIST_BACKEND": "nccl"}


def start() -> tuple[int, int]:
    gpu_ranks.install(delay_us=300)
    return joined()


def death() -> float:
    rank, _ = start()
    tensor = torch.ones(1000, device="cuda")
    pydist.all_reduce(tensor)
    torch.cuda.synchronize() if gpu_ranks.IS_REAL else None
    if rank == 1:
        os._exit(9)
    began = time.monotonic()
    with pytest.raises(pydist.PeerLost, match="rank 1 "):
        pydist.all_reduce(tensor, async_op=True).wait(timeout=20.0)
    with pytest.raises(pydist.PeerLost):
        pydist.all_reduce(tensor)
    return time.monotonic() - began


def death_on_another_host() -> float:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    os.environ["PYDIST_INTERFACE"] = "none0"  # so native can't join hosts
    return death()


# NCCL's fake notices no death, so it is the group on the host that names the dead: with four ranks
# on gloo, one of them from a rank that is no neighbour.
@pytest.mark.parametrize(("body", "size"), [(death, 2), (death_on_another_host, 4)])
def test_a_rank_that_dies_ends_the_others(body: Callable[[], float], size: int) -> None:
    first, second, *others = rank_outcomes(body, size, env=NCCL, timeout=60)
    assert second.exit_code == 9
    for each in (first, *others):
        assert each.ok, each.describe()
        assert each.value < 10, "seconds until the others knew, beside 20 that the operation had"


def leaving() -> None:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    os.environ["PYDIST_INTERFACE"] = "none0"  # so native can't join hosts
    rank, _ = start()
    tensor = torch.ones(1000, device="cuda")
    pydist.all_reduce(tensor)
    if rank == 1:
        pydist.shutdown()
        return
    with pytest.raises(pydist.PeerLost, match="rank 1 has left"):
        pydist.all_reduce(tensor, async_op=True).wait(timeout=20.0)


def test_a_rank_of_another_host_that_leaves_is_named() -> None:
    run_ranks(leaving, 2, env=NCCL, timeout=60)


def leaving_with_the_store() -> None:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    os.environ["PYDIST_INTERFACE"] = "none0"  # so native can't join hosts
    gpu_ranks.install()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    meeting = dist.TCPStore(*address, is_master=False)
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("its store", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("its store")), is_master=False)
    dist.init_process_group("pydist", store=store, rank=rank, world_size=size)
    joined()
    tensor = torch.ones(1000, device="cuda")
    pydist.all_reduce(tensor)
    if rank == 1:
        pydist.shutdown()
        dist.destroy_process_group()
        os._exit(0)
    with pytest.raises(pydist.PeerLost, match="rank 1 has left"):
        pydist.all_reduce(tensor, async_op=True).wait(timeout=20.0)


def test_a_rank_that_leaves_with_the_store_has_not_died() -> None:
    first, second, third = rank_outcomes(leaving_with_the_store, 3, env=NCCL, timeout=35)
    assert second.exit_code == 0
    for each in (first, third):
        assert each.ok, each.describe()


def failing_and_leaving() -> None:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    os.environ["PYDIST_INTERFACE"] = "none0"  # so native can't join hosts
    rank, _ = start()
    tensor = torch.ones(1000, device="cuda")
    pydist.all_reduce(tensor)
    if rank == 1:
        pydist.job.groups.communicator_of().abort("enough")
        pydist.shutdown()
        return
    with pytest.raises(pydist.Error, match="enough"):
        pydist.all_reduce(tensor, async_op=True).wait(timeout=20.0)


def test_a_rank_that_fails_and_leaves_gives_its_reason() -> None:
    run_ranks(failing_and_leaving, 2, env=NCCL, timeout=60)


def ending_first() -> None:
    rank, size = start()
    group = pydist.new_group(range(size))
    mine = torch.ones(1000, device="cuda")
    pydist.all_reduce(mine, group=group)
    groups = [group]
    del group
    if rank == 0:
        groups.clear()  # NCCL waits until the neighbours do the same
    pydist.barrier()
    groups.clear()
    pydist.barrier()
    pydist.all_reduce(mine)
    assert bool((mine == size * size).all())
    pydist.shutdown()


def test_a_rank_ends_a_group_before_its_neighbours() -> None:
    run_ranks(ending_first, 2, env=NCCL)
