"""Clips gradients by their norm, in float32 where they have 16 bits.

torch's function takes the norm and the factor in the gradients' own type. In bfloat16, which has
eight bits, that factor is up to 0.7 % off, and so is the norm that is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pydist.sharding.sharded_gradient import scale_each

_NARROW = (torch.bfloat16, torch.float16)


def clip_gradients(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales the gradients of some parameters so that their norm is `max_norm` at most.

    As `torch.nn.utils.clip_grad_norm_` does, bit by bit, unless there are 16-bit gradients. All
    ranks call it where the gradients are those of a `pydist.ShardedOptimizer`.

    Returns:
        The norm before scaling; in float32 where there are 16-bit gradients.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not any(each.dtype in _NARROW for each in gradients):
        return nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    first = gradients[0].device
    norms = [wide_norm(each, norm_type).to(first) for each in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.float() for n in norms]), norm_type)
    if error_if_nonfinite:
        require_finite(total, norm_type)
    scale_each(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def wide_norm(gradient: Tensor, order: float) -> Tensor:
    """The norm of a gradient, in float32 at least."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, order, dtype=wide)
    return norm


def require_finite(total: Tensor, order: float) -> None:
    """Raises RuntimeError, as torch does, where gradients can't be clipped by their norm."""
    if not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {order} of the gradients is {total.item()}, so they can't be "
            "clipped by it; pass error_if_nonfinite=False to clip them all the same"
        )
