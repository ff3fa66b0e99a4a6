"""Notices that buffers on a device are no longer what was exchanged, mostly without waiting for it.

Note [Looked at late]
Torch counts what is written in place, and another tensor or address shows as well. What is written
past that, by `.data` or a kernel of the program's own, only values tell, and the host would wait
for those. Most programs write in the same way in each step. So the first rounds look at the values
at once. Where they differ though nothing was counted, buffers travel after every round from then
on. Later rounds look at one buffer each, in turns, and read the answer one round later, when it is
long there. A change that is found so is exchanged too late, which a warning tells.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from pydist.gpu.late_number import LateNumber, send_number
from pydist.parallel.buffers.buffer_changes import mark_of

_ROUNDS_AT_ONCE = 3


class DeviceValues:
    """Compares one rank's buffers with what they were when they were last exchanged."""

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[Tensor], tuple[int, int]]] = []
        self._looks = 0
        self._are_written_uncounted = False
        # Which buffer was looked at in the last round, and whether it differed.
        self._under_way: tuple[int, LateNumber] | None = None

    def note(self, buffers: Sequence[Tensor]) -> None:
        """Remembers what there is: all ranks have it."""
        self._noted = [(weakref.ref(buffer), mark_of(buffer)) for buffer in buffers]

    def forget(self) -> None:
        """Lets the next look find a change."""
        self._noted = []

    def have_changed(
        self, names: Sequence[str], exchanged: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> bool:
        """Whether buffers have to be exchanged.

        Args:
            names: Of the buffers.
            exchanged: Their values when they were last exchanged, on the device.
            buffers: What they are now, in the same order.
        """
        late, self._under_way = self._under_way, None
        if late is not None and late[1].read():
            self._are_written_uncounted = True
            warnings.warn(
                f"buffer {names[late[0]]} has changed past torch's version counters (by `.data`, "
                "or by a kernel that does not count), which its first steps did not: forwards "
                "since then have computed with other values on each rank. From now on buffers are "
                "exchanged after every averaged backward",
                UserWarning,
                stacklevel=2,
            )
        if self._are_written_uncounted or not self._are_as_noted(buffers):
            return True
        if self._looks < _ROUNDS_AT_ONCE:
            pairs = zip(exchanged, buffers, strict=True)
            differ = torch.stack([_differ(place, buffer) for place, buffer in pairs]).any()
            self._are_written_uncounted = bool(differ)
        else:
            number = self._looks % len(buffers)
            differ = _differ(exchanged[number], buffers[number])
            self._under_way = number, send_number(differ)
        self._looks += 1
        return self._are_written_uncounted

    def _are_as_noted(self, buffers: Sequence[Tensor]) -> bool:
        return len(buffers) == len(self._noted) and all(
            known() is buffer and mark_of(buffer) == mark
            for (known, mark), buffer in zip(self._noted, buffers, strict=True)
        )


def _differ(place: Tensor, buffer: Tensor) -> Tensor:
    """Whether a buffer has other values than its place; what is not a number equals itself."""
    buffer = buffer.to(place.device)
    are_no_numbers = (place != place) & (buffer != buffer)
    return ((place != buffer) & ~are_no_numbers).any()
