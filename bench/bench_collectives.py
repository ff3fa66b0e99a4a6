"""Every other collective, beside a plain exchange of as many bytes: float32, 2 ranks.

A size is that of the tensor that holds the blocks of all ranks, where a collective has those, and
else of the tensor that travels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from plain_exchange import REFERENCE_NAME, plain_exchange
from rank_groups import MeasureInTurns
from torch import Tensor
from turns import Pair

import pydist

NPROCS = 2
SIZES_BYTES = {"16KiB": 16 << 10, "4MiB": 4 << 20}


@dataclass(frozen=True)
class Buffers:
    """What the collectives of one rank work on.

    Attributes:
        whole: A block for each rank.
        other: Another one.
        block: That of this rank, in memory of its own.
        whole_at_root: `whole` on rank 0, None elsewhere.
    """

    whole: Tensor
    other: Tensor
    block: Tensor
    whole_at_root: Tensor | None


def send_and_return(buffers: Buffers) -> None:
    """There and back: when it ends, the data has arrived."""
    if pydist.rank() == 0:
        pydist.send(buffers.whole, dst=1)
        pydist.recv(buffers.whole, src=1)
    else:
        pydist.recv(buffers.whole, src=0)
        pydist.send(buffers.whole, dst=0)


COLLECTIVES: dict[str, Callable[[Buffers], object]] = {
    "reduce_scatter": lambda buffers: pydist.reduce_scatter(buffers.whole, out=buffers.block),
    "all_gather": lambda buffers: pydist.all_gather(buffers.block, out=buffers.whole),
    "broadcast": lambda buffers: pydist.broadcast(buffers.whole, root=0),
    "reduce": lambda buffers: pydist.reduce(buffers.whole, root=0),
    "gather": lambda buffers: pydist.gather(buffers.block, root=0, out=buffers.whole_at_root),
    "scatter": lambda buffers: pydist.scatter(buffers.whole_at_root, root=0, out=buffers.block),
    "all_to_all": lambda buffers: pydist.all_to_all(buffers.whole, out=buffers.other),
    "send_and_return": send_and_return,
}


def collective_pair(name: str, memory: str, size_bytes: int) -> Pair:
    collective = COLLECTIVES[name]
    count = size_bytes // torch.float32.itemsize
    empty = pydist.symmetric_empty if memory == "symmetric" else torch.empty
    whole = empty(count).zero_()
    buffers = Buffers(
        whole,
        other=empty(count).zero_(),
        block=empty(count // pydist.world_size()).zero_(),
        whole_at_root=whole if pydist.rank() == 0 else None,
    )
    return Pair(lambda: collective(buffers), plain_exchange(size_bytes), REFERENCE_NAME)


def barrier_pair() -> Pair:
    """Beside the exchange of as little as possible."""
    return Pair(pydist.barrier, plain_exchange(8), "a plain exchange of 8 bytes")


@pytest.mark.parametrize("size", SIZES_BYTES)
@pytest.mark.parametrize("memory", ["ordinary", "symmetric"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def bench_collective(
    measure_in_turns: MeasureInTurns, collective: str, memory: str, size: str
) -> None:
    measure_in_turns(NPROCS, collective_pair, collective, memory, SIZES_BYTES[size])


def bench_barrier(measure_in_turns: MeasureInTurns) -> None:
    measure_in_turns(NPROCS, barrier_pair)
