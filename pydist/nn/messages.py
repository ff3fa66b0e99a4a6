"""Differentiable messages between two ranks: the gradient travels the other way.

A message of `pydist.nn` has a head, which says of what shape and dtype the tensor is, and whether a
gradient will be sent back. So the receiver need know nothing beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist._torch import runs_uncompiled_throughout
from pydist.errors import InvalidUsage
from pydist.job import groups
from pydist.job.groups import Group
from pydist.nn.agreement import anchor, dtype_named, problem_of, problem_of_root
from pydist.nn.differentiable_once import differentiable_once

if TYPE_CHECKING:
    from pydist._native import Communicator

__all__ = ["recv", "send"]

# A head: the dtype's name, whether a gradient comes back, the number of dimensions, the dimensions.
_DTYPE_BYTES = 24
_MOST_DIMENSIONS = 32


@runs_uncompiled_throughout
def send(tensor: Tensor, dst: int, *, tag: int = 0, group: Group | None = None) -> Tensor:
    """Sends a tensor to one rank, which calls `pydist.nn.recv`; its gradient comes back from there.

    If `tensor` requires a gradient, both ranks run their backward: this one waits there for the
    gradient. What is returned makes it part of a loss::

        sent = pydist.nn.send(activations, dst=1)
        sent.sum().backward()  # or: loss = loss + sent.sum()

    The call may wait until the receiver has taken the message. Ranks that all send first, in a
    ring say, would wait in a circle: there take `all_to_all`, with blocks without elements for the
    others. Messages can't be differentiated twice.

    Args:
        tensor: any shape, of up to 32 dimensions; any strides.
        dst: the receiver's rank in the group.
        tag: matched against that of `recv`; 0 or more. The gradient has the same.
        group: as in `pydist.send`; default: all ranks.

    Returns:
        A tensor without elements, (0,), whose backward waits for the gradient.

    Raises:
        InvalidUsage: `dst` is no rank of the group.
        Timeout: the receiver did not take the message, or in backward sent no gradient, as it did
            not run its own.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> x = torch.ones(3, requires_grad=True)
        >>> if pydist.rank() == 0 and pydist.world_size() > 1:
        ...     pydist.nn.send(x, dst=1).sum().backward()
    """
    communicator = groups.communicator_of(group)
    if problem := problem_of(tensor) or problem_of_root(dst, communicator.size, "dst"):
        raise InvalidUsage(f"pydist.nn.send: {problem}")
    if tensor.dim() > _MOST_DIMENSIONS:
        raise InvalidUsage(
            f"pydist.nn.send: tensor has {tensor.dim()} dimensions; {_MOST_DIMENSIONS} are the "
            "most that a message has."
        )
    sent: Tensor = _Send.apply(tensor, communicator, dst, tag)  # type: ignore[no-untyped-call]
    return sent


@runs_uncompiled_throughout
def recv(
    src: int, *, tag: int = 0, group: Group | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Receives a tensor from one rank, which calls `pydist.nn.send`; its gradient goes back there.

    If the sender's tensor requires a gradient, so does the result, and both ranks run their
    backward: the other one waits for the gradient. Messages can't be differentiated twice.

    Args:
        src: the sender's rank in the group.
        tag: matched against that of `send`; 0 or more.
        group: as in `pydist.recv`; default: all ranks.
        device: where the result is to lie.

    Returns:
        A tensor of the shape and dtype that the sender has.

    Raises:
        InvalidUsage: `src` is no rank of the group; or the sender waits for a gradient, and this
            rank has called under `torch.no_grad()`.
        Timeout: the sender did not send.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> if pydist.rank() == 1:
        ...     pydist.nn.recv(src=0).square().sum().backward()
    """
    communicator = groups.communicator_of(group)
    if problem := problem_of_root(src, communicator.size, "src"):
        raise InvalidUsage(f"pydist.nn.recv: {problem}")
    head = torch.empty(_DTYPE_BYTES + 2 + _MOST_DIMENSIONS, dtype=torch.int64, device="cpu")
    communicator.recv(head, src, tag, label="pydist.nn.recv")
    dtype, wants_gradient, shape = _read(head)
    received: Tensor = _Receive.apply(  # type: ignore[no-untyped-call]
        anchor(wants_gradient and torch.is_grad_enabled()),
        communicator,
        src,
        tag,
        torch.empty(shape, dtype=dtype, device=device),
    )
    if wants_gradient and not torch.is_grad_enabled():
        raise InvalidUsage(
            f"pydist.nn.recv: rank {src} waits in its backward for the gradient of what it sent, "
            "and this rank received it under torch.no_grad(): send it under torch.no_grad(), too, "
            "or receive it outside."
        )
    return received


def _head(tensor: Tensor, wants_gradient: bool) -> Tensor:
    name = str(tensor.dtype).removeprefix("torch.").encode().ljust(_DTYPE_BYTES)
    shape = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())]
    return torch.tensor([*name, int(wants_gradient), tensor.dim(), *shape], device="cpu")


def _read(head: Tensor) -> tuple[torch.dtype, bool, list[int]]:
    numbers: list[int] = head.tolist()
    name = bytes(numbers[:_DTYPE_BYTES]).decode().strip()
    wants_gradient, dimensions, *shape = numbers[_DTYPE_BYTES:]
    return dtype_named(name), bool(wants_gradient), shape[:dimensions]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator, dst: int, tag: int) -> Tensor:
        ctx.communicator, ctx.dst, ctx.tag = communicator, dst, tag
        ctx.save_for_backward(tensor)
        head = _head(tensor, ctx.needs_input_grad[0])
        communicator.send(head, dst, tag, label="pydist.nn.send")
        communicator.send(tensor.contiguous(), dst, tag, label="pydist.nn.send")
        return tensor.new_empty(0)

    @staticmethod
    @runs_uncompiled_throughout
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (tensor,) = ctx.saved_tensors
        gradient = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        label = "backward of pydist.nn.send"
        ctx.communicator.recv(gradient, ctx.dst, ctx.tag, label=label)
        return differentiable_once(gradient, "send", tensor), None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _: Tensor | None,
        communicator: Communicator,
        src: int,
        tag: int,
        out: Tensor,
    ) -> Tensor:
        ctx.communicator, ctx.src, ctx.tag = communicator, src, tag
        communicator.recv(out, src, tag, label="pydist.nn.recv")
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @runs_uncompiled_throughout
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        label = "backward of pydist.nn.recv"
        ctx.communicator.send(gradient.detach().contiguous(), ctx.src, ctx.tag, label=label)
        return None, None, None, None, None
