"""Backwards that can't be differentiated again.

torch's `once_differentiable` notices that only where the gradient that comes in has a graph. A
gradient penalty would lose what depends on the values alone, without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.nn.agreement import anchor


def differentiable_once(gradient: Tensor, call: str, *inputs: Tensor) -> Tensor:
    """A gradient whose own backward raises, for backward to return.

    Args:
        gradient: Computed without a graph.
        call: The public function's name.
        *inputs: Of that call. `torch.autograd.grad` looks at what leads to the tensors it is asked
            about alone, so the way to each of these leads through what raises.
    """
    if not torch.is_grad_enabled():
        return gradient
    refusing: Tensor = _Refuse.apply(  # type: ignore[no-untyped-call]
        gradient.detach(), call, anchor(True), *inputs
    )
    return refusing


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, call: str, *_: Tensor) -> Tensor:
        ctx.call = call
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        raise InvalidUsage(
            f"pydist.nn.{ctx.call} can't be differentiated twice, and a gradient of it, made with "
            "create_graph=True, is in a backward."
        )
