"""`pydist.nn.whole_batch`: the outputs of all ranks, for a loss that all ranks compute alike.

Note [The same loss everywhere]
`all_gather` adds up what the losses of all ranks say about a rank's rows: Note [The sum of all
ranks' losses] in linear_maps.py. Where all of them compute the same loss, they all say the same, so
the sum is what this rank's own loss says times the number of ranks, and nothing has to travel. And
`pydist.DataParallel` divides by that number again.

Where ranks compute different losses, such as those of their own rows, that shortcut is wrong, and
nobody would notice: the model would train on a part of its gradient. So the ranks compare digests
of their gradients, three numbers each, before they take it: the norm, and the gradient seen from
two directions that are random, and the same everywhere. From there a difference looks about as
large as it is, whether it is one of signs, rows or columns. Only what is small beside the whole
gradient can pass, as kernels of other processors differ as well.
"""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from pydist._torch import runs_uncompiled_throughout, tree_leaves, tree_map_only
from pydist.errors import Mismatch
from pydist.job.arguments import flag
from pydist.nn.agreement import agree, anchor, any_requires_grad, require_same_rows
from pydist.nn.backward_agreement import refuse_join, tell
from pydist.nn.linear_maps import AllGather, apply
from pydist.nn.scope import Scope, ranks_of

if TYPE_CHECKING:
    from pydist._native import Communicator

__all__ = ["whole_batch"]

T = TypeVar("T")

# How far digests of one loss may be apart, relative to the larger: what other kernels, on another
# kind of processor, do to sums that are rounded in such types. Losses of different rows are apart
# by far more.
_TOLERANCE = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-3}
_TOLERANCE_OF_OTHERS = 5e-2


@runs_uncompiled_throughout
def whole_batch(outputs: T, *, group: Scope = "world", check: bool = True) -> T:
    """The outputs of all ranks, for a loss over the whole batch that every rank computes.

    Contrastive losses, batch-hard triplets, rankings and correlations need the outputs of all
    samples. Gather them, and compute on every rank *the same loss*, of all rows::

        images, texts = pydist.nn.whole_batch(model(inputs))
        loss = my_loss(images, texts)  # the loss of one process that has the whole batch
        loss.backward()

    Through `pydist.DataParallel` (or torch's), whose ranks' gradients become their mean, that
    leaves the gradient of this loss as one process has it. There is no factor to remember, and
    ranks may have different numbers of rows.

    The ranks must compute the same from the same rows: what is random in the loss needs the same
    seed everywhere. A rank that computes the loss of its own rows alone is told so (`check`); for
    that take `pydist.nn.all_gather`.

    Every rank of the group calls it; it joins the job by itself. If the outputs of any rank require
    a gradient, every rank runs backward, through each of the tensors that it got. One that does not
    is named by the `Timeout` of the others.

    With `reduction="sum"`, DataParallel leaves the sum of all ranks' losses as always: the gradient
    of this one times the number of ranks. Inside `weighted()` all ranks give the same weight: a
    loss over all rows has nothing to weigh. `no_sync()` goes with it; `join()` does not.

    Args:
        outputs: a tensor (n, ...), or several in tuples, lists and dictionaries, alike on all
            ranks. n may differ between ranks, and be 0; the rest of the shape and the dtype may
            not. Other objects stay as they are.
        group: whose outputs: "world", all ranks; "host", the ranks of the same host, which then
            have a loss of their own, and DataParallel leaves the gradient of the mean of all ranks'
            losses; or a process group, with the same consequence.
        check: whether the ranks compare their weights and digests of their gradients in each
            backward, which takes a message of some bytes. If False, backward talks to nobody, and a
            loss that differs between ranks trains on wrong gradients.

    Returns:
        The same, with the rows of all ranks in rank order along dimension 0.

    Raises:
        InvalidUsage: there is no tensor in `outputs`, or one without a dimension; or it was called
            in `join()`.
        Mismatch: the ranks disagree on dtype or on the shape of a row; in backward: the losses or
            the weights of the ranks differ.
        Timeout: a rank did not come, here or in backward; it is named.

    Example:
        >>> import pydist, torch
        >>> model = pydist.DataParallel(torch.nn.Linear(2, 3))
        >>> outputs = pydist.nn.whole_batch(model(torch.ones(4, 2)))
        >>> (outputs @ outputs.t()).logsumexp(1).mean().backward()
    """
    flag("check", check)
    refuse_join("whole_batch")
    communicator = ranks_of(group)
    if not any(isinstance(each, Tensor) for each in tree_leaves(outputs)):
        # The others are told as well, where they come with their first tensor.
        problem = "outputs holds no tensor; give what the model returned, tensors of rows."
        agree(communicator, "whole_batch", None, problem=problem)
    gathered: T = tree_map_only(
        Tensor, lambda tensor: _gathered(communicator, tensor, bool(check)), outputs
    )
    return gathered


