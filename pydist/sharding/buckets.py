"""Parameters laid out so that each rank updates an equal part of them.

The parameters of a bucket lie one behind the other in memory that the communicator allocated, and
are views of it. The bucket is cut into one *shard* a rank (csrc/bucketing/shard_layout.h). A rank
updates its own, parameter by parameter, through the *segments* that the shard has of them, and
gathers the others'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.sharding.in_flight import Gather

# Parameters of these dtypes have float32 copies: so little precision loses small updates.
SHORT = (torch.float16, torch.bfloat16)


@dataclass
class Member:
    """A parameter in a bucket.

    Attributes:
        index: Its number among the optimizer's parameters.
        name: Its name.
        parameter: Itself.
        offset: Where it begins in the bucket, in elements of its real dtype.
        strides: How it lies there.
        address: Where that is.
    """

    index: int
    name: str
    parameter: Tensor
    offset: int
    strides: tuple[int, ...]
    address: int = 0

    @property
    def factor(self) -> int:
        """Elements of the real dtype for each of the parameter's."""
        return 2 if self.parameter.is_complex() else 1

    @property
    def dims(self) -> tuple[int, ...]:
        """Its dimensions in the order in which they lie in memory, the slowest first."""
        return dims_in_memory(self.parameter.shape, self.strides)

    def flat(self, whole: Tensor) -> Tensor:
        """A tensor of the parameter's shape in the order of its memory: a view where it can be."""
        return whole.permute(self.dims).reshape(-1)


