"""What collectives are compared with: an exchange of as many bytes through shared memory.

Every rank copies its bytes to shared memory, waits until all have, and copies its neighbour's from
there: the work of any collective on one host, written in Python, without a line of the engine. So
it is bound by what bounds a collective, and waits, as a collective does, for the slowest rank. That
matters, since the time from core to core changes by half from minute to minute on virtual machines;
a copy within each rank would not show it. gloo would do the same work, too, but on small tensors it
takes ten times longer in one run than in the next, as the system schedules its threads.
"""

import itertools
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch

import pydist

REFERENCE_NAME = "a plain exchange of as many bytes"

_LINE_BYTES = 64
# Then the others get a chance, which may share the core.
_SPINS = 500
_numbers = itertools.count()


def plain_exchange(size_bytes: int) -> Callable[[], object]:
    """A call that exchanges that much. Every rank makes it and calls it, as a collective."""
    rank, world_size = pydist.rank(), pydist.world_size()
    path = Path(f"/dev/shm/pydist-bench-{os.environ['MASTER_PORT']}-{next(_numbers)}")
    flag_bytes = world_size * _LINE_BYTES
    if rank == 0:
        path.touch()
        # Two slots a rank, used in turn: nobody is more than one exchange ahead.
        os.truncate(path, flag_bytes + 2 * world_size * size_bytes)
    pydist.barrier()
    with path.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    pydist.barrier()
    if rank == 0:
        path.unlink()
    flags = memoryview(shared)[:flag_bytes].cast("Q")
    slots = torch.frombuffer(shared, dtype=torch.uint8, offset=flag_bytes)
    slots.zero_()
    pydist.barrier()
    mine = [slots.view(2, world_size, -1)[turn, rank] for turn in range(2)]
    theirs = [slots.view(2, world_size, -1)[turn, (rank + 1) % world_size] for turn in range(2)]
    own = torch.zeros(size_bytes, dtype=torch.uint8)
    step = _LINE_BYTES // 8
    own_flag = rank * step
    other_flags = [other * step for other in range(world_size) if other != rank]
    exchanges = itertools.count(1)

    def exchange() -> None:
        number = next(exchanges)
        mine[number % 2].copy_(own)
        flags[own_flag] = number
        for flag in other_flags:
            spins = 0
            while flags[flag] < number:
                spins += 1
                if spins > _SPINS:
                    os.sched_yield()
        own.copy_(theirs[number % 2])

    return exchange
