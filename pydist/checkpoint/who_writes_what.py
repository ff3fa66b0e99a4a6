"""What of a state a rank writes: boxes of tensors, none of more than half a bucket.

What all ranks have, they share out; what only one has, it writes. A box of a model's tensor is some
of its rows, as torch's own checkpoints have them, or a part of a large row; one of an optimizer's
state is a range of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from pydist.parallel.bucket_planner import DEFAULT_CAP_BYTES

# torch's writer holds two copies of a piece, which together take as much as a bucket.
_PIECE_BYTES = DEFAULT_CAP_BYTES // 2


@dataclass
class Piece:
    """A box of a tensor that goes into the checkpoint.

    Attributes:
        name: Of the tensor, in the checkpoint.
        whole: The tensor's shape.
        offsets: Where the box begins.
        sizes: How large it is.
        source: The values; if `is_flat`, where they are.
        first: The first element of `source` that is in the box, if `is_flat`.
        is_flat: Whether `source` is to be read as one row of elements.
    """

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Tensor
    first: int = 0
    is_flat: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        count = self.source.element_size()
        for size in self.sizes:
            count *= size
        return count

    def values(self) -> Tensor:
        """The box's values, in memory of the source where that is possible."""
        source = self.source.detach()
        if self.is_flat:
            return source.reshape(-1).narrow(0, self.first, self.sizes[0])
        return source

    def copy(self) -> Piece:
        """A copy, which nobody changes."""
        values = self.values().to("cpu", copy=True)
        return Piece(self.name, self.whole, self.offsets, self.sizes, values)


def of_rows(name: str, tensor: Tensor) -> Iterator[Piece]:
    """Cuts a tensor into boxes of rows; rows that are too large, into boxes of theirs."""
    yield from _boxes(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, 0)


def _boxes(
    name: str, whole: tuple[int, ...], offsets: tuple[int, ...], box: Tensor, dim: int
) -> Iterator[Piece]:
    """Cuts a box along a dimension, and what is still too large along those after it."""
    if box.nbytes <= _PIECE_BYTES or dim == box.dim():
        yield Piece(name, whole, offsets, tuple(box.shape), box)
        return
    rows = max(1, _PIECE_BYTES * box.shape[dim] // box.nbytes)
    for begin in range(0, box.shape[dim], rows):
        part = box.narrow(dim, begin, min(rows, box.shape[dim] - begin))
        place = (*offsets[:dim], begin, *offsets[dim + 1 :])
        yield from _boxes(name, whole, place, part, dim + 1)


def of_range(name: str, count: int, begin: int, values: Tensor) -> Iterator[Piece]:
    """Cuts a range of elements, which begins at `begin` of `count`."""
    step = max(1, _PIECE_BYTES // values.element_size())
    for first in range(0, values.numel(), step):
        sizes = (min(step, values.numel() - first),)
        yield Piece(name, (count,), (begin + first,), sizes, values, first, is_flat=True)


def share_out(pieces: Iterable[Piece], rank: int, size: int) -> list[Piece]:
    """The part of what all ranks have that one writes: about as many bytes as each other."""
    loads = [0] * size
    mine = []
    for piece in sorted(pieces, key=lambda piece: -piece.nbytes):
        least = loads.index(min(loads))
        loads[least] += piece.nbytes
        if least == rank:
            mine.append(piece)
    return mine
