"""Processes that have left a job may join again, with fewer ranks: the job's next generation."""

import os

import torch
import torch.distributed as dist
from launch import run_ranks

import pydist
from pydist._torch import store_of_group
from pydist.job import current


def leave_a_key() -> bool:
    """Puts a key into the store in which the world has met.

    Returns:
        Whether the key is there already that the generation before has left.
    """
    group = dist.group.WORLD
    assert group is not None
    store = store_of_group(group)
    assert store is not None
    store.set(f"left by generation {current.job.generation}", "")
    return bool(store.check([f"left by generation {current.job.generation - 1}"]))


def go_on_without_the_first() -> list[tuple[int, int, float, bool]]:
    seen = []
    first = pydist.DataParallel(torch.nn.Linear(2, 1))
    pydist.init()
    job = current.job
    for _ in range(2):
        total = pydist.all_reduce(torch.ones(1)).item()
        seen.append((current.job.generation, pydist.rank(), total, leave_a_key()))
        pydist.barrier()
        pydist.shutdown()
        rank = int(os.environ["RANK"])
        if rank == 0 or len(seen) == 2:
            break
        os.environ.update(RANK=str(rank - 1), LOCAL_RANK=str(rank - 1))
        os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        pydist.init()
        # The object of the first generation is closed, and has nothing of the second.
        assert current.job is not job
        assert not job.has_world
        assert not [*job.split, *job.bootstrapped]
        model = pydist.DataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.weight.grad, torch.ones(1, 2))
    del first
    return seen


def test_fewer_ranks_go_on_in_the_next_generation() -> None:
    left, *stayed = run_ranks(go_on_without_the_first, 3, timeout=40)
    assert left == [(1, 0, 3.0, False)]
    for rank, seen in enumerate(stayed):
        # All keys of the first generation were there when the second began, under other names.
        assert seen == [(1, rank + 1, 3.0, False), (2, rank, 2.0, False)]


def meet_in_a_group_of_the_script() -> tuple[int, int]:
    dist.init_process_group("gloo")
    pydist.init()
    made = current.job
    generation = made.generation
    pydist.shutdown()
    assert current.job is not made
    dist.destroy_process_group()
    pydist.init()
    return generation, current.job.generation


def test_a_group_of_the_script_counts_for_no_generation() -> None:
    assert run_ranks(meet_in_a_group_of_the_script, 2, timeout=40) == [(0, 1)] * 2
