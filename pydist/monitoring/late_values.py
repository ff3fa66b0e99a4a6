"""Numbers that a step is monitored with; those on a GPU are read one step late."""

from __future__ import annotations

import numbers
from typing import Any, TypeAlias

from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.gpu.late_number import LateNumber, send_number
from pydist.job.arguments import a_type

Number: TypeAlias = float | LateNumber


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
        return send_number(number)
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