def dims_in_memory(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest; those of one element keep their place.

    Args:
        shape: Of a tensor.
        strides: In which it is dense.
    """
    long = [dim for dim, extent in enumerate(shape) if extent != 1]
    order = iter(sorted(long, key=lambda dim: -strides[dim]))
    return tuple(next(order) if shape[dim] != 1 else dim for dim in range(len(shape)))


def shaped(row: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """All elements of a tensor, in the order of its memory, as a view of its shape."""
    extents = [shape[dim] for dim in dims]
    return row.view(extents).permute([dims.index(dim) for dim in range(len(extents))])


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a dense copy: the parameter's own, if it is dense in any order."""
    return torch.empty_like(parameter, device="meta").stride()


@dataclass(eq=False)
class Segment:
    """What this rank's shard has of a parameter: of one dimension.

    Attributes:
        member: The parameter.
        begin: In the parameter, in its elements, in the order of its memory.
        values: The parameter's own memory.
        updated: What the optimizer updates: `values`, or a float32 copy of them.
        gradient: Where the average of the gradient arrives; None if that is with the parameter.
    """

    member: Member
    begin: int
    values: Tensor
    updated: Tensor
    gradient: Tensor | None

    @property
    def end(self) -> int:
        return self.begin + self.values.numel()

    @property
    def has_master(self) -> bool:
        return self.updated is not self.values

    def refresh_master(self) -> None:
        """Takes over what somebody has written into the parameter since the last step.

        By value: what is written through `parameter.data` leaves the version as it was.
        """
        if self.has_master:
            is_new = self.values != self.updated.to(self.values.dtype)
            torch.where(is_new, self.values.to(self.updated.dtype), self.updated, out=self.updated)

    def of(self, whole: Tensor) -> Tensor:
        """The segment's part of a tensor of the parameter's shape."""
        return self.member.flat(whole)[self.begin : self.end]


@dataclass(eq=False)
class Bucket:
    """Parameters that are updated and gathered together.

    Attributes:
        label: For errors and journals.
        memory: All values, with padding.
        view: What the parameters are views of: the same memory, or where all ranks have one copy of
            it, this rank's view of that (see own_writes).
        shard: This rank's part of it.
        members: In the order of their places.
        segments: What the shard has of them: at most one of each.
        optimizer: Of the wrapped class, over the segments; None if there are none.
        gradients: Where a reducer averages gradients into, as they lie in `shard`, if one does.
        number: The reducer's, for the bucket.
        is_own: Whether it is this rank's alone, whose shard is all of it. Nothing is gathered.
        gather: What brings the other ranks' shards, since the last step.
        parameters: Those of the members.
    """

    label: str
    memory: Tensor
    view: Tensor
    shard: Tensor
    members: list[Member]
    segments: list[Segment]
    gradients: Tensor | None
    number: int | None = None
    is_own: bool = False
    optimizer: Optimizer | None = None
    gather: Gather | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.parameters = [member.parameter for member in self.members]

    @property
    def averages_gradients(self) -> bool:
        """Whether a reducer averages gradients into a shard of their own."""
        return self.gradients is not None

    def wait(self) -> None:
        """Lets what follows, on the current stream or the host, see all ranks' updates."""
        if self.gather is not None:
            self.gather.finish()
            self.gather = None

    def place(self, member: Member) -> Tensor:
        """The memory of a parameter in the bucket, even if it was given other memory since."""
        return _place(self.view, member)

    def strays(self) -> list[Member]:
        """The parameters whose memory was replaced, by `parameter.data = ...`."""
        return [
            member
            for member in self.members
            if member.parameter.data_ptr() != member.address and member.parameter.numel() != 0
        ]

    def require_fitting(self, member: Member) -> None:
        """Raises InvalidUsage where a stray can't move in again."""
        before, now = kind_of(self.place(member)), kind_of(member.parameter)
        if before != now:
            raise InvalidUsage(
                f"parameter {member.name} was {before} when pydist.ShardedOptimizer was "
                f"made and is {now} now: convert the model first, then make the optimizer"
            )

    def take_back(self, strays: Sequence[Member]) -> list[Tensor]:
        """Strays move in again.

        Of their values, this rank's part does; the others' come when they are gathered.

        Returns:
            Their parameters.
        """
        for member in strays:
            parameter = member.parameter
            place = self.place(member)
            for segment in self.segments:
                if segment.member is member:
                    segment.values.copy_(segment.of(parameter.detach()))
            parameter.data = place
        return [member.parameter for member in strays]


def kind_of(parameter: Tensor) -> str:
    """Its shape, dtype and device, for people."""
    return f"{tuple(parameter.shape)} {parameter.dtype} on {parameter.device}"


def _place(memory: Tensor, member: Member) -> Tensor:
    parameter = member.parameter
    flat = memory.narrow(0, member.offset, parameter.numel() * member.factor)
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    return flat.as_strided(parameter.shape, member.strides)


def cut(
    shard: Tensor, layout: _native.ShardLayout, members: list[Member], rank: int
) -> Iterator[tuple[Member, int, Tensor]]:
    """What a rank's shard has of each parameter: itself, where it begins in that, and its elements.

    Args:
        shard: Of the bucket's values, or of their gradients.
        layout: Where they lie, and how they are cut.
        members: In the order of their places.
        rank: Whose shard it is.
    """
    for number, begin, count, offset in layout.segments(rank):
        member = members[number]
        part = shard.narrow(0, offset, count)
        if member.parameter.is_complex():
            part = torch.view_as_complex(part.view(-1, 2))
        yield member, begin // member.factor, part


def move_in(
    label: str,
    memory: Tensor,
    layout: _native.ShardLayout,
    members: list[Member],
    gradients: Tensor | None,
    communicator: _native.Communicator | None,
    *,
    with_masters: bool,
    view: Tensor | None = None,
    number: int | None = None,
) -> Bucket:
    """Moves parameters into the memory of a bucket. All ranks call it.

    Args:
        label: For errors and journals.
        memory: Of `layout.count` elements of the parameters' real dtype.
        layout: Where they lie, and how they are cut.
        members: In the order of their places.
        gradients: This rank's shard of the averaged gradients, if it arrives apart from the
            parameters.
        communicator: The ranks; None for parameters that this rank has alone. It calls alone then.
        with_masters: Whether to keep float32 copies of segments in 16 bits.
        view: What the parameters become views of, where `memory` is the same on all ranks. That
            gets rank 0's values then. Default: `memory`.
        number: The reducer's, for the bucket.
    """
    rank = 0 if communicator is None else communicator.rank
    if view is None or rank == 0:
        memory.zero_()
        for member in members:
            _place(memory, member).copy_(member.parameter.detach())
    if view is not None and communicator is not None:
        communicator.barrier(False)
    seen = memory if view is None else view
    for member in members:
        member.parameter.data = _place(seen, member)
        member.address = member.parameter.data_ptr()
    shard = memory.narrow(0, rank * layout.shard, layout.shard)
    arriving: dict[int, Tensor] = {}
    if gradients is not None:
        arriving = {m.index: part for m, _, part in cut(gradients, layout, members, rank)}
    segments = []
    for member, begin, values in cut(shard, layout, members, rank):
        updated = values
        if with_masters and values.dtype in SHORT:
            updated = values.float()
        segments.append(Segment(member, begin, values, updated, arriving.get(member.index)))
    is_own = communicator is None
    return Bucket(label, memory, seen, shard, members, segments, gradients, number, is_own)
