"""`pydist.nn.contrastive_loss`: each rank computes its own rows of the matrix of similarities.

Note [A block of the matrix]
With N ranks and B pairs in all, Z = first @ second.T holds the similarities of all, (B, B), and
S = scale * Z. The loss is the mean of two cross entropies, along the rows of S and along its
columns, in which the pair's own entry is the right class:

    loss = sum_i (logsumexp_j S_ij + logsumexp_j S_ji - 2 S_ii) / 2B

Rank r has the rows of its own `first`, a block of (B/N, B). It needs `second` of all ranks for
that, which are gathered. The logsumexp of a column runs over the blocks of all ranks: its maximum,
and the sum of what is left, are reduced, B numbers each. With both of them known, the gradient of
a block is known to its rank alone:

    P_ij = (exp(S_ij - rows_i) + exp(S_ij - columns_j) - 2 [i = j]) / 2B

and with it all of the gradient of `first`, scale * P @ second, and a part of that of `second`,
scale * P.T @ first, which is summed over the ranks and handed to its owner by one reduce_scatter.
All this happens in forward, as the block is there. What is kept for backward has the size of the
inputs. There are two blocks at most at the same time, S and P: 2B^2/N elements.

DisCo-CLIP (Chen et al., CVPR 2023, arXiv:2304.08480) cuts the matrix in this way. It gathers both
inputs and takes a block of the rows and one of the columns; here one block serves both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist._torch import runs_uncompiled_throughout
from pydist.job.arguments import a_type
from pydist.nn.agreement import agree, anchor, problem_of, require_same_rows
from pydist.nn.backward_agreement import refuse_join, tell
from pydist.nn.differentiable_once import differentiable_once
from pydist.nn.linear_maps import AllGather, AllReduce, ReduceScatter
from pydist.nn.scope import Scope, ranks_of

if TYPE_CHECKING:
    from pydist._native import Communicator

__all__ = ["contrastive_loss"]

_LABEL = "pydist.nn.contrastive_loss"


@runs_uncompiled_throughout
def contrastive_loss(
    first: Tensor, second: Tensor, scale: Tensor | float = 1.0, *, group: Scope = "world"
) -> Tensor:
    """The contrastive loss (CLIP's, InfoNCE both ways) of the pairs of all ranks, in little memory.

    What one process computes from the rows of all ranks::

        similarities = scale * first @ second.t()
        pairs = torch.arange(len(first))
        loss = (cross_entropy(similarities, pairs) + cross_entropy(similarities.t(), pairs)) / 2

    Here each rank computes its rows of the similarities alone, and keeps none of them: with B pairs
    on N ranks, at most 2B²/N elements beside the inputs, gathered and own, and their gradients.
    Rows are used as they are: normalize them first, as CLIP does.

    Every rank gets the same loss. As all of `pydist.nn`, its gradient is right through
    `pydist.DataParallel`, without a factor to remember, and also if ranks have different numbers of
    pairs. What holds for `whole_batch` about `weighted()`, `join()` and `reduction="sum"` holds
    here. `scale` gets its whole gradient on each rank.

    Every rank of the group calls it; it joins the job by itself. If any input of any rank requires
    a gradient, every rank runs backward, once. The backward can't be differentiated again.

    Args:
        first: this rank's rows, (n, d), floating point. n may differ between ranks, and be 0.
        second: the rows that belong to them, (n, d), of the same dtype.
        scale: what similarities are multiplied by, 1 / temperature: a number, or a tensor of one
            element; the same on every rank.
        group: whose pairs, as for `whole_batch`.

    Returns:
        A scalar, in the dtype of the rows, or in float32 if theirs has 16 bits; sums are computed
        in that. NaN if no rank has a pair.

    Raises:
        InvalidUsage: the tensors do not fit each other, or it was called in `join()`. The other
            ranks get an `Error` that names this one.
        Mismatch: the ranks disagree on dtype, on d or on whether autograd records; in backward: on
            the weight of it.
        Timeout: a rank did not come, here or in backward; it is named.

    Example:
        >>> import pydist, torch
        >>> rows = torch.eye(4, requires_grad=True)
        >>> pydist.nn.contrastive_loss(rows, rows.detach(), scale=10.0).backward()
    """
    refuse_join("contrastive_loss")
    communicator = ranks_of(group)
    problem = _problem_of(first, second, scale)
    agreement = agree(
        communicator,
        "contrastive_loss",
        [first, second],
        problem=problem,
        requires_grad=isinstance(scale, Tensor) and scale.requires_grad,
    )
    shapes = agreement.first_shapes()
    require_same_rows("contrastive_loss", shapes)
    wide = torch.promote_types(first.dtype, torch.float32)
    factor = torch.as_tensor(scale, dtype=wide, device=first.device).reshape(())
    rows = [shape[0] for shape in shapes]
    loss: Tensor = _BlockLoss.apply(  # type: ignore[no-untyped-call]
        first, second, factor, anchor(agreement.records), communicator, rows
    )
    return loss


class _BlockLoss(torch.autograd.Function):
    """The loss, with its gradients, which forward has computed already."""

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        scale: Tensor,
        records: Tensor | None,
        communicator: Communicator,
        rows: list[int],
    ) -> Tensor:
        ctx.communicator, ctx.dtype = communicator, first.dtype
        # The types are chosen here.
        with torch.autocast(first.device.type, enabled=False):
            block = _Block(first, second, scale, communicator, rows)
            loss = block.loss()
            if records is not None:
                ctx.save_for_backward(*block.gradients(), first, second, scale)
        return loss

    @staticmethod
    @runs_uncompiled_throughout
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        communicator = ctx.communicator
        # Ranks may weigh the loss differently. What they all make of it counts, for the rows; the
        # scale gets its share of that on every rank.
        told = tell(communicator, "contrastive_loss", [gradient.item()])
        total = sum(values[0] for values in told)
        of_first, of_second, of_scale, *inputs = ctx.saved_tensors
        with torch.no_grad():
            own = (
                (of_first * total).to(ctx.dtype),
                (of_second * total).to(ctx.dtype),
                of_scale * (total / communicator.size),
            )
        once = (differentiable_once(each, "contrastive_loss", *inputs) for each in own)
        return *once, None, None, None


class _Block:
    """A rank's rows of the similarities: Note [A block of the matrix]."""

    def __init__(
        self,
        first: Tensor,
        second: Tensor,
        scale: Tensor,
        communicator: Communicator,
        rows: list[int],
    ) -> None:
        self._communicator = communicator
        self._first, self._scale = first.contiguous(), scale
        self._pairs = sum(rows)
        self._counts = tuple(count * first.shape[1] for count in rows)
        gather = AllGather(communicator, _LABEL, self._counts)
        self._all_second = gather.run(second.reshape(-1)).view(self._pairs, first.shape[1])
        block = (self._first @ self._all_second.t()).to(scale.dtype)
        self._similarities = block.mul_(scale)
        begin = sum(rows[: communicator.rank])
        own = torch.arange(rows[communicator.rank], device=first.device)
        self._own_entries = own, own + begin
        self._of_rows = _log_of_rows(self._similarities)
        self._of_columns = self._log_of_columns()

    def _log_of_columns(self) -> Tensor:
        """The logsumexp of each column, over the blocks of all ranks."""
        block = self._similarities
        highest = AllReduce(self._communicator, _LABEL, "max").run(_highest(block, 0))
        sums = (block - highest).exp_().sum(0)
        return AllReduce(self._communicator, _LABEL).run(sums).log_().add_(highest)

    def loss(self) -> Tensor:
        """That of all pairs, the same on all ranks."""
        rows, columns = self._own_entries
        own = self._of_rows.sum() - 2 * self._similarities[rows, columns].sum()
        total = AllReduce(self._communicator, _LABEL).run(own.reshape(1)).squeeze(0)
        return (total + self._of_columns.sum()) / (2 * self._pairs)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of this rank's `first` and `second`, and the whole one of `scale`."""
        weights = (self._similarities - self._of_rows[:, None]).exp_()
        # No longer needed: its memory takes the other term.
        weights += self._similarities.sub_(self._of_columns).exp_()
        weights[self._own_entries] -= 2
        weights /= 2 * self._pairs
        del self._similarities
        weights = weights.to(self._first.dtype)
        of_first = (weights @ self._all_second).to(self._scale.dtype)
        of_scale = (of_first * self._first).sum()
        of_second = (weights.t() @ self._first).to(self._scale.dtype).mul_(self._scale)
        del weights
        scatter = ReduceScatter(self._communicator, _LABEL, self._counts)
        own = scatter.run(of_second.view(-1)).view(self._first.shape)
        whole = AllReduce(self._communicator, _LABEL).run(of_scale.reshape(1)).squeeze(0)
        return of_first.mul_(self._scale), own, whole


def _log_of_rows(block: Tensor) -> Tensor:
    """The logsumexp of each row; torch's own would take memory that no test could see."""
    highest = _highest(block, 1)
    return (block - highest[:, None]).exp_().sum(1).log_().add_(highest)


def _highest(block: Tensor, dim: int) -> Tensor:
    """The maxima along a dimension, which may be empty."""
    if block.shape[dim] == 0:
        return block.new_full((block.shape[1 - dim],), -torch.inf)
    return block.amax(dim)


def _problem_of(first: object, second: object, scale: object) -> str:
    if problem := problem_of(first, "first") or problem_of(second, "second"):
        return problem
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    if first.dim() != 2 or first.shape != second.shape or not first.is_floating_point():
        return (
            f"first has shape {tuple(first.shape)} and {first.dtype}, second "
            f"{tuple(second.shape)} and {second.dtype}; both must be (pairs, features), alike, and "
            "of floating point."
        )
    if isinstance(scale, Tensor):
        return (
            "" if scale.numel() == 1 else f"scale has {scale.numel()} elements; it must have one."
        )
    return "" if isinstance(scale, (int, float)) else f"scale is {a_type(scale)}; give a number."
