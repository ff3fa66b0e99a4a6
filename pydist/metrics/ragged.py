"""Gathering what ranks have different amounts of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pydist.errors import Error, InvalidUsage, Mismatch
from pydist.job import groups, membership
from pydist.job.arguments import a_type
from pydist.job.groups import Group
from pydist.job.outcome import exchange
from pydist.job.rank_names import culprits

if TYPE_CHECKING:
    from pydist._native import Communicator

__all__ = ["all_gather_ragged", "exchange", "gather_ragged"]

T = TypeVar("T", Tensor, npt.NDArray[Any])


def all_gather_ragged(
    rows: T | None,
    *,
    positions: Tensor | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> T:
    """Gathers the rows of all ranks, of which each may have another number. Every rank calls it.

    Joins the job by itself (`pydist.init()`).

    Args:
        rows: this rank's rows: (n, ...) of any dtype, also on a GPU, with any strides; n may be 0,
            and differ between ranks, the rest of the shape not. A rank that has no rows, and does
            not know of what kind they would be, gives None, or a tensor of shape (0,).
        positions: int64, (n,): where each row belongs, such as the index of its sample in the data
            set; on all ranks or on none. The result is in this order. What occurs several times (a
            sampler that repeats samples, so that ranks have equally many) is kept once.
        group: the ranks; by default all.
        timeout: seconds that this may take, waiting for the slowest rank included; by default the
            group's own time-out.

    Returns:
        The rows of all ranks: those of rank 0 first, or in the order of `positions`. On the device
        of `rows` (None: on the CPU), without a graph. Of shape (0,) if nobody has any.

    Raises:
        InvalidUsage: `positions` does not fit `rows`, or `rows` has no dimension. The other ranks
            get an `Error` that names this one.
        Mismatch: ranks have rows of different shapes or dtypes, or some give positions and some do
            not.

    Example:
        >>> from pydist import metrics
        >>> outputs = torch.tensor([[3.0], [1.0], [2.0]])
        >>> metrics.all_gather_ragged(outputs, positions=torch.tensor([2, 0, 1])).tolist()
        [[1.0], [2.0], [3.0]]
    """
    gathered: T = _gathered(rows, None, positions, group, timeout)
    return gathered


def gather_ragged(
    rows: T | None,
    root: int = 0,
    *,
    positions: Tensor | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> T | None:
    """Gathers the rows of all ranks on one of them. Every rank calls it.

    Args:
        root: the rank in the group that gets them.
        rows, positions, group, timeout: see `all_gather_ragged`.

    Returns:
        At the root what `all_gather_ragged` returns, None elsewhere.

    Raises:
        InvalidUsage: as for `all_gather_ragged`; `root` is no rank of the group.
        Mismatch: as for `all_gather_ragged`.

    Example:
        >>> from pydist import metrics
        >>> metrics.gather_ragged(torch.tensor([1, 2]), root=0)
        tensor([1, 2])
    """
    gathered: T | None = _gathered(rows, root, positions, group, timeout)
    return gathered


@dataclass(frozen=True)
class _Rows:
    """What all ranks must know of one rank's rows."""

    problem: str = ""
    # None where a rank has nothing, of no particular kind.
    dtype: str | None = None
    shape: tuple[int, ...] = (0,)
    has_positions: bool | None = None

    @property
    def kind(self) -> str:
        if self.dtype is None:
            return "no rows"
        return f"rows of shape {self.shape[1:]} and {self.dtype}"


def _gathered(
    rows: Any, root: int | None, positions: Tensor | None, group: Group | None, wait: float | None
) -> Any:
    if group is None:
        membership.init()
    communicator = groups.communicator_of(group)
    if root is not None and not 0 <= root < communicator.size:
        raise InvalidUsage(
            f"root={root} is no rank of the group; they are 0 to {communicator.size - 1}."
        )
    mine, description = _described(rows, positions)
    text = json.dumps(vars(description)).encode()
    told = exchange(communicator, text, "ragged", timeout=wait)
    everybody = [_Rows(**{**text, "shape": tuple(text["shape"])}) for text in map(json.loads, told)]
    _check(everybody, communicator)
    known = next((rank for rank in everybody if rank.dtype is not None), None)
    result = None
    if known is None:
        result = mine if mine is not None else torch.empty(0)
    else:
        dtype = getattr(torch, str(known.dtype).removeprefix("torch."))
        rest = known.shape[1:]
        if description.dtype is None:
            mine = torch.empty((0, *rest), dtype=dtype)
        assert mine is not None
        lengths = [rank.shape[0] for rank in everybody]
        # As bytes, because not every backend can carry every dtype.
        found = _gather_bytes(communicator, mine, lengths, root, wait)
        if any(rank.has_positions for rank in everybody):
            where = torch.empty(0, dtype=torch.int64) if positions is None else positions
            order = _gather_bytes(communicator, where.to(torch.int64), lengths, root, wait)
            if found is not None and order is not None:
                found = found[_first_of_each(order.view(torch.int64).view(-1))]
        if found is not None:
            result = found.view(-1).view(dtype).view(len(found), *rest)
    if root is not None and root != communicator.rank:
        return None
    assert result is not None
    if isinstance(rows, np.ndarray):
        return result.numpy()
    return result.to(rows.device) if isinstance(rows, Tensor) else result


