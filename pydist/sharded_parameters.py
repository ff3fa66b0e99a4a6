"""Parameters laid out so that each rank updates an equal part of them.

The parameters of a bucket lie one behind the other in memory that the communicator allocated, and
are views of it. The bucket is cut into one *shard* a rank (csrc/bucketing/shard_layout.h). A rank
updates its own, parameter by parameter, through the *segments* that the shard has of them, and
gathers the others'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.gathers import Gather

# What float32 copies are kept of.
_SHORT = (torch.float16, torch.bfloat16)


def needs_master(parameter: Tensor) -> bool:
    """Whether so little precision loses small updates."""
    return parameter.dtype in _SHORT


@dataclass
class Member:
    """A parameter in a bucket.

    Attributes:
        index: Its number among the optimizer's parameters.
        name: Its name.
        parameter: Itself.
        offset: Where it begins in the bucket, in elements of its real dtype.
        strides: How it lies there.
    """

    index: int
    name: str
    parameter: Tensor
    offset: int
    strides: tuple[int, ...]

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

    def of(self, whole: Tensor) -> Tensor:
        """The segment's part of a tensor of the parameter's shape."""
        return self.member.flat(whole)[self.begin : self.end]


@dataclass(eq=False)
class Bucket:
    """Parameters that are updated and gathered together.

    Attributes:
        label: For errors and journals.
        memory: All values, with padding.
        shard: This rank's part of it.
        members: In the order of their places.
        segments: What the shard has of them: at most one of each.
        optimizer: Of the wrapped class, over the segments; None if there are none.
        gather: What brings the other ranks' shards, since the last step.
    """

    label: str
    memory: Tensor
    shard: Tensor
    members: list[Member]
    segments: list[Segment]
    optimizer: Optimizer | None = None
    gather: Gather | None = field(default=None, repr=False)

    def wait(self) -> None:
        """Returns once all ranks' updates are in the parameters."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None

    def take_back_strays(self) -> None:
        """Parameters whose memory was replaced, by `parameter.data = ...`, move in again."""
        for member in self.members:
            place = _place(self.memory, member)
            parameter = member.parameter
            if parameter.data_ptr() != place.data_ptr() and parameter.numel() != 0:
                if parameter.shape != place.shape or parameter.dtype != place.dtype:
                    raise InvalidUsage(
                        f"parameter {member.name} was {tuple(place.shape)} {place.dtype} when "
                        f"pydist.ShardedOptimizer was made and is {tuple(parameter.shape)} "
                        f"{parameter.dtype} now: convert the model first, then make the optimizer"
                    )
                place.copy_(parameter.detach())
                parameter.data = place


def _place(memory: Tensor, member: Member) -> Tensor:
    parameter = member.parameter
    flat = memory.narrow(0, member.offset, parameter.numel() * member.factor)
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    return flat.as_strided(parameter.shape, member.strides)


def move_in(
    label: str,
    memory: Tensor,
    layout: _native.ShardLayout,
    members: list[Member],
    gradients: Tensor | None,
    rank: int,
    *,
    with_masters: bool,
) -> Bucket:
    """Moves parameters into the memory of a bucket.

    Args:
        label: For errors and journals.
        memory: Of `layout.count` elements of the parameters' real dtype.
        layout: Where they lie, and how they are cut.
        members: In the order of their places.
        gradients: This rank's shard of the averaged gradients, if it arrives apart from the
            parameters.
        rank: Of this process.
        with_masters: Whether to keep float32 copies of segments in 16 bits.
    """
    memory.zero_()
    for member in members:
        place = _place(memory, member)
        place.copy_(member.parameter.detach())
        member.parameter.data = place
    shard = memory.narrow(0, rank * layout.shard, layout.shard)
    segments = []
    for number, begin, count, offset in layout.segments(rank):
        member = members[number]
        values = shard.narrow(0, offset, count)
        gradient = None if gradients is None else gradients.narrow(0, offset, count)
        if member.parameter.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
            gradient = None if gradient is None else torch.view_as_complex(gradient.view(-1, 2))
        updated = values
        if with_masters and needs_master(values):
            updated = values.float()
        segments.append(Segment(member, begin // member.factor, values, updated, gradient))
    return Bucket(label, memory, shard, members, segments)


def gather(bucket: Bucket, communicator: _native.Communicator, *, may_be_late: bool) -> None:
    """Brings the other ranks' shards. All ranks call it.

    Args:
        bucket: Its own shard holds new values.
        communicator: The ranks.
        may_be_late: Whether to return at once and let those wait who read the parameters.
    """
    if communicator.size == 1:
        return
    parameters = [member.parameter for member in bucket.members]
    label = f"parameters of {bucket.label}"
    if not (may_be_late and all(type(p) is nn.Parameter for p in parameters)):
        communicator.all_gather(bucket.shard, bucket.memory, False, label)
        return
    work = communicator.all_gather(bucket.shard, bucket.memory, True, label)
    assert work is not None
    bucket.gather = Gather(_parameters_of(bucket), work)


def _parameters_of(bucket: Bucket) -> Iterable[nn.Parameter]:
    for member in bucket.members:
        if isinstance(member.parameter, nn.Parameter):
            yield member.parameter
