"""A number on its way from a GPU to the host.

Reading it at once would stop the thread until it is computed. So it is copied to pinned memory,
behind the work that computes it, and read some time later, when that copy is long done.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LateNumber:
    """A number on its way from a device."""

    copy: Tensor
    # None where reading `copy` itself waits for the device.
    copied: torch.Event | None

    def has_come(self) -> bool:
        """Whether reading it waits for nothing."""
        return self.copied is not None and bool(self.copied.query())

    def read(self) -> float:
        """The number; waits for the copy alone, not for what the device does after it."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()
        return float(self.copy.item())


def send_number(number: Tensor) -> LateNumber:
    """Begins the copy of a number, and waits for nothing.

    Args:
        number: a tensor of one element, on a device.
    """
    if number.device.type != "cuda":
        return LateNumber(number.clone(), None)
    has_cuda = torch.cuda.is_available()
    with torch.cuda.device(number.device) if has_cuda else nullcontext():
        copy = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
        copy.copy_(number.reshape(()), non_blocking=True)
        copied = torch.Event(number.device)
        copied.record()
    return LateNumber(copy, copied)
