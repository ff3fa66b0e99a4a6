"""What buffers hold when a result is checked: every element is predicted, and compared.

Values depend on the rank and on the element's place in a way that has no period in common with
blocks, slices or cache lines, so that in a block that landed elsewhere, or comes from another rank,
three elements of four are wrong. None is 0 (for products, none is 1), so that a sum that misses a
rank is wrong in every element. They are so small that every partial result is exact in every type,
whatever the order, for up to 64 ranks; beyond, a mean may differ by its last bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pydist.benchmarks.collective_cases import Buffers, Case

# Elements looked at in one go: what the check itself needs of memory stays small.
_PIECE = 1 << 20
# Products of more factors than this would leave the range of float16, or of a byte: later ranks
# contribute ones.
_RANKS_IN_PRODUCT = 7
_RANKS_IN_PRODUCT_OF_BYTES = 3


def _values(case: Case, rank: int, begin: int, end: int) -> Tensor:
    """Elements [begin, end) of what `rank` sends, in int64."""
    index = torch.arange(begin, end, dtype=torch.int64)
    # Multiplied and folded, twice, as in a 32-bit hash: neighbours, neighbouring ranks and places a
    # power of two apart agree no more often than any others.
    mixed = (index * 0x9E3779B1 + rank * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = mixed ^ (mixed >> 13)
    if case.op == "prod":
        is_byte = case.torch_dtype.itemsize == 1
        most = _RANKS_IN_PRODUCT_OF_BYTES if is_byte else _RANKS_IN_PRODUCT
        return 2 * ((mixed & 1) + 1) if rank < most else torch.ones_like(index)
    return (mixed & 3) + 1


def _combined(case: Case, begin: int, end: int) -> Tensor:
    """Elements of the reduction over all ranks, in float64 (integers: int64)."""
    values = torch.stack([_values(case, rank, begin, end) for rank in range(case.ranks)])
    if case.op == "prod":
        return values.prod(0)
    if case.op == "min":
        return values.amin(0)
    if case.op == "max":
        return values.amax(0)
    total = values.sum(0)
    return total.double() / case.ranks if case.op == "mean" else total


def _expected(case: Case, rank: int, begin: int, end: int) -> Tensor:
    """Elements [begin, end) of what `rank` receives, in the case's type."""
    name = case.collective
    if case.kind.has_op:
        first = rank * case.block if name == "reduce_scatter" else 0
        return _combined(case, first + begin, first + end).to(case.torch_dtype)
    if name in ("all_gather", "gather"):
        source, place = begin // case.block, begin % case.block
        return _values(case, source, place, place + end - begin).to(case.torch_dtype)
    if name == "all_to_all":
        source, place = begin // case.block, begin % case.block
        first = rank * case.block + place
        return _values(case, source, first, first + end - begin).to(case.torch_dtype)
    if name == "send_recv":
        return _values(case, (rank - 1) % case.ranks, begin, end).to(case.torch_dtype)
    first = rank * case.block if name == "scatter" else 0
    return _values(case, case.root, first + begin, first + end).to(case.torch_dtype)


def _pieces(count: int, block: int) -> Iterator[tuple[int, int]]:
    """Runs of elements that cross no block."""
    for first in range(0, count, block):
        for begin in range(first, min(first + block, count), _PIECE):
            yield begin, min(begin + _PIECE, first + block, count)


def fill(case: Case, rank: int, buffers: Buffers) -> None:
    """Before a checked call: what this rank sends, and in the rest something else."""
    if case.count == 0:
        return
    buffers.received.fill_(99)
    if case.collective in ("broadcast", "scatter") and rank != case.root:
        return
    for begin, end in _pieces(buffers.sent.numel(), buffers.sent.numel()):
        buffers.sent[begin:end] = _values(case, rank, begin, end).to(case.torch_dtype)


def count_wrong(case: Case, rank: int, buffers: Buffers) -> int:
    """After a checked call: how many elements on this rank are not as predicted."""
    gets_nothing = case.collective in ("reduce", "gather") and rank != case.root
    if case.count == 0 or gets_nothing:
        return 0
    wrong = 0
    has_blocks = case.kind.sends_block or case.kind.exchanges_blocks
    received = buffers.received
    for begin, end in _pieces(received.numel(), case.block if has_blocks else received.numel()):
        expected = _expected(case, rank, begin, end)
        got = received[begin:end]
        if case.op == "mean" and case.ranks & (case.ranks - 1):
            # Not every backend rounds a mean that is not exact but once.
            near = torch.isclose(
                got.double(), expected.double(), rtol=2 * torch.finfo(got.dtype).eps, atol=0
            )
            wrong += int((~near).sum())
        else:
            wrong += int((got != expected).sum())
    return wrong
