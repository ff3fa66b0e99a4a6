"""The collectives, on torch tensors and numpy arrays.

The file is long because the docstrings are the reference of each collective.

Vocabulary. A *block* is the part of a tensor that belongs to one rank. Where a collective has a
block for every rank, they are given as one tensor, cut into equal blocks along dimension 0 in rank
order, or as a list of one tensor for each rank.

Rules that hold for all of them:

- Every rank of the group must call the same collectives in the same order; `send` and `recv` match
  by (peer, tag) instead. Ranks that disagree all get `Mismatch`, before anybody's data is touched.
  But NCCL compares no calls: of CUDA tensors on it that takes `PYDIST_DEBUG=1`. Without that they
  hang until the deadline (`Timeout`), or deliver wrong values.
- Tensors may have any strides. numpy arrays are used in place, without a copy; they must be
  writable.
- `group` is a process group of torch.distributed on any backend, one of `new_group`, or None for
  the world. Roots and peers count within the group. What new_group returns to ranks that are not in
  the group is refused: put calls on a group under `if rank in ranks:`.
- With `async_op=True` the call returns a `Work` at once: `wait(timeout=None)` waits (and raises),
  `is_completed()` looks, `exception()` gives the error. The tensors must stay untouched until then.
  Results that need new memory must be given it (`out`).
- `timeout`, in seconds, bounds this one operation; by default the group's own time-out does.
- `op` is "sum", "mean" (floating point and complex), "min", "max" (propagate NaN), "prod", "band",
  "bor", "bxor" (integers and bool), or "premul_sum" (each input times its rank's factor, summed).
- Errors: `InvalidUsage` (the call is wrong on this rank, or the rank is not in `group`; nothing was
  sent), `Mismatch`, `PeerLost`,
  `Timeout`, `Aborted`; see `pydist.errors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pydist import _native
from pydist._native import Work
from pydist.errors import InvalidUsage
from pydist.job import current as _current
from pydist.job import groups as _groups
from pydist.job.arguments import a_type as _a_type
from pydist.job.groups import Group

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "share_allocations",
    "symmetric_empty",
]

Array = npt.NDArray[Any]
TensorLike = Tensor | Array
T = TypeVar("T", Tensor, Array)


class _Options(TypedDict, total=False):
    """What all collectives take; see the module."""

    group: Group | None
    timeout: float | None


class _Waited(_Options, total=False):
    async_op: Literal[False]


class _Started(_Options):
    async_op: Literal[True]


class _WaitedOp(_Waited, total=False):
    factor: float | None


class _StartedOp(_Started, total=False):
    factor: float | None


def _tensor(value: object, name: str) -> Tensor:
    """`value` as a tensor on the same memory."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        hint = " (a numpy scalar has no memory of its own)" if isinstance(value, np.generic) else ""
        raise InvalidUsage(
            f"{name} is {_a_type(value)}{hint}; it must be a torch tensor or numpy array."
        )
    if not value.flags.writeable:
        raise InvalidUsage(
            f"{name} is a read-only numpy array; pass a writable one, for example {name}.copy()."
        )
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:
        raise InvalidUsage(
            f"{name} is a numpy array of dtype {value.dtype} and strides {value.strides}, which "
            f"torch can't read in place: {error}"
        ) from error


def _blocks(value: object, name: str) -> Tensor | list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [_tensor(block, f"{name}[{index}]") for index, block in enumerate(value)]
    return _tensor(value, name)


def _new(like: T, shape: Sequence[int]) -> T:
    if isinstance(like, Tensor):
        made: Tensor = like.new_empty(tuple(shape))
        return made
    return np.empty(tuple(shape), like.dtype)


def _needs_out(name: str) -> InvalidUsage:
    return InvalidUsage(f"{name}(async_op=True) needs out=: its result has to land somewhere.")


def _factor(op: str, factor: float | None) -> float:
    if (op == "premul_sum") != (factor is not None):
        raise InvalidUsage(
            'op="premul_sum" needs factor=.'
            if factor is None
            else f'factor={factor} goes with op="premul_sum" only, not with op={op!r}.'
        )
    return 1.0 if factor is None else float(factor)


