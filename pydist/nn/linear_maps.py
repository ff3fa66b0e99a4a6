"""Collectives as linear maps, each with the map that its backward is.

Note [The sum of all ranks' losses]
A collective has an input and an output on every rank, and each rank has a loss of its own. The
gradient of an input is that of the *sum of all ranks' losses*: what other ranks make of it counts,
too. For a linear map that is its transpose, applied to the gradients of all ranks' outputs:

    all_reduce (sum, mean)   <->  itself
    all_gather               <->  reduce_scatter (sum)
    all_to_all               <->  all_to_all, with the counts of what is sent and received exchanged
    broadcast                <->  reduce (sum)

gather and scatter are all_to_all in which one rank alone receives, or sends, anything. Each
backward is made of the same maps, so it can be differentiated again, as often as one likes.

`pydist.DataParallel` divides what this leaves by the number of ranks. The sum of the losses becomes
their mean: the loss itself, where all ranks compute the same.

Maps take and give tensors of one dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pydist._torch import runs_uncompiled_throughout
from pydist.nn.agreement import anchor, any_requires_grad

if TYPE_CHECKING:
    from pydist._native import Communicator


class LinearMap(Protocol):
    """What all ranks of a group do with their vectors, linearly."""

    @property
    def communicator(self) -> Communicator:
        """The ranks."""

    @property
    def label(self) -> str:
        """The call that it belongs to, for errors."""

    def run(self, vector: Tensor) -> Tensor:
        """The map of all ranks' vectors, in new memory. All ranks call it."""

    def transpose(self) -> LinearMap:
        """What takes gradients of outputs to gradients of inputs."""


def apply(linear: LinearMap, vector: Tensor, *, records: bool) -> Tensor:
    """Applies a map to the vectors of all ranks, which all call it.

    Args:
        linear: The map.
        vector: This rank's.
        records: Whether the result requires a gradient, the same on all ranks.
    """
    if not records:
        with torch.no_grad():
            return linear.run(vector.contiguous())
    result: Tensor = _Apply.apply(vector, anchor(records), linear)  # type: ignore[no-untyped-call]
    return result


def apply_in_backward(linear: LinearMap, vector: Tensor) -> Tensor:
    """Applies a map within a backward, where ranks have told each other nothing yet."""
    records = any_requires_grad(linear.communicator, [vector], linear.label)
    return apply(linear, vector, records=records)


class _Apply(torch.autograd.Function):
    """A map with its transpose as backward."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, _: Tensor | None, linear: LinearMap) -> Tensor:
        ctx.linear = linear
        return linear.run(vector.contiguous())

    @staticmethod
    @runs_uncompiled_throughout
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return apply_in_backward(ctx.linear.transpose(), gradient), None, None


def _backward_of(label: str) -> str:
    return label if label.startswith("backward of ") else f"backward of {label}"


@dataclass(frozen=True)
class AllReduce:
    """The "sum" or the "mean" of all vectors, on every rank."""

    communicator: Communicator
    label: str
    op: str = "sum"

    def run(self, vector: Tensor) -> Tensor:
        out = torch.empty_like(vector)
        self.communicator.all_reduce(vector, out, self.op, label=self.label)
        return out

    def transpose(self) -> AllReduce:
        return replace(self, label=_backward_of(self.label))


@dataclass(frozen=True)
class AllGather:
    """All vectors, one after the other, on every rank; divided by the number of ranks for "mean".

    Attributes:
        counts: The number of elements of each rank's vector.
    """

    communicator: Communicator
    label: str
    counts: tuple[int, ...]
    op: str = "sum"

    def run(self, vector: Tensor) -> Tensor:
        out = vector.new_empty(sum(self.counts))
        into: Tensor | list[Tensor] = out
        if len(set(self.counts)) > 1:
            into = list(out.split(self.counts))
        self.communicator.all_gather(vector, into, label=self.label)
        return out.div_(len(self.counts)) if self.op == "mean" else out

    def transpose(self) -> ReduceScatter:
        return ReduceScatter(self.communicator, _backward_of(self.label), self.counts, self.op)


@dataclass(frozen=True)
class ReduceScatter:
    """This rank's block of the "sum" or the "mean" of all vectors.

    Attributes:
        counts: The number of elements of each rank's block.
    """

    communicator: Communicator
    label: str
    counts: tuple[int, ...]
    op: str = "sum"

    def run(self, vector: Tensor) -> Tensor:
        own, size = self.counts[self.communicator.rank], self.communicator.size
        if len(set(self.counts)) == 1:
            out = vector.new_empty(own)
            self.communicator.reduce_scatter(vector, out, self.op, label=self.label)
            return out
        # Blocks of different sizes: the engine's reduce_scatter has none, and padding them to the
        # largest may take any amount of memory. This moves as many bytes as a reduce_scatter.
        exchanged = AllToAll(self.communicator, self.label, self.counts, (own,) * size)
        blocks = exchanged.run(vector).view(size, own)
        return blocks.mean(0) if self.op == "mean" else blocks.sum(0, dtype=vector.dtype)

    def transpose(self) -> AllGather:
        return AllGather(self.communicator, _backward_of(self.label), self.counts, self.op)


@dataclass(frozen=True)
class AllToAll:
    """A block of every rank's vector.

    Attributes:
        sent: The number of elements for each rank, in the order in which they lie in the vector.
        received: The number of elements from each rank, in the order in which they come to lie.
    """

    communicator: Communicator
    label: str
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def run(self, vector: Tensor) -> Tensor:
        out = vector.new_empty(sum(self.received))
        self.communicator.all_to_all(
            list(vector.split(self.sent)), list(out.split(self.received)), label=self.label
        )
        return out

    def transpose(self) -> AllToAll:
        return AllToAll(self.communicator, _backward_of(self.label), self.received, self.sent)


@dataclass(frozen=True)
class Broadcast:
    """The root's vector, on every rank."""

    communicator: Communicator
    label: str
    root: int

    def run(self, vector: Tensor) -> Tensor:
        out = vector.clone()
        self.communicator.broadcast(out, self.root, label=self.label)
        return out

    def transpose(self) -> Reduce:
        return Reduce(self.communicator, _backward_of(self.label), self.root)


@dataclass(frozen=True)
class Reduce:
    """The sum of all vectors at the root, zeros elsewhere."""

    communicator: Communicator
    label: str
    root: int

    def run(self, vector: Tensor) -> Tensor:
        is_root = self.communicator.rank == self.root
        out = torch.empty_like(vector) if is_root else torch.zeros_like(vector)
        self.communicator.reduce(vector, out if is_root else None, self.root, label=self.label)
        return out

    def transpose(self) -> Broadcast:
        return Broadcast(self.communicator, _backward_of(self.label), self.root)
