"""Differentiable collectives that move blocks: all_gather, gather, scatter, all_to_all, broadcast.

A block is the part of a tensor that belongs to one rank. Ranks may have blocks of different sizes,
and none has to know those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import overload

import torch
from torch import Tensor

from pydist._torch import runs_uncompiled_throughout
from pydist.job import groups
from pydist.job.groups import Group
from pydist.nn.agreement import (
    Shape,
    Told,
    agree,
    dtype_named,
    problem_of,
    problem_of_root,
    require_same_rows,
    require_same_shape,
)
from pydist.nn.linear_maps import AllGather, AllToAll, Broadcast, apply

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]


@runs_uncompiled_throughout
def all_gather(tensor: Tensor, *, group: Group | None = None) -> Tensor:
    """Gathers the rows of all ranks on all of them; the result has a gradient.

    Every rank of the group calls it, and runs its backward if any rank's tensor requires a
    gradient. The gradient of a rank's rows is the sum of what all ranks' losses say about them.
    Where all ranks compute the same loss of the rows, `whole_batch` gets it without that sum.

    Args:
        tensor: this rank's rows, (n, ...), with any strides; n may differ between ranks and be 0,
            the rest of the shape and the dtype not. A scalar counts as one row.
        group: the ranks, as in `pydist.all_gather`; default: all.

    Returns:
        The rows of all ranks, in rank order along dimension 0, in new memory.

    Raises:
        InvalidUsage: `tensor` is no dense tensor. The other ranks get an `Error` that names this
            one.
        Mismatch: the ranks disagree on dtype or on the shape of a row, or on whether autograd
            records.
        Timeout: a rank did not come, here or in backward; it is named.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> pydist.nn.all_gather(x).shape[0] == 2 * pydist.world_size()
        True
    """
    communicator = groups.communicator_of(group)
    agreement = agree(communicator, "all_gather", [tensor])
    shapes = _as_rows(agreement.first_shapes())
    require_same_rows("all_gather", shapes)
    linear = AllGather(communicator, "pydist.nn.all_gather", tuple(map(prod, shapes)))
    gathered = apply(linear, tensor.reshape(-1), records=agreement.records)
    return gathered.view(sum(shape[0] for shape in shapes), *shapes[0][1:])


@runs_uncompiled_throughout
def gather(tensor: Tensor, root: int = 0, *, group: Group | None = None) -> Tensor:
    """Gathers the rows of all ranks on one of them; the result has a gradient.

    Every rank of the group calls it. If any rank's tensor requires a gradient, all ranks run its
    backward, in which the root hands the gradients back: those without rows, too, from a sum over
    no rows, for example `loss = loss + gathered.sum()`.

    Args:
        tensor: this rank's rows, as for `all_gather`.
        root: the rank in the group that gets them.
        group: the ranks, as in `pydist.gather`; default: all.

    Returns:
        At the root, the rows of all ranks, in rank order along dimension 0. Elsewhere no rows, of
        the same shape otherwise: (0, ...).

    Raises:
        InvalidUsage: as for `all_gather`; `root` is no rank of the group.
        Mismatch: as for `all_gather`; the ranks disagree on the root.
        Timeout: as for `all_gather`.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> len(pydist.nn.gather(torch.ones(2, 3), root=0)) // 2 in (0, pydist.world_size())
        True
    """
    communicator = groups.communicator_of(group)
    rank, size = communicator.rank, communicator.size
    problem = problem_of(tensor) or problem_of_root(root, size)
    agreement = agree(communicator, "gather", [tensor], details=f"root={root}", problem=problem)
    shapes = _as_rows(agreement.first_shapes())
    require_same_rows("gather", shapes)
    sent = tuple(tensor.numel() if peer == root else 0 for peer in range(size))
    received = tuple(prod(shape) if rank == root else 0 for shape in shapes)
    linear = AllToAll(communicator, "pydist.nn.gather", sent, received)
    gathered = apply(linear, tensor.reshape(-1), records=agreement.records)
    rows = sum(shape[0] for shape in shapes) if rank == root else 0
    return gathered.view(rows, *shapes[0][1:])


@runs_uncompiled_throughout
def scatter(
    tensor: Tensor | Sequence[Tensor] | None, root: int = 0, *, group: Group | None = None
) -> Tensor:
    """Hands each rank its block of what the root has; the block has a gradient.

    Every rank of the group calls it, and runs its backward if the root's tensor requires a
    gradient.

    Args:
        tensor: at the root, the blocks for all ranks: one tensor whose dimension 0 is a multiple of
            the number of ranks, or a list of one tensor for each rank, which may differ in shape.
            Elsewhere None, or anything: its values are ignored, and its gradient is zero.
        root: the rank in the group that has the blocks.
        group: the ranks, as in `pydist.scatter`; default: all.

    Returns:
        This rank's block, in new memory, on the kind of device that the root's tensor is on: of
        GPUs, on the current one.

    Raises:
        InvalidUsage: at the root, the blocks do not divide evenly, or there is not one for each
            rank; `root` is no rank of the group. The other ranks get an `Error` that names this
            one.
        Mismatch: the ranks disagree on the root, or on whether autograd records.
        Timeout: a rank did not come, here or in backward; it is named.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> all_blocks = torch.arange(2.0 * pydist.world_size()) if pydist.rank() == 0 else None
        >>> pydist.nn.scatter(all_blocks, root=0).shape
        torch.Size([2])
    """
    communicator = groups.communicator_of(group)
    rank, size = communicator.rank, communicator.size
    problem = problem_of_root(root, size)
    blocks: list[Tensor] | None = None
    if rank == root:
        blocks, found = equal_blocks(tensor, size)
        problem = problem or found
    agreement = agree(
        communicator, "scatter", blocks, details=f"root={root}", problem=problem, root=root
    )
    told = agreement.ranks[root]
    assert told.shapes is not None
    shape = told.shapes[rank]
    given = _ignored(tensor, told) if blocks is None else joined(blocks)
    sent = tuple(prod(each) if rank == root else 0 for each in told.shapes)
    received = tuple(prod(shape) if peer == root else 0 for peer in range(size))
    linear = AllToAll(communicator, "pydist.nn.scatter", sent, received)
    return apply(linear, given, records=agreement.records).view(shape)


@overload
def all_to_all(tensor: Tensor, *, group: Group | None = ...) -> Tensor: ...
@overload
def all_to_all(tensor: Sequence[Tensor], *, group: Group | None = ...) -> tuple[Tensor, ...]: ...
@runs_uncompiled_throughout
def all_to_all(
    tensor: Tensor | Sequence[Tensor], *, group: Group | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Sends a block to every rank and takes one from every rank; these have a gradient.

    Every rank of the group calls it, and runs its backward if any rank's tensor requires a
    gradient. The gradient of a block comes from the rank that got it.

    Args:
        tensor: the blocks for all ranks: one tensor whose dimension 0 is a multiple of the number
            of ranks, or a list of one tensor for each rank, of any shapes. One tensor on all ranks,
            or a list on all. Not changed.
        group: the ranks, as in `pydist.all_to_all`; default: all.

    Returns:
        The blocks from all ranks, in rank order: along dimension 0 of one tensor, or as a tuple, as
        they were given.

    Raises:
        InvalidUsage: the blocks do not divide evenly, or there is not one for each rank. The other
            ranks get an `Error` that names this one.
        Mismatch: the ranks disagree on dtype, on one tensor or a list, on the shape of a row (of
            one tensor), or on whether autograd records.
        Timeout: a rank did not come, here or in backward; it is named.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> blocks = [torch.ones(peer + 1) for peer in range(pydist.world_size())]
        >>> len(pydist.nn.all_to_all(blocks)) == pydist.world_size()
        True
    """
    communicator = groups.communicator_of(group)
    rank, size = communicator.rank, communicator.size
    is_one = isinstance(tensor, Tensor)
    blocks, problem = equal_blocks(tensor, size)
    details = "one tensor" if is_one else "a list"
    agreement = agree(communicator, "all_to_all", blocks, details=details, problem=problem)
    shapes = [(told.shapes or [])[rank] for told in agreement.ranks]
    if is_one:
        # What every rank has for all ranks, so that all find the same.
        require_same_rows("all_to_all", agreement.first_shapes())
    received = tuple(map(prod, shapes))
    linear = AllToAll(
        communicator, "pydist.nn.all_to_all", tuple(block.numel() for block in blocks), received
    )
    exchanged = apply(linear, joined(blocks), records=agreement.records)
    if is_one:
        return exchanged.view(sum(shape[0] for shape in shapes), *shapes[0][1:])
    parts = exchanged.split(received)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


