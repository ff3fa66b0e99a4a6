"""The weights that `DataParallel.weighted()` is given: looked at, and told to a reducer.

A weight that a GPU computes stays there where the communicator can use it there, so that the host
does not wait for it. Then the host learns too late whether it is one: the GPU makes NaN of what is
negative or not finite, which every rank's gradients of that step become, and the first forward or
`weighted()` to hear of it raises.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.gpu.late_number import LateNumber, send_number

if TYPE_CHECKING:
    from pydist import _native

# How many weights may be on their way to the host before it waits for the first of them.
_MOST_UNDER_WAY = 64


class BackwardWeights:
    """Looks at the weights of one wrapper's backwards."""

    def __init__(self) -> None:
        self._under_way: deque[LateNumber] = deque()  # of weights that stayed on a GPU

    def taken(self, weight: float | Tensor, reducer: _native.Reducer) -> float | Tensor:
        """A weight as a reducer takes it.

        Raises:
            InvalidUsage: It is negative or not finite, or an earlier one was, which had stayed on a
                GPU.
        """
        self.look_back(reducer)
        if (
            isinstance(weight, Tensor)
            and weight.is_cuda
            and weight.numel() == 1
            and not weight.is_complex()
            and (device := reducer.device_of_weights) is not None
        ):
            given = weight.detach().reshape(()).to(torch.float64)
            is_weight = (given >= 0) & given.isfinite()
            number = torch.where(is_weight, given, torch.nan).to(device, non_blocking=True)
            if not reducer.is_capturing:  # a replay would send nothing, and the step is refused
                self._under_way.append(send_number(number))
            return number
        try:
            value = float(weight)
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if not (value >= 0 and math.isfinite(value)):
            raise InvalidUsage(
                f"the weight of a backward is {weight!r}; it must be a number, finite and not "
                "negative"
            )
        return value

    def look_back(self, reducer: _native.Reducer) -> None:
        """Raises InvalidUsage where a weight that stayed on a GPU is known by now to be none."""
        late = self._under_way
        if late and reducer.is_capturing:
            return  # which forbids to ask
        while late and (late[0].has_come() or len(late) > _MOST_UNDER_WAY):
            self._read_first()

    def forget(self) -> None:
        """Tells of none of them any more."""
        self._under_way.clear()

    def settle(self, reducer: _native.Reducer) -> None:
        """Waits for all of them, and raises InvalidUsage where one is none."""
        while self._under_way and not reducer.is_capturing:
            self._read_first()

    def _read_first(self) -> None:
        if math.isnan(self._under_way.popleft().read()):
            self._under_way.clear()
            raise InvalidUsage(
                "the weight of an earlier backward was negative or not finite on this rank; it "
                "was computed on a GPU, so that this is known only now: the gradients of that "
                "step are NaN on every rank, so take up training again from before it"
            )
