"""Numbers that a step is monitored with; those on a GPU are read one step late.

A loss on a GPU is not computed yet when the program hands it over. Reading it then would stop the
training thread until it is. So it is copied to pinned memory, behind the work that computes it, and
read at the next step, when that copy is long done.
"""

from __future__ import annotations

import numbers
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type


@dataclass(frozen=True)
class Late:
    """A number on its way from a device."""

    copy: Tensor
    # None where reading `copy` itself waits for the device.
    copied: torch.Event | None

    def read(self) -> float:
        """The number; waits for the copy alone, not for what the device does after it."""
        if self.copied is not None:
            self.copied.synchronize()
        return float(self.copy.item())


Number: TypeAlias = float | Late


def taken(name: str, value: Any) -> Number:
    """What `step(name=value)` has handed over; never waits for a device.

    Raises:
        InvalidUsage: it is not one real number.
    """
    if type(value) is float:  # most are
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            raise InvalidUsage(
                f"step({name}=) is a tensor of shape {tuple(value.shape)}, {value.dtype}, on "
                f"{value.device}; it must hold one real number, such as {name}.mean()."
            )
        number = value.detach()
        if number.device.type == "cpu":
            return float(number.item())
        return _under_way(number)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            raise InvalidUsage(
                f"step({name}=) is a number that is too large: it must fit a float, up to 1.8e308."
            ) from None
    raise InvalidUsage(
        f"step({name}=) is {a_type(value)}; it must be a number, or a tensor that holds one."
    )


def _under_way(number: Tensor) -> Late:
    if number.device.type != "cuda":
        return Late(number.clone(), None)
    has_cuda = torch.cuda.is_available()
    with torch.cuda.device(number.device) if has_cuda else nullcontext():
        copy = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
        copy.copy_(number.reshape(()), non_blocking=True)
        copied = torch.Event(number.device)
        copied.record()
    return Late(copy, copied)
