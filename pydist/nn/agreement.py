"""What ranks tell each other before a differentiable collective, and what they must agree on.

Note [All ranks or none]
The backward of a collective is a collective: where one rank runs it, all have to. Autograd runs it
on a rank only if something there requires a gradient, which may differ between ranks: one has
frozen a layer, or has no samples. So ranks tell each other first whether their input requires a
gradient. If any does, the output requires one on every rank, and `anchor` stands for the input
where the rank's own does not. If none does, no rank records anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.errors import Error, InvalidUsage, Mismatch
from pydist.job.arguments import a_type
from pydist.job.outcome import exchange
from pydist.job.rank_names import culprits, first_that_differs, name_ranks, who_said_what

if TYPE_CHECKING:
    from pydist._native import Communicator

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """What one rank tells of its call.

    Attributes:
        call: The function, with the arguments that must be the same on all ranks.
        shapes: Those of its tensors; None where the rank has none to give.
        dtype: Of these tensors, as torch writes it.
        device: The type of device that they are on.
        requires_grad: Whether any of them does, and autograd records.
        records: Whether autograd records on this rank.
        problem: What is wrong with the call on this rank; empty if nothing is.
    """

    call: str
    shapes: list[Shape] | None
    dtype: str
    device: str
    requires_grad: bool
    records: bool
    problem: str


@dataclass(frozen=True)
class Agreement:
    """What all ranks have told, in rank order.

    Attributes:
        ranks: What each rank has told.
        records: Whether the output requires a gradient, on all ranks: Note [All ranks or none].
    """

    ranks: list[Told]
    records: bool

    def first_shapes(self) -> list[Shape]:
        """Of each rank's only, or first, tensor."""
        return [(told.shapes or [()])[0] for told in self.ranks]


def agree(
    communicator: Communicator,
    call: str,
    tensors: Sequence[object] | None,
    *,
    details: str = "",
    problem: str = "",
    root: int | None = None,
    requires_grad: bool = False,
) -> Agreement:
    """Compares a call on all ranks, which all make it.

    Args:
        communicator: The ranks.
        call: The public function's name.
        tensors: What this rank gives; None where it gives none.
        details: Arguments that must be the same on all ranks, for people.
        problem: What this rank has found wrong with its own call; empty if nothing.
        root: The rank whose tensors count; None if all ranks' do, which then have one dtype.
        requires_grad: Whether something else that this rank gives requires a gradient.

    Raises:
        InvalidUsage: This rank's call is wrong.
        Error: Another rank's is.
        Mismatch: Ranks called another function, or with other arguments or dtypes, or some records
            and some don't, on all ranks alike.
    """
    mine = _told(f"pydist.nn.{call}({details})", tensors, problem, requires_grad)
    if communicator.size == 1:
        ranks = [mine]
    else:
        label = f"pydist.nn.{call}"
        told = exchange(communicator, json.dumps(vars(mine)).encode(), label)
        ranks = [_read(text) for text in told]
    _refuse_problems(communicator, ranks)
    _refuse_different([told.call for told in ranks], "ranks call different functions")
    if root is None:
        dtypes = [told.dtype for told in ranks]
        _refuse_different(dtypes, f"pydist.nn.{call}: dtypes differ between ranks")
    requires_grad = any(told.requires_grad for told in ranks)
    silent = [rank for rank, told in enumerate(ranks) if not told.records]
    if requires_grad and silent:
        asking = next(rank for rank, told in enumerate(ranks) if told.requires_grad)
        raise Mismatch(
            f"pydist.nn.{call}: the tensor of rank {asking} requires a gradient, for which all "
            f"ranks run backward, but {name_ranks(silent)} called it under torch.no_grad(): call "
            "it there on all ranks or on none.",
            ranks=(asking, silent[0]),
        )
    return Agreement(ranks, requires_grad)


def require_same_shape(call: str, ranks: Sequence[Told]) -> None:
    """Raises Mismatch, on all ranks, where their tensors have different shapes or dtypes."""
    said = [f"{', '.join(map(str, told.shapes or []))} of {told.dtype}" for told in ranks]
    _refuse_different(said, f"pydist.nn.{call}: shapes or dtypes differ between ranks")


def require_same_rows(call: str, shapes: Sequence[Shape]) -> None:
    """Raises Mismatch, on all ranks, where rows differ in more than their number."""
    if len({shape[1:] for shape in shapes}) > 1 or len({len(shape) for shape in shapes}) > 1:
        said = who_said_what(str(shape) for shape in shapes)
        raise Mismatch(
            f"pydist.nn.{call}: shapes may differ between ranks in dimension 0 alone: {said}."
        )


def problem_of(tensor: object, name: str = "tensor") -> str:
    """Why a collective can't take an object; empty if it can."""
    if not isinstance(tensor, Tensor):
        return f"{name} is {a_type(tensor)}; it must be a torch tensor."
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"{name} is {tensor.layout}, {tensor.dtype}; it must be dense."
    return ""


def problem_of_root(root: object, size: int, name: str = "root") -> str:
    """Why a number names no rank of a group of so many; empty if it does."""
    if isinstance(root, int) and 0 <= root < size:
        return ""
    return f"{name}={root!r} is no rank of the group; they are 0 to {size - 1}."


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch writes so."""
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def anchor(records: bool) -> Tensor | None:
    """An input that requires a gradient, on every rank: Note [All ranks or none]."""
    return torch.empty(0, device="cpu", requires_grad=True) if records else None


def any_requires_grad(communicator: Communicator, tensors: Sequence[Tensor], label: str) -> bool:
    """Whether a tensor of any rank requires a gradient, and autograd records.

    For a backward that may be differentiated again: all ranks call it, if they record.
    """
    if not torch.is_grad_enabled():
        return False
    mine = any(tensor.requires_grad for tensor in tensors)
    return any(told == b"1" for told in exchange(communicator, b"1" if mine else b"0", label))


def _told(call: str, tensors: Sequence[object] | None, problem: str, requires_grad: bool) -> Told:
    given = [tensor for tensor in tensors or [] if isinstance(tensor, Tensor)]
    problem = problem or next(filter(None, map(problem_of, tensors or [])), "")
    dtypes = dict.fromkeys(str(tensor.dtype) for tensor in given)
    if len(dtypes) > 1 and not problem:
        problem = f"tensors have different dtypes: {', '.join(dtypes)}; they must have one."
    records = torch.is_grad_enabled()
    return Told(
        call=call,
        shapes=None if tensors is None else [tuple(tensor.shape) for tensor in given],
        dtype=next(iter(dtypes), ""),
        device=given[0].device.type if given else "",
        requires_grad=records and (requires_grad or any(each.requires_grad for each in given)),
        records=records,
        problem=problem,
    )


def _read(text: bytes) -> Told:
    fields = json.loads(text)
    if fields["shapes"] is not None:
        fields["shapes"] = [tuple(shape) for shape in fields["shapes"]]
    return Told(**fields)


def _refuse_problems(communicator: Communicator, ranks: list[Told]) -> None:
    own = ranks[communicator.rank]
    if own.problem:
        raise InvalidUsage(f"{own.call}: {own.problem}")
    for rank, told in enumerate(ranks):
        if told.problem:
            raise Error(
                f"{told.call} is wrong on rank {rank}: {told.problem}",
                **culprits(communicator, [rank], told.problem),
            )


def _refuse_different(said: list[str], what: str) -> None:
    other = first_that_differs(said)
    if other is not None:
        raise Mismatch(f"{what}: {who_said_what(said)}.", ranks=(0, other))