@overload
def all_reduce(
    tensor: T, op: str = ..., *, out: T | None = ..., **options: Unpack[_WaitedOp]
) -> T: ...
@overload
def all_reduce(
    tensor: T, op: str = ..., *, out: T | None = ..., **options: Unpack[_StartedOp]
) -> Work: ...
def all_reduce(
    tensor: T,
    op: str = "sum",
    *,
    out: T | None = None,
    group: Group | None = None,
    async_op: bool = False,
    factor: float | None = None,
    timeout: float | None = None,
) -> T | Work:
    """Combines the tensors of all ranks; every rank gets the result. Every rank calls it.

    Args:
        tensor: any shape, the same count and dtype on every rank. Changed in place without `out`.
        op: how elements are combined; the same on every rank.
        out: takes the result instead; of the shape and dtype of `tensor`.
        group, async_op, timeout: see the module.
        factor: this rank's factor, for "premul_sum".

    Returns:
        `out`, or `tensor` without one; a `Work` if asynchronous.

    Raises:
        InvalidUsage: `op` is unknown or has no meaning for the dtype; `out` does not fit.
        Mismatch: the ranks disagree on count, dtype or op.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> gradient = torch.tensor([1.0, 2.0])
        >>> pydist.all_reduce(gradient, "mean")  # with one rank, the mean of one
        tensor([1., 2.])
    """
    # Small tensors take a microsecond in all: this way is kept short.
    if (
        type(tensor) is Tensor
        and group is None
        and timeout is None
        and factor is None
        and op != "premul_sum"
        and (out is None or type(out) is Tensor)
    ):
        result = tensor if out is None else out
        work = _current.job.all_reduce(tensor, result, op, async_op)
        return result if work is None else work
    result = tensor if out is None else out
    work = _groups.communicator_of(group).all_reduce(
        _tensor(tensor, "tensor"),
        _tensor(result, "out"),
        op,
        async_op,
        _factor(op, factor),
        timeout,
    )
    return result if work is None else work


