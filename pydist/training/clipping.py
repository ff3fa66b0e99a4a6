"""Clips gradients by their norm, in float32 where they have 16 bits.

torch's function takes the norm and the factor in the gradients' own type. In bfloat16, which has
eight bits, that factor is up to 0.7 % off, and so is the norm that is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pydist._torch import EACH, on_each


def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> None:
    """Scales the gradients of some parameters so that their norm is `max_norm` at most.

    As `torch.nn.utils.clip_grad_norm_` does, bit by bit, unless there are 16-bit gradients. All
    ranks call it where the gradients are those of a `pydist.ShardedOptimizer`.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not any(each.dtype in (torch.bfloat16, torch.float16) for each in gradients):
        nn.utils.clip_grad_norm_(parameters, max_norm)
        return
    first = gradients[0].device
    norms = [torch.linalg.vector_norm(each, 2, dtype=_wide(each)).to(first) for each in gradients]
    total = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), 2)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for device in dict.fromkeys(each.device for each in gradients):
        here = [each for each in gradients if each.device == device]
        on_each(f"{EACH}mul_", here, factor.to(device))


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)