def _gathered(communicator: Communicator, tensor: Tensor, check: bool) -> Tensor:
    problem = ""
    if tensor.dim() == 0:
        problem = "a tensor has no dimension; it must have rows, one for each sample of this rank."
    agreement = agree(
        communicator, "whole_batch", [tensor], details=f"check={check}", problem=problem
    )
    shapes = agreement.first_shapes()
    require_same_rows("whole_batch", shapes)
    rows = [shape[0] for shape in shapes]
    linear = AllGather(communicator, "pydist.nn.whole_batch", tuple(map(prod, shapes)))
    if agreement.records:
        flat = _SameLoss.apply(tensor, anchor(True), linear, rows, check)  # type: ignore[no-untyped-call]
    else:
        flat = apply(linear, tensor.reshape(-1), records=False)
    # Here and not in the function: torch refuses to change a view in place that one has returned.
    gathered: Tensor = flat.view(sum(rows), *shapes[0][1:])
    return gathered


class _SameLoss(torch.autograd.Function):
    """All ranks' rows; backward takes this rank's own: Note [The same loss everywhere]."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, _: Tensor | None, linear: AllGather, rows: list[int], check: bool
    ) -> Tensor:
        ctx.linear, ctx.rows, ctx.check = linear, rows, check
        ctx.shape = (sum(rows), *tensor.shape[1:])
        return linear.run(tensor.reshape(-1).contiguous())

    @staticmethod
    @runs_uncompiled_throughout
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        linear, communicator = ctx.linear, ctx.linear.communicator
        gradient = gradient.reshape(ctx.shape)
        label = "backward of pydist.nn.whole_batch"
        if ctx.check:
            _require_same(communicator, gradient.detach())
        records = any_requires_grad(communicator, [gradient], label)
        own = _OwnRows.apply(  # type: ignore[no-untyped-call]
            gradient, anchor(records), replace(linear, label=label), ctx.rows
        )
        return own, None, None, None, None


class _OwnRows(torch.autograd.Function):
    """This rank's rows of a gradient that all ranks have, times their number.

    What it stands for, the sum of all ranks' gradients, has all_gather as its transpose.
    """

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, _: Tensor | None, linear: AllGather, rows: list[int]
    ) -> Tensor:
        ctx.linear, ctx.shape = linear, gradient.shape
        communicator = linear.communicator
        own: Tensor = gradient.split(rows)[communicator.rank] * communicator.size
        return own

    @staticmethod
    @runs_uncompiled_throughout
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        linear = ctx.linear
        records = any_requires_grad(linear.communicator, [gradient], linear.label)
        gathered = apply(linear, gradient.reshape(-1), records=records)
        return gathered.view(ctx.shape), None, None, None


def _require_same(communicator: Communicator, gradient: Tensor) -> None:
    """Raises Mismatch, on all ranks alike, where they have different gradients of all rows."""
    digests = tell(communicator, "whole_batch", _digest(gradient))
    largest = max(digest[0] for digest in digests)
    tolerance = _TOLERANCE.get(gradient.dtype, _TOLERANCE_OF_OTHERS)
    for rank, digest in enumerate(digests):
        for own, first in zip(digest, digests[0], strict=True):
            both_finite = math.isfinite(own) and math.isfinite(first)
            if abs(own - first) > tolerance * largest if both_finite else str(own) != str(first):
                raise Mismatch(
                    f"the loss of rank {rank} is not that of rank 0: their gradients of the "
                    f"gathered outputs differ ({own:.6g} and {first:.6g} of a digest). A loss over "
                    "pydist.nn.whole_batch is the same on every rank: of all rows, and with the "
                    "same seed for what is random in it. Where each rank has a loss of its own "
                    "rows, gather by pydist.nn.all_gather instead.",
                    ranks=(0, rank),
                )


def _digest(gradient: Tensor) -> list[float]:
    """The norm of a gradient of all rows, and what is seen of it from two random directions."""
    if gradient.numel() == 0:
        return [0.0, 0.0, 0.0]
    # The kernel for rows is fast where they are contiguous and nothing is converted to float64.
    rows = gradient.resolve_conj().contiguous()
    rows = (torch.view_as_real(rows) if rows.is_complex() else rows).view(len(rows), -1)
    wide = torch.promote_types(rows.dtype, torch.float32)
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=1, dtype=wide).double())
    # Scaled, so that a sum over a row of float16 is not much larger than its norm.
    columns = rows.shape[1]
    across = (_random(columns, rows.device) * columns**-0.5).to(rows.dtype)
    seen = (rows @ across).double() @ _random(2 * len(rows), rows.device).view(len(rows), 2)
    return torch.cat([norm.view(1), seen * columns**0.5]).tolist()


def _random(count: int, device: torch.device) -> Tensor:
    """Random numbers of variance 1, float64, the same on every rank, device and version of torch.

    No signs alone: sums of those are often the same for gradients that have few values.
    """
    # The mixing of splitmix64 (Steele, Lea and Flood: Fast splittable pseudorandom number
    # generators, 2014), of whose bits the upper half is taken; products wrap around.
    mixed = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ mixed >> shift) * factor
    return (mixed >> 32).double() * (2.0**-31 * 3**0.5)
