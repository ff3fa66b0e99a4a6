"""Notices buffers that change between steps, on some ranks only or to other values on each.

torch's DistributedDataParallel copies rank 0's buffers at the beginning of a forward. pydist does
so at the end of a backward, so that a forward talks to nobody. In between, a program may change a
buffer on rank 0 alone: in torch the next forward of every rank computes with that, and here the
forwards of the other ranks compute with what they had. So each rank remembers the versions of its
buffers, and tells the others, in the next round, a digest of what was changed before a forward.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pydist import _native
from pydist._torch import is_of_functorch, version_of


class BufferChanges:
    """Compares the versions of one rank's buffers with what they were after the last exchange.

    What is written past torch's version counters is not seen: `buffer.data`, NumPy, and the running
    statistics that the kernels of BatchNorm update themselves.

    Attributes:
        reducer: It has the next round; None before there is any.
    """

    def __init__(self) -> None:
        self.reducer: weakref.ref[_native.Reducer] | None = None
        self._noted: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []
        self._follows_averaging = True
        self._has_warned = False

    def note(self, buffers: Sequence[Tensor]) -> None:
        """Remembers what there is: all ranks have it."""
        if self._has_warned:
            return
        if len(self._noted) == len(buffers):
            for number, (known, buffer) in enumerate(zip(self._noted, buffers, strict=True)):
                if known() is not buffer:
                    self._noted[number] = weakref.ref(buffer)
        else:
            self._noted = [weakref.ref(buffer) for buffer in buffers]
        self._versions = [version_of(buffer) for buffer in buffers]

    def before_forward(self, buffers: Sequence[Tensor], *, averages: bool) -> None:
        """Tells the next round what was changed. Costs nothing where nothing was.

        Args:
            buffers: Those that are exchanged, in the order of `note`.
            averages: Whether the backward of this forward averages. torch copies buffers in the
                first forward after one that does, and in no later one.
        """
        follows_averaging, self._follows_averaging = self._follows_averaging, averages
        if not follows_averaging or self._has_warned or len(buffers) != len(self._noted):
            return
        changed = [
            number
            for number, (buffer, known, version) in enumerate(
                zip(buffers, self._noted, self._versions, strict=True)
            )
            if known() is not buffer or version_of(buffer) != version
        ]
        reducer = None if self.reducer is None else self.reducer()
        if not changed or reducer is None or not all(_has_values(buffers[n]) for n in changed):
            return
        digest = hashlib.sha256()
        for number in changed:
            digest.update(number.to_bytes(4, "big"))
            digest.update(_bytes_of(buffers[number]))
        reducer.note_changed_buffers(changed[0] + 1, int.from_bytes(digest.digest()[:7], "big"))
        self.note(buffers)

    def warn_where_ranks_differ(self, names: Sequence[str]) -> None:
        """Warns once, on all ranks, of what the present round has found. Called in its closing."""
        reducer = None if self.reducer is None else self.reducer()
        if self._has_warned or reducer is None or not reducer.first_differing_buffer:
            return
        self._has_warned = True
        self._noted = []
        warnings.warn(
            f"buffer {names[reducer.first_differing_buffer - 1]} of the model was changed after "
            "an averaged backward and before a forward, perhaps by another forward, and so may "
            "others after it have been. That one or another of these was changed on some ranks "
            "only or to other values on each, so that forwards of the ranks had different values. "
            "torch's DistributedDataParallel copies rank 0's buffers at the beginning of the first "
            "forward (also under no_grad) after one that averages; pydist.DataParallel copies them "
            "at the end of a backward. Change buffers on all ranks alike "
            "(pydist.broadcast(buffer, root=0) gives them rank 0's); if forward does not compute "
            "with them, ignore this",
            UserWarning,
            stacklevel=2,
        )


def _has_values(buffer: Any) -> bool:
    """Whether the host may look at a buffer now."""
    if not isinstance(buffer, Tensor) or is_of_functorch(buffer):
        return False  # what is no buffer any more, the exchange will refuse
    return not (buffer.is_cuda and _native.is_capturing(buffer.device))


def _bytes_of(buffer: Tensor) -> bytes:
    plain = buffer.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes()
