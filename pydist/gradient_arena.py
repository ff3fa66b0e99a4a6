"""Where gradients live: the arena, its buckets and its slots.

The gradients of one dtype lie in one block of the symmetric heap, the *arena*, so that collectives
on it copy nothing in or out. It is cut into *buckets*, in the order in which backward is expected
to finish them (the reverse of registration); each travels in one operation. Each parameter owns a
*slot* of its bucket, and `parameter.grad` is a view of the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pydist.errors import InvalidUsage

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
    view: Tensor  # never handed out: Module.to() swaps the memory under `parameter.grad`
    bucket: Bucket
    # The parameter holds a gradient that was not averaged yet.
    pending: bool = False
    # The round in which it last received a gradient.
    fired_in: int = -1

    def holds_gradient(self) -> bool:
        """Whether `parameter.grad` lies in the slot."""
        grad = self.parameter.grad
        return (
            grad is not None
            and grad.dtype == self.view.dtype
            and grad.layout == torch.strided
            and grad.data_ptr() == self.view.data_ptr()
        )

    def adopt(self) -> None:
        """Moves `parameter.grad` into the slot."""
        grad = self.parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise InvalidUsage(
                f"the gradient of parameter {self.name} is sparse ({grad.layout}), and "
                "pydist.DataParallel averages dense gradients only: build its module with "
                "sparse=False"
            )
        if grad.requires_grad:
            raise InvalidUsage(
                f"the gradient of parameter {self.name} is part of a graph, which averaging over "
                "the ranks would cut: backward(create_graph=True) does not work through "
                "pydist.DataParallel; use torch.autograd.grad(..., create_graph=True) for the "
                "inner derivative and backward() for the loss"
            )
        if grad.dtype != self.view.dtype or grad.shape != self.view.shape:
            raise InvalidUsage(
                f"parameter {self.name} was {tuple(self.view.shape)} {self.view.dtype} when "
                f"pydist.DataParallel wrapped the module and is {tuple(grad.shape)} {grad.dtype} "
                "now: convert the module first, then wrap it"
            )
        self.view.copy_(grad)
        self.parameter.grad = self.view.detach()


@dataclass(eq=False)
class Bucket:
    """A run of slots that travels in one all-reduce."""

    number: int
    label: str
    slots: list[Slot] = field(default_factory=list)
    memory: Tensor = field(default_factory=lambda: torch.empty(0))
    # How many of its parameters have no gradient yet in this round.
    missing: int = 0


class GradientArena:
    """The gradients' memory. All ranks construct it together.

    Attributes:
        slots: One for each parameter, in registration order.
        buckets: In launch order.
        tail: Words at the end of the last bucket: one for each parameter, one for each rank.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: Sequence[tuple[str, nn.Parameter]],
        cap_bytes: int,
    ) -> None:
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        self.tail = torch.empty(0)
        sizes = [(p.dtype, p.numel() * p.element_size()) for _, p in parameters]
        plan = plan_buckets(sizes, max(cap_bytes, 1))
        if not plan:
            return
        tail_words = len(parameters) + communicator.size

        # Complex numbers travel as pairs of reals: sums and averages are the same.
        offsets: dict[int, int] = {}
        ranges: list[tuple[int, int]] = []
        filled: dict[torch.dtype, int] = {}
        for members in plan:
            dtype = parameters[members[0]][1].dtype.to_real()
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
            arena = arenas[parameters[members[0]][1].dtype.to_real()]
            first = parameters[members[0]][0]
            bucket = Bucket(
                number, f"bucket {number}, first parameter {first}", memory=arena[begin:end]
            )
            for index in members:
                name, parameter = parameters[index]
                view = _slot_view(arena, offsets[index], parameter)
                slots[index] = Slot(index, name, parameter, view, bucket)
                bucket.slots.append(slots[index])
            self.buckets.append(bucket)
        self.slots = [slots[index] for index in range(len(parameters))]
        self.tail = arena[tail_begin : tail_begin + tail_words]


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
