"""Where gradients live: the arena, its buckets and its slots.

The gradients of one dtype lie in one block of the symmetric heap, the *arena*, so that collectives
on it copy nothing in or out. It is cut into *buckets*, in the order in which backward is expected
to finish them (the reverse of registration); each travels in one operation. Each parameter owns a
*slot* of its bucket, and `parameter.grad` is a view of the slot.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pydist._native import Communicator

# Slots start on a cache line, which every SIMD width divides.
_ALIGNMENT_BYTES = 64


def plan_buckets(sizes: Sequence[tuple[torch.dtype, int]], cap_bytes: int) -> list[list[int]]:
    """Cuts parameters into buckets of one dtype each.

    Args:
        sizes: Dtype and size in bytes of each parameter, in registration order.
        cap_bytes: A bucket is closed once it holds at least this much.

    Returns:
        The buckets in launch order, each a list of indices into `sizes`; every index exactly once.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in reversed(range(len(sizes))):
        dtype, size_bytes = sizes[index]
        members, filled_bytes = open_buckets.pop(dtype, ([], 0))
        members.append(index)
        filled_bytes += size_bytes
        if filled_bytes >= cap_bytes:
            buckets.append(members)
        else:
            open_buckets[dtype] = (members, filled_bytes)
    # What is left over is complete once its last member is.
    leftovers = [members for members, _ in open_buckets.values()]
    return buckets + sorted(leftovers, key=lambda members: -members[-1])


@dataclass(eq=False)
class Slot:
    """A parameter's place in the arena."""

    index: int
    name: str
    parameter: nn.Parameter
    view: Tensor | None  # None where the gradient is sparse


@dataclass(eq=False)
class Bucket:
    """A run of slots that travels in one all-reduce."""

    label: str
    slots: list[Slot] = field(default_factory=list)
    memory: Tensor = field(default_factory=lambda: torch.empty(0))


class GradientArena:
    """The gradients' memory. All ranks construct it together.

    Attributes:
        slots: One for each parameter, in registration order.
        buckets: In launch order. One that holds nothing but the tail, if all gradients are sparse.
        tail: Words at the end of the last bucket, one for each parameter.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: Sequence[tuple[str, nn.Parameter]],
        cap_bytes: int,
        sparse: Container[str] = (),
    ) -> None:
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        self.tail = torch.empty(0)
        if not parameters:
            return
        dense = [index for index, (name, _) in enumerate(parameters) if name not in sparse]
        sizes = [(p.dtype, p.numel() * p.element_size()) for _, p in (parameters[i] for i in dense)]
        plan = [[dense[i] for i in bucket] for bucket in plan_buckets(sizes, max(cap_bytes, 1))]
        plan = plan or [[]]
        tail_words = len(parameters)

        # Complex numbers travel as pairs of reals: sums and averages are the same.
        offsets: dict[int, int] = {}
        ranges: list[tuple[int, int]] = []
        filled: dict[torch.dtype, int] = {}
        for members in plan:
            dtype = _dtype_of(members, parameters)
            alignment = _ALIGNMENT_BYTES // dtype.itemsize
            begin = end = filled.get(dtype, 0)
            for index in members:
                parameter = parameters[index][1]
                offsets[index] = end
                end += parameter.numel() * (2 if parameter.is_complex() else 1)
                end += -end % alignment
            if members is plan[-1]:
                tail_begin = end
                end += tail_words
            ranges.append((begin, end))
            filled[dtype] = end
        arenas = {
            dtype: communicator.symmetric_empty([count], dtype).zero_()
            for dtype, count in filled.items()
        }

        slots: dict[int, Slot] = {}
        for number, (members, (begin, end)) in enumerate(zip(plan, ranges, strict=True)):
            arena = arenas[_dtype_of(members, parameters)]
            first = f", first parameter {parameters[members[0]][0]}" if members else ""
            bucket = Bucket(f"bucket {number}{first}", memory=arena[begin:end])
            for index in members:
                name, parameter = parameters[index]
                view = _slot_view(arena, offsets[index], parameter)
                slots[index] = Slot(index, name, parameter, view)
                bucket.slots.append(slots[index])
            self.buckets.append(bucket)
        for index, (name, parameter) in enumerate(parameters):
            self.slots.append(slots.get(index) or Slot(index, name, parameter, None))
        self.tail = arena[tail_begin : tail_begin + tail_words]


def _dtype_of(
    members: Sequence[int], parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.dtype:
    return parameters[members[0]][1].dtype.to_real() if members else torch.float32


def _slot_view(arena: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """The parameter's part of the arena, in the parameter's own memory layout where it is dense."""
    count = parameter.numel()
    if parameter.is_complex():
        flat = torch.view_as_complex(arena[offset : offset + 2 * count].view(count, 2))
    else:
        flat = arena[offset : offset + count]
    # Optimizers and AccumulateGrad are fastest where gradient and parameter are laid out alike.
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)
