"""Steps an optimizer that is not the user's: it is a part of one, or tried out."""

from __future__ import annotations

from torch.optim import Optimizer


def unhooked_step(optimizer: Optimizer) -> None:
    """Steps without the hooks and profiles of an optimizer of its own."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