def _described(rows: Any, positions: Tensor | None) -> tuple[Tensor | None, _Rows]:
    """The rows as a tensor on the CPU, and what the others must know; problems included."""
    tensor: Tensor | None = None
    if isinstance(rows, np.ndarray):
        try:
            tensor = torch.from_numpy(rows.copy())
        except TypeError as error:
            return None, _Rows(problem=str(error))
    elif isinstance(rows, Tensor):
        tensor = rows.detach().cpu()
    elif rows is not None:
        return None, _Rows(problem=f"rows is {a_type(rows)}; it must be a tensor.")
    if tensor is not None and tensor.dim() == 0:
        return None, _Rows(
            problem="rows has no dimension; give the values of this rank as rows, for example "
            "value.reshape(1)."
        )
    if tensor is not None and (tensor.is_quantized or tensor.layout != torch.strided):
        return None, _Rows(problem=f"rows is {tensor.layout}, {tensor.dtype}; it must be dense.")
    length = 0 if tensor is None else len(tensor)
    if positions is not None and (
        positions.dtype not in (torch.int64, torch.int32) or tuple(positions.shape) != (length,)
    ):
        return None, _Rows(
            problem=f"positions has shape {tuple(positions.shape)} and dtype {positions.dtype}; "
            f"{length} rows need int64 of shape ({length},)."
        )
    if tensor is None or tuple(tensor.shape) == (0,):
        return tensor, _Rows()
    return tensor, _Rows(
        dtype=str(tensor.dtype), shape=tuple(tensor.shape), has_positions=positions is not None
    )


def _check(everybody: list[_Rows], communicator: Communicator) -> None:
    """Raises on all ranks alike."""
    if problem := everybody[communicator.rank].problem:
        raise InvalidUsage(problem)
    for rank, description in enumerate(everybody):
        if description.problem:
            raise Error(
                f"rank {rank} can't give its rows: {description.problem}",
                **culprits(communicator, [rank], description.problem),
            )
    known = [rank for rank, description in enumerate(everybody) if description.dtype is not None]
    for rank in known[1:]:
        first, other = everybody[known[0]], everybody[rank]
        if first.kind != other.kind:
            raise Mismatch(
                f"rank {known[0]} gathers {first.kind}, rank {rank} {other.kind}.",
                ranks=(known[0], rank),
            )
        if first.has_positions != other.has_positions:
            raise Mismatch(
                f"of ranks {known[0]} and {rank} only one gives positions= for its rows; give them "
                "on all ranks or on none.",
                ranks=(known[0], rank),
            )


def _first_of_each(positions: Tensor) -> Tensor:
    """Where each position first occurs, in the order of the positions."""
    ordered, indices = positions.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return indices[is_first]


def _gather_bytes(
    communicator: Communicator,
    rows: Tensor,
    lengths: list[int],
    root: int | None,
    timeout: float | None,
) -> Tensor | None:
    """The rows of all ranks, whose numbers everybody knows, as uint8 of two dimensions.

    None on ranks other than `root`, if there is one.
    """
    row_bytes = rows.element_size() * rows.shape[1:].numel()
    sent = rows.cpu().contiguous().view(-1).view(torch.uint8)
    if root is not None and root != communicator.rank:
        communicator.gather(sent, None, root, label="ragged", timeout=timeout)
        return None
    gathered = torch.empty((sum(lengths), row_bytes), dtype=torch.uint8)
    blocks = [block.view(-1) for block in gathered.split(lengths)]
    if root is None:
        communicator.all_gather(sent, blocks, label="ragged", timeout=timeout)
    else:
        communicator.gather(sent, blocks, root, label="ragged", timeout=timeout)
    return gathered