@runs_uncompiled_throughout
def broadcast(tensor: Tensor | None, root: int = 0, *, group: Group | None = None) -> Tensor:
    """Copies the root's tensor to all ranks; the copies have a gradient.

    Every rank of the group calls it, and runs its backward if any rank's tensor requires a
    gradient. The gradient of the root's tensor is the sum over all ranks; that of other ranks'
    tensors is zero.

    Args:
        tensor: at the root, what all ranks get; any shape and strides. Elsewhere None, or a tensor
            of the same shape and dtype, whose values are ignored. Not changed.
        root: the rank in the group that has the data.
        group: the ranks, as in `pydist.broadcast`; default: all.

    Returns:
        A new tensor: on the device of `tensor`; where that is None, on the kind of device that the
        root's is on: of GPUs, on the current one.

    Raises:
        InvalidUsage: `root` is no rank of the group, or has no tensor. The other ranks get an
            `Error` that names this one.
        Mismatch: the ranks disagree on the root, on shape or dtype, or on whether autograd records.
        Timeout: a rank did not come, here or in backward; it is named.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> pydist.nn.broadcast(torch.ones(2) if pydist.rank() == 0 else None)
        tensor([1., 1.])
    """
    communicator = groups.communicator_of(group)
    problem = problem_of_root(root, communicator.size)
    if tensor is not None or communicator.rank == root:
        problem = problem or problem_of(tensor)
    given = None if tensor is None else [tensor]
    agreement = agree(
        communicator, "broadcast", given, details=f"root={root}", problem=problem, root=root
    )
    told = agreement.ranks[root]
    # Those without a tensor agree with whatever the root has.
    known = [told if each.shapes is None else each for each in agreement.ranks]
    require_same_shape("broadcast", known)
    assert told.shapes is not None
    shape = told.shapes[0]
    vector = _empty(told.dtype, told.device, prod(shape)) if tensor is None else tensor.reshape(-1)
    linear = Broadcast(communicator, "pydist.nn.broadcast", root)
    return apply(linear, vector, records=agreement.records).view(shape)


