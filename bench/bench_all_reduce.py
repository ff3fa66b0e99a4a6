"""all_reduce by size, dtype and kind of memory, beside a plain exchange of as many bytes."""

import pytest
import torch
from plain_exchange import REFERENCE_NAME, plain_exchange
from rank_groups import MeasureInTurns
from turns import Pair

import pydist

SIZES_BYTES = {"8B": 8, "16KiB": 16 << 10, "1MiB": 1 << 20, "25MiB": 25 << 20}
MEMORIES = ("ordinary", "symmetric")


def all_reduce_pair(memory: str, dtype_name: str, size_bytes: int) -> Pair:
    dtype = getattr(torch, dtype_name)
    count = size_bytes // dtype.itemsize
    empty = pydist.symmetric_empty if memory == "symmetric" else torch.empty
    tensor = empty(count, dtype=dtype).zero_()
    return Pair(lambda: pydist.all_reduce(tensor), plain_exchange(size_bytes), REFERENCE_NAME)


@pytest.mark.parametrize("size", SIZES_BYTES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
@pytest.mark.parametrize("memory", MEMORIES)
def bench_all_reduce(measure_in_turns: MeasureInTurns, memory: str, dtype: str, size: str) -> None:
    measure_in_turns(2, all_reduce_pair, memory, dtype, SIZES_BYTES[size])


@pytest.mark.parametrize("size", ["16KiB", "25MiB"])
@pytest.mark.parametrize("memory", MEMORIES)
def bench_all_reduce_of_4_ranks(measure_in_turns: MeasureInTurns, memory: str, size: str) -> None:
    """Oversubscribed where there are fewer cores: then the ranks take turns on them, too."""
    measure_in_turns(4, all_reduce_pair, memory, "float32", SIZES_BYTES[size])
