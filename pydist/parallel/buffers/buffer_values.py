"""Notices what was written into buffers past torch's version counters: by `.data`, or by NumPy.

Note [What is compared]
The message of the last exchange has each buffer as all ranks have it, so a buffer on the CPU is
compared with its place there, before each forward that follows a step. That reads every buffer
twice, so of large ones it looks at a sample: at most `_MOST_COMPARED` numbers of all together,
evenly spaced. On a device the host would wait for the answer: nothing is compared there. Nor are
the running statistics of BatchNorm, whose kernels write them in this way in each forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pydist._torch import is_of_functorch

# Of all buffers together.
_MOST_COMPARED = 32_768
# What elements are compared as, by their size.
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class BufferValues:
    """What the buffers of one rank were when they were last looked at.

    Args:
        exchanged: Their values when they were last exchanged, in memory that is kept.
        is_compared: Which of them are looked at.
    """

    def __init__(self, exchanged: Sequence[Tensor], is_compared: Sequence[bool]) -> None:
        pairs = list(zip(exchanged, is_compared, strict=True))
        size = sum(place.numel() for place, is_one in pairs if is_one)
        self._stride = -(-size // _MOST_COMPARED) or 1
        self._exchanged = [self._sample(place) if is_one else None for place, is_one in pairs]
        # Of those that were noted with other values than exchanged.
        self._own: dict[int, Tensor] = {}
        self._knows = False

    def note_exchanged(self) -> None:
        """They have the values that were exchanged."""
        self._own.clear()
        self._knows = True

    def forget(self) -> None:
        """Lets every buffer pass until they are noted again."""
        self._knows = False

    def note(self, buffers: Sequence[Tensor]) -> None:
        """Remembers what they are now."""
        if not self._knows:
            return
        for number, (buffer, place) in enumerate(zip(buffers, self._exchanged, strict=True)):
            if place is None or (sample := self._sample(buffer)) is None:
                continue
            if _are_same(sample, place):
                self._own.pop(number, None)
            else:
                self._own[number] = sample.clone()

    def has_changed(self, number: int, buffer: Tensor) -> bool:
        """Whether a buffer is another than noted; False where that is not looked at."""
        place = self._exchanged[number]
        if not self._knows or place is None or (sample := self._sample(buffer)) is None:
            return False
        return not _are_same(sample, self._own.get(number, place))

    def _sample(self, buffer: Tensor) -> Tensor | None:
        """Some of a buffer's memory, as integers; None where the host can't look."""
        if type(buffer) is not Tensor or is_of_functorch(buffer):
            return None
        if buffer.device.type != "cpu" or buffer.layout != torch.strided:
            return None
        if not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
            if buffer.numel() > _MOST_COMPARED:
                return None
            buffer = buffer.resolve_conj().resolve_neg().contiguous()
        integers = _INTEGERS[min(buffer.element_size(), 8)]
        return buffer.detach().view(-1).view(integers)[:: self._stride]


def _are_same(left: Tensor, right: Tensor) -> bool:
    try:
        return left.dtype == right.dtype and torch.equal(left, right)
    except RuntimeError:  # values are not to be had here, as under FakeTensorMode
        return True