def equal_blocks(tensor: object, size: int) -> tuple[list[Tensor], str]:
    """The blocks of what a caller gave for all ranks, and what is wrong with it, if anything."""
    if isinstance(tensor, (list, tuple)):
        for index, block in enumerate(tensor):
            if problem := problem_of(block, f"tensor[{index}]"):
                return [], problem
        if len(tensor) != size:
            return [], f"tensor holds {len(tensor)} blocks; the group has {size} ranks."
        return list(tensor), ""
    if problem := problem_of(tensor):
        return [], problem
    assert isinstance(tensor, Tensor)
    if tensor.dim() == 0 or len(tensor) % size != 0:
        return [], (
            f"tensor has shape {tuple(tensor.shape)}; its dimension 0 must be a multiple of the "
            f"group's {size} ranks. For other cuts pass a list of tensors."
        )
    rows = len(tensor) // size
    return [tensor[rows * rank : rows * (rank + 1)] for rank in range(size)], ""


def joined(blocks: Sequence[Tensor]) -> Tensor:
    """The elements of all blocks, one after the other."""
    return torch.cat([block.reshape(-1) for block in blocks])


def _as_rows(shapes: Sequence[Shape]) -> list[Shape]:
    return [shape or (1,) for shape in shapes]


def _ignored(given: object, root: Told) -> Tensor:
    """No elements, of the type that the root has: of the tensor given, if it is of that type.

    A tensor that is given keeps its way to backward, which `torch.autograd.grad` looks for.
    """
    first = given[0] if isinstance(given, (list, tuple)) and given else given
    if isinstance(first, Tensor) and str(first.dtype) == root.dtype:
        return first.reshape(-1)[:0]
    return _empty(root.dtype, root.device)


def _empty(dtype: str, device: str, count: int = 0) -> Tensor:
    return torch.empty(count, dtype=dtype_named(dtype), device=device)
