"""Differentiable all_reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist._torch import runs_uncompiled_throughout
from pydist.job import groups
from pydist.job.groups import Group
from pydist.nn.agreement import (
    agree,
    anchor,
    any_requires_grad,
    problem_of,
    require_same_shape,
)
from pydist.nn.blocks import equal_blocks, joined
from pydist.nn.linear_maps import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    apply,
    apply_in_backward,
)

if TYPE_CHECKING:
    from pydist._native import Communicator

__all__ = ["all_reduce", "reduce_scatter"]

_LINEAR = ("sum", "mean")
_OTHER = ("max", "min", "prod")
_WITHOUT_GRADIENT = ("band", "bor", "bxor")


@runs_uncompiled_throughout
def all_reduce(tensor: Tensor, op: str = "sum", *, group: Group | None = None) -> Tensor:
    """Combines the tensors of all ranks; every rank gets the result, which has a gradient.

    Every rank of the group calls it, and runs its backward if any rank's tensor requires a
    gradient.

    With g the sum of all ranks' gradients of the result, the gradient of a rank's tensor is, for
    "sum", g; for "mean", g divided by the number of ranks; for "max" and "min", g where the rank
    has the extreme value, shared equally by all ranks that have it (as `torch.amax` does; a NaN
    counts as extreme), and 0 elsewhere; for "prod", g times the product of the other ranks' values,
    which is right where values are 0, too. "prod" gathers the tensors of all ranks in backward.

    Args:
        tensor: any shape, the same shape and dtype on every rank; any strides. Not changed.
        op: "sum", "mean", "max", "min" or "prod"; also "band", "bor" and "bxor", which are for
            integers and have no gradient. The same on every rank.
        group: the ranks, as in `pydist.all_reduce`; default: all.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        InvalidUsage: `op` is unknown, has no meaning for the dtype, or has no gradient and `tensor`
            requires one. The other ranks get an `Error` that names this one.
        Mismatch: the ranks disagree on shape, dtype or op, or on whether autograd records.
        Timeout: a rank did not come, here or in backward; it is named.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> x = torch.ones(2, requires_grad=True)
        >>> pydist.nn.all_reduce(x.square(), "mean").sum().backward()
        >>> x.grad / pydist.world_size()  # as DataParallel divides
        tensor([2., 2.])
    """
    communicator = groups.communicator_of(group)
    problem = problem_of(tensor) or _problem_of_op(op, [tensor])
    agreement = agree(communicator, "all_reduce", [tensor], details=f"op={op!r}", problem=problem)
    require_same_shape("all_reduce", agreement.ranks)
    label = "pydist.nn.all_reduce"
    vector, records = tensor.reshape(-1), agreement.records
    if op in _LINEAR or not records:
        combined = apply(AllReduce(communicator, label, op), vector, records=records)
    elif op == "prod":
        combined = _Product.apply(vector, anchor(records), communicator)  # type: ignore[no-untyped-call]
    else:
        combined = _Extreme.apply(vector, anchor(records), communicator, op)  # type: ignore[no-untyped-call]
    return combined.view(tensor.shape)


@runs_uncompiled_throughout
def reduce_scatter(
    tensor: Tensor | Sequence[Tensor], op: str = "sum", *, group: Group | None = None
) -> Tensor:
    """Combines blocks over all ranks; each rank gets its own block, which has a gradient.

    Every rank of the group calls it, and runs its backward if any rank's tensor requires a
    gradient. Gradients are those of `all_reduce`, block by block, from the rank that has the block.

    Args:
        tensor: the blocks for all ranks: one tensor whose dimension 0 is a multiple of the number
            of ranks, or a list of one tensor for each rank, which may differ in shape. All ranks
            have the same shapes. Not changed.
        op: as for `all_reduce`. "band", "bor" and "bxor" take blocks of equal size alone.
        group: the ranks, as in `pydist.reduce_scatter`; default: all.

    Returns:
        This rank's block, in new memory.

    Raises:
        InvalidUsage: as for `all_reduce`; the blocks do not divide evenly, or there is not one for
            each rank.
        Mismatch: as for `all_reduce`.
        Timeout: as for `all_reduce`.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> pydist.nn.reduce_scatter(torch.ones(4 * pydist.world_size())).shape
        torch.Size([4])
    """
    communicator = groups.communicator_of(group)
    rank, size = communicator.rank, communicator.size
    blocks, problem = equal_blocks(tensor, size)
    problem = problem or _problem_of_op(op, blocks)
    agreement = agree(communicator, "reduce_scatter", blocks, details=f"op={op!r}", problem=problem)
    require_same_shape("reduce_scatter", agreement.ranks)
    label, records = "pydist.nn.reduce_scatter", agreement.records
    counts, shape = tuple(block.numel() for block in blocks), blocks[rank].shape
    if op in _LINEAR:
        linear = ReduceScatter(communicator, label, counts, op)
        return apply(linear, joined(blocks), records=records).view(shape)
    if op not in _OTHER:
        out = torch.empty_like(blocks[rank], memory_format=torch.contiguous_format)
        communicator.reduce_scatter(blocks, out, op, label=label)
        return out
    # Every rank gets all there is of its block, and combines it by torch's own functions, whose
    # gradients are right: those of equal values, of zeros, and of gradients themselves.
    exchange = AllToAll(communicator, label, counts, (counts[rank],) * size)
    found = apply(exchange, joined(blocks), records=records).view(size, *shape)
    if op == "prod":
        return found.prod(0, dtype=found.dtype)
    return found.amax(0) if op == "max" else found.amin(0)


def _problem_of_op(op: object, tensors: Sequence[Tensor]) -> str:
    if op == "premul_sum":
        return 'op="premul_sum" is not for here: sum factor * tensor, which has the same gradient.'
    if op not in (*_LINEAR, *_OTHER, *_WITHOUT_GRADIENT):
        return f"op={op!r} is unknown; it is one of {', '.join((*_LINEAR, *_OTHER))}, or of " + (
            f"{', '.join(_WITHOUT_GRADIENT)}, which have no gradient."
        )
    if op in _WITHOUT_GRADIENT and any(tensor.requires_grad for tensor in tensors):
        return f"op={op!r} has no gradient, and the tensor requires one: give tensor.detach()."
    return ""


class _Extreme(torch.autograd.Function):
    """The largest or smallest values; ranks that have them share the gradient."""

    @staticmethod
    def forward(
        ctx: Any, vector: Tensor, _: Tensor | None, communicator: Communicator, op: str
    ) -> Tensor:
        label = "pydist.nn.all_reduce"
        extreme = AllReduce(communicator, label, op).run(vector.contiguous())
        has_it = (vector == extreme) | (vector.isnan() & extreme.isnan())
        having = AllReduce(communicator, label).run(has_it.to(torch.float32))
        ctx.save_for_backward((has_it / having).to(vector.dtype))
        ctx.communicator = communicator
        return extreme

    @staticmethod
    @runs_uncompiled_throughout
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (share,) = ctx.saved_tensors
        back = AllReduce(ctx.communicator, "backward of pydist.nn.all_reduce")
        return apply_in_backward(back, gradient) * share, None, None, None


class _Product(torch.autograd.Function):
    """The product; a rank's gradient has the product of the others, without a division by zero."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, _: Tensor | None, communicator: Communicator) -> Tensor:
        ctx.save_for_backward(vector)
        ctx.communicator = communicator
        return AllReduce(communicator, "pydist.nn.all_reduce", "prod").run(vector.contiguous())

    @staticmethod
    @runs_uncompiled_throughout
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (vector,) = ctx.saved_tensors
        communicator, label = ctx.communicator, "backward of pydist.nn.all_reduce"
        size, rank = communicator.size, communicator.rank
        # One answer for both maps: it may be the values alone that are to be differentiated.
        records = any_requires_grad(communicator, [gradient, vector], label)
        gather = AllGather(communicator, label, (vector.numel(),) * size)
        values = apply(gather, vector, records=records).view(size, -1)
        others = torch.cat([values[:rank], values[rank + 1 :]]).prod(0)
        total = apply(AllReduce(communicator, label), gradient, records=records)
        return total * others.conj(), None, None