def _own_block(blocks: T | Sequence[T], rank: int, size: int) -> T:
    """New memory for this rank's block."""
    if isinstance(blocks, (list, tuple)):
        if len(blocks) != size:
            raise InvalidUsage(f"tensor holds {len(blocks)} blocks; the group has {size} ranks.")
        own: T = blocks[rank]
        return _new(own, own.shape)
    whole: T = blocks  # type: ignore[assignment]
    _tensor(whole, "tensor")
    if whole.ndim == 0 or whole.shape[0] % size != 0:
        raise InvalidUsage(
            f"tensor has shape {tuple(whole.shape)}; its dimension 0 must be a multiple of the "
            f"group's {size} ranks. For other cuts pass a list of tensors, or out=."
        )
    return _new(whole, (whole.shape[0] // size, *whole.shape[1:]))


@overload
def reduce_scatter(
    tensor: T | Sequence[T], op: str = ..., *, out: T | None = ..., **options: Unpack[_WaitedOp]
) -> T: ...
@overload
def reduce_scatter(
    tensor: T | Sequence[T], op: str = ..., *, out: T | None = ..., **options: Unpack[_StartedOp]
) -> Work: ...
def reduce_scatter(
    tensor: T | Sequence[T],
    op: str = "sum",
    *,
    out: T | None = None,
    group: Group | None = None,
    factor: float | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> T | Work:
    """Combines blocks over all ranks; each rank gets its own block. Every rank calls it.

    Args:
        tensor: the blocks for all ranks: one tensor whose dimension 0 is a multiple of the number
            of ranks, or a list of one equally sized tensor for each rank. Not changed.
        op: how elements are combined; the same on every rank.
        out: takes this rank's block; new memory without it.
        group, async_op, timeout: see the module.
        factor: this rank's factor, for "premul_sum".

    Returns:
        This rank's block; a `Work` if asynchronous.

    Raises:
        InvalidUsage: the blocks do not divide evenly, `op` has no meaning for the dtype.
        Mismatch: the ranks disagree on count, dtype or op.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> pydist.reduce_scatter(torch.ones(4 * pydist.world_size())).shape
        torch.Size([4])
    """
    communicator = _groups.communicator_of(group)
    if out is None:
        if async_op:
            raise _needs_out("reduce_scatter")
        out = _own_block(tensor, communicator.rank, communicator.size)
    work = communicator.reduce_scatter(
        _blocks(tensor, "tensor"),
        _tensor(out, "out"),
        op,
        async_op,
        _factor(op, factor),
        timeout,
    )
    return out if work is None else work


def _all_blocks(block: T, size: int) -> T:
    """New memory for a block like this one of every rank."""
    _tensor(block, "tensor")
    first, *rest = block.shape or (1,)
    return _new(block, (first * size, *rest))


@overload
def all_gather(tensor: T, *, out: T | None = ..., **options: Unpack[_Waited]) -> T: ...
@overload
def all_gather(tensor: T, *, out: Sequence[T], **options: Unpack[_Waited]) -> Sequence[T]: ...
@overload
def all_gather(
    tensor: T, *, out: T | Sequence[T] | None = ..., **options: Unpack[_Started]
) -> Work: ...
def all_gather(
    tensor: T,
    *,
    out: T | Sequence[T] | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> T | Sequence[T] | Work:
    """Gathers a block of every rank on all of them. Every rank calls it.

    Args:
        tensor: this rank's block. All of the same count, unless `out` is a list.
        out: takes all blocks in rank order: one tensor, or a list of one tensor for each rank,
            which may differ in size. Without it, new memory: the blocks one after the other along
            dimension 0.
        group, async_op, timeout: see the module.

    Returns:
        `out`; a `Work` if asynchronous.

    Raises:
        InvalidUsage: `out` does not fit.
        Mismatch: the ranks disagree on a block's count or dtype.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> pydist.all_gather(torch.tensor([pydist.rank()])).tolist() == list(
        ...     range(pydist.world_size())
        ... )
        True
    """
    communicator = _groups.communicator_of(group)
    if out is None:
        if async_op:
            raise _needs_out("all_gather")
        out = _all_blocks(tensor, communicator.size)
    work = communicator.all_gather(
        _tensor(tensor, "tensor"), _blocks(out, "out"), async_op, timeout
    )
    return out if work is None else work


@overload
def broadcast(tensor: T, root: int = ..., **options: Unpack[_Waited]) -> T: ...
@overload
def broadcast(tensor: T, root: int = ..., **options: Unpack[_Started]) -> Work: ...
def broadcast(
    tensor: T,
    root: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> T | Work:
    """Copies the root's tensor to all ranks, in place. Every rank calls it.

    Args:
        tensor: read at the root, overwritten elsewhere; the same count and dtype on every rank.
        root: the rank in the group that has the data.
        group, async_op, timeout: see the module.

    Returns:
        `tensor`; a `Work` if asynchronous.

    Raises:
        InvalidUsage: `root` is no rank of the group.
        Mismatch: the ranks disagree on count, dtype or root.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> pydist.broadcast(torch.arange(3), root=0)
        tensor([0, 1, 2])
    """
    work = _groups.communicator_of(group).broadcast(
        _tensor(tensor, "tensor"), root, async_op, timeout
    )
    return tensor if work is None else work


@overload
def reduce(
    tensor: T, root: int = ..., op: str = ..., *, out: T | None = ..., **options: Unpack[_WaitedOp]
) -> T | None: ...
@overload
def reduce(
    tensor: T, root: int = ..., op: str = ..., *, out: T | None = ..., **options: Unpack[_StartedOp]
) -> Work: ...
def reduce(
    tensor: T,
    root: int = 0,
    op: str = "sum",
    *,
    out: T | None = None,
    group: Group | None = None,
    factor: float | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> T | Work | None:
    """Combines the tensors of all ranks at the root. Every rank calls it.

    Args:
        tensor: any shape, the same count and dtype on every rank. Changed in place at the root
            without `out`; untouched elsewhere.
        root: the rank in the group that gets the result.
        op: how elements are combined; the same on every rank.
        out: takes the result at the root instead; ignored elsewhere.
        group, async_op, timeout: see the module.
        factor: this rank's factor, for "premul_sum".

    Returns:
        The result at the root, None elsewhere; a `Work` if asynchronous.

    Raises:
        InvalidUsage: `root` is no rank of the group, `op` has no meaning for the dtype.
        Mismatch: the ranks disagree on count, dtype, op or root.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> loss = pydist.reduce(torch.tensor(0.5), root=0, op="mean")
        >>> print(loss if pydist.rank() == 0 else "the root has it")
        tensor(0.5000)
    """
    communicator = _groups.communicator_of(group)
    result = (tensor if out is None else out) if communicator.rank == root else None
    work = communicator.reduce(
        _tensor(tensor, "tensor"),
        None if result is None else _tensor(result, "out"),
        root,
        op,
        async_op,
        _factor(op, factor),
        timeout,
    )
    return result if work is None else work


@overload
def gather(
    tensor: T, root: int = ..., *, out: T | None = ..., **options: Unpack[_Waited]
) -> T | None: ...
@overload
def gather(
    tensor: T, root: int = ..., *, out: Sequence[T], **options: Unpack[_Waited]
) -> Sequence[T] | None: ...
@overload
def gather(
    tensor: T, root: int = ..., *, out: T | Sequence[T] | None = ..., **options: Unpack[_Started]
) -> Work: ...
def gather(
    tensor: T,
    root: int = 0,
    *,
    out: T | Sequence[T] | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> T | Sequence[T] | Work | None:
    """Gathers a block of every rank at the root. Every rank calls it.

    Args:
        tensor: this rank's block. All of the same count, unless `out` is a list.
        root: the rank in the group that gets the blocks.
        out: takes all blocks at the root, in rank order: one tensor, or a list of one tensor for
            each rank, which may differ in size; ignored elsewhere. Without it, new memory: the
            blocks one after the other along dimension 0.
        group, async_op, timeout: see the module.

    Returns:
        `out` at the root, None elsewhere; a `Work` if asynchronous.

    Raises:
        InvalidUsage: `root` is no rank of the group, `out` does not fit.
        Mismatch: the ranks disagree on a block's count, dtype or root.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> pydist.gather(torch.tensor([1.5]), root=0)
        tensor([1.5000])
    """
    communicator = _groups.communicator_of(group)
    if communicator.rank != root:
        out = None
    elif out is None:
        if async_op:
            raise _needs_out("gather")
        out = _all_blocks(tensor, communicator.size)
    work = communicator.gather(
        _tensor(tensor, "tensor"),
        None if out is None else _blocks(out, "out"),
        root,
        async_op,
        timeout,
    )
    return out if work is None else work


@overload
def scatter(
    tensor: T | Sequence[T] | None, root: int = ..., *, out: T, **options: Unpack[_Waited]
) -> T: ...
@overload
def scatter(
    tensor: T | Sequence[T] | None, root: int = ..., *, out: T, **options: Unpack[_Started]
) -> Work: ...
def scatter(
    tensor: T | Sequence[T] | None,
    root: int = 0,
    *,
    out: T,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> T | Work:
    """Hands each rank its block of what the root has. Every rank calls it.

    Args:
        tensor: at the root, the blocks for all ranks: one tensor, or a list of one equally sized
            tensor for each rank. Ignored elsewhere, where it may be None.
        root: the rank in the group that has the blocks.
        out: takes this rank's block; the same count and dtype on every rank.
        group, async_op, timeout: see the module.

    Returns:
        `out`; a `Work` if asynchronous.

    Raises:
        InvalidUsage: `root` is no rank of the group, the blocks do not fit `out`.
        Mismatch: the ranks disagree on a block's count, dtype or root.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> all_shares = torch.arange(2 * pydist.world_size()) if pydist.rank() == 0 else None
        >>> share = pydist.scatter(all_shares, root=0, out=torch.empty(2, dtype=torch.int64))
        >>> share.tolist() == [2 * pydist.rank(), 2 * pydist.rank() + 1]
        True
    """
    communicator = _groups.communicator_of(group)
    if communicator.rank != root:
        tensor = None
    elif tensor is None:
        raise InvalidUsage(f"rank {root} is the root: its tensor holds the blocks, but is None.")
    work = communicator.scatter(
        None if tensor is None else _blocks(tensor, "tensor"),
        _tensor(out, "out"),
        root,
        async_op,
        timeout,
    )
    return out if work is None else work


@overload
def all_to_all(
    tensor: T | Sequence[T], *, out: T | None = ..., **options: Unpack[_Waited]
) -> T: ...
@overload
def all_to_all(
    tensor: T | Sequence[T], *, out: Sequence[T], **options: Unpack[_Waited]
) -> Sequence[T]: ...
@overload
def all_to_all(
    tensor: T | Sequence[T], *, out: T | Sequence[T] | None = ..., **options: Unpack[_Started]
) -> Work: ...
def all_to_all(
    tensor: T | Sequence[T],
    *,
    out: T | Sequence[T] | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> T | Sequence[T] | Work:
    """Sends a block to every rank and takes one from every rank. Every rank calls it.

    Args:
        tensor: the blocks for all ranks: one tensor whose count is a multiple of the number of
            ranks, or a list of one tensor for each rank, which may differ in size (`split` cuts a
            tensor into such a list without a copy). Not changed.
        out: takes the blocks from all ranks, in either form; new memory without it, if `tensor` is
            one tensor.
        group, async_op, timeout: see the module.

    Returns:
        `out`; a `Work` if asynchronous.

    Raises:
        InvalidUsage: the blocks do not divide evenly, `out` does not fit.
        Mismatch: a rank sends a block of another size than its receiver expects.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> pydist.all_to_all(torch.arange(2 * pydist.world_size())).shape[0] // pydist.world_size()
        2
    """
    if out is None:
        if async_op:
            raise _needs_out("all_to_all")
        if isinstance(tensor, (list, tuple)):
            raise InvalidUsage("all_to_all of a list needs out=: a tensor for each rank.")
        whole: T = tensor  # type: ignore[assignment]
        _tensor(whole, "tensor")
        out = _new(whole, whole.shape)
    work = _groups.communicator_of(group).all_to_all(
        _blocks(tensor, "tensor"), _blocks(out, "out"), async_op, timeout
    )
    return out if work is None else work


@overload
def send(tensor: TensorLike, dst: int, *, tag: int = ..., **options: Unpack[_Waited]) -> None: ...
@overload
def send(tensor: TensorLike, dst: int, *, tag: int = ..., **options: Unpack[_Started]) -> Work: ...
def send(
    tensor: TensorLike,
    dst: int,
    *,
    tag: int = 0,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Sends a tensor to one rank, which must call `recv`.

    Returns once the tensor may be changed again, which may be before it has arrived.

    Args:
        tensor: any shape.
        dst: the receiver's rank in the group.
        tag: matched against that of `recv`; 0 or more.
        group, async_op, timeout: see the module.

    Returns:
        None; a `Work` if asynchronous.

    Raises:
        InvalidUsage: `dst` is no rank of the group.
        Mismatch: the receiver expects another count or dtype.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> if pydist.rank() == 0 and pydist.world_size() > 1:
        ...     pydist.send(torch.ones(3), dst=1)
    """
    result: Work | None = _groups.communicator_of(group).send(
        _tensor(tensor, "tensor"), dst, tag, async_op, timeout
    )
    return result


@overload
def recv(
    tensor: TensorLike, src: int | None = ..., *, tag: int = ..., **options: Unpack[_Waited]
) -> int: ...
@overload
def recv(
    tensor: TensorLike, src: int | None = ..., *, tag: int = ..., **options: Unpack[_Started]
) -> Work: ...
def recv(
    tensor: TensorLike,
    src: int | None = None,
    *,
    tag: int = 0,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> int | Work:
    """Receives a tensor from one rank, which must call `send`.

    Args:
        tensor: overwritten; of the count and dtype that the sender has.
        src: the sender's rank in the group; None takes a message from any.
        tag: matched against that of `send`; 0 or more.
        group, async_op, timeout: see the module.

    Returns:
        The sender's rank; a `Work` if asynchronous, whose `source_rank` has it once completed.

    Raises:
        InvalidUsage: `src` is no rank of the group.
        Mismatch: the sender has another count or dtype.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> if pydist.rank() == 1:
        ...     sender = pydist.recv(torch.empty(3), src=0)
    """
    result: int | Work = _groups.communicator_of(group).recv(
        _tensor(tensor, "tensor"), -1 if src is None else src, tag, async_op, timeout
    )
    return result


@overload
def barrier(**options: Unpack[_Waited]) -> None: ...
@overload
def barrier(**options: Unpack[_Started]) -> Work: ...
def barrier(
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Returns on each rank once all ranks have come here. Every rank calls it.

    Args:
        group, async_op, timeout: see the module.

    Returns:
        None; a `Work` if asynchronous.

    Example:
        >>> import pydist
        >>> pydist.init()
        >>> pydist.barrier()
    """
    result: Work | None = _groups.communicator_of(group).barrier(async_op, timeout)
    return result


def symmetric_empty(
    *shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: Group | None = None,
) -> Tensor:
    """A tensor that all ranks of a host reach: collectives on it copy nothing inside the host.

    Every rank of the group calls it, with the same size, in the same order as its other
    collectives. The memory is used again once every rank has let its tensor go. On a backend
    without such memory it is an ordinary tensor.

    Args:
        shape: the shape, as for `torch.empty`: `(2, 3)` or `2, 3`.
        dtype: the type of the elements; torch's default type without one.
        device: the CPU, or a CUDA device, where each rank names its own: memory that the backend
            can move best.
        group: the group whose collectives will use it; the world without one.

    Returns:
        An uninitialised tensor.

    Raises:
        InvalidUsage: a dimension is negative, or the backend does not move tensors on `device`.
        Mismatch: the ranks ask for different sizes.
        TransportError: there is no room; the message says what was asked and what is left.

    Example:
        >>> import pydist
        >>> pydist.init()
        >>> pydist.symmetric_empty(2, 3).zero_()
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return _groups.communicator_of(group).symmetric_empty(
        [int(size) for size in sizes],  # type: ignore[arg-type]
        torch.get_default_dtype() if dtype is None else dtype,
        torch.device(device),
    )


@contextmanager
def share_allocations(max_bytes: int | None = None) -> Iterator[None]:
    """Within it, torch's CPU tensors are made where the ranks of the host can read them.

    Collectives on such tensors copy nothing through shared slots: each rank reads what it needs
    where it lies, at whatever address that is on each rank, and writes its own memory alone. Nobody
    can write into another rank's tensors. That holds for `all_reduce`, `reduce_scatter`,
    `all_gather`, `broadcast`, `gather`, `scatter` and `all_to_all` (not in place) beyond what is
    sent ahead in one shot (64 KiB; 128 KiB divided by the number of other ranks for all_reduce),
    where the buffers of all ranks that are read lie there and each is one contiguous tensor. A
    message of more than 32 KiB and up to 32 MiB that lies there is copied by `recv` from there,
    unless another way has been found quicker. Everything else goes as usual, with the same results,
    bit by bit.

    Every rank of the job enters, in the same order as its other collectives on the default group:
    either all ranks share their allocations then, or all raise. It can be nested and entered again;
    ranks leave it each by itself. Between enter and exit torch's CPU allocator is another one for
    the whole process, all threads included. Tensors outlive it, and `pydist.shutdown()`; resizing
    them later takes ordinary memory. After `pydist.reform()`, enter again.

    Blocks under 16 KiB, and whatever does not fit into `max_bytes` or into the machine's memory,
    are ordinary memory. Freed memory is used again; what has not been needed for some thousands of
    allocations, and at the exit all that is free, goes back to the system.

    On a backend other than native, in a world of one, and on a host with one rank, it changes
    nothing. Between hosts, tensors go as usual.

    A forked process (a data-loader worker) copies all tensors of its parent that lie there, before
    `fork()` returns in either of them, which takes as much memory again, and the time to copy it.
    From then on neither sees what the other writes, and what the child allocates is ordinary
    memory. A child for whose copy there is no room ends, and says so. Start workers before the
    model is made, or by "spawn", where that is too much.

    Args:
        max_bytes: the most bytes of tensors that this process keeps there; rounded up to 2 MiB. By
            default half of the host's free memory (or the cgroup's), in equal parts for its ranks.
            The first entry in a job decides.

    Raises:
        InvalidUsage: `max_bytes` is not positive, differs from that of an earlier entry, or another
            library has given torch an allocator that cannot be replaced, on any rank.
        TransportError: a rank has no descriptors or address space left for it; the message names
            the rank.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> with pydist.share_allocations():
        ...     tensor = torch.ones(1 << 20)
        >>> pydist.all_reduce(tensor)[:3]
        tensor([1., 1., 1.])
    """
    if max_bytes is not None and (
        not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes <= 0
    ):
        raise InvalidUsage(
            f"share_allocations: max_bytes must be a positive number of bytes, got {max_bytes!r}."
        )
    is_shared = _native.enter_shared_allocations(_groups.communicator_of(None), max_bytes)
    try:
        yield
    finally:
        if is_shared:
            _native.leave_shared_allocations()
