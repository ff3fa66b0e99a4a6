"""Notices buffers that change between steps, on some ranks only or to other values on each.

torch's DistributedDataParallel copies rank 0's buffers at the beginning of a forward. pydist does
so at the end of a backward, so that a forward talks to nobody. In between, a program may change a
buffer on rank 0 alone: in torch the next forward of every rank computes with that, and here the
forwards of the other ranks compute with what they had. So each rank remembers the versions of its
buffers, and tells the others, in the next round, a digest of what was changed before a forward.

Note [Forwards without gradients]
Such a forward may change buffers itself, as batch norm does in training mode, to other values on
each rank. That is no difference: torch copies nothing after one, either. So it is looked at what
the program changed before it, and what it leaves is remembered as unchanged. One rank may run some
alone, and then has to tell the same as the others: so it tells nothing before the next forward with
gradients, and then each buffer as it was before the first forward that followed the change. And it
may run them with other buffers, and put back those that all ranks have: then it tells nothing.
In torch the first of them takes rank 0's buffers where it follows a step that averaged, and the
next forward with gradients then copies nothing. Since one rank alone can't go by its evaluations,
what the program changes between the two is told here, though torch's ranks would differ as well.

Note [Which buffer differs]
All that travels is one digest of all changed buffers, because it travels in every round. So ranks
know that they differ, and not in which buffer. To find that out, they would have to send a digest
of each, or to meet once more in a round that some may be about to leave. Instead, each rank names
what it has changed with the digest of each: a buffer differs where two ranks' warnings do.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist import _native
from pydist._torch import is_of_functorch, runs_uncompiled_throughout, version_of
from pydist.job import membership
from pydist.parallel.buffers.buffer_values import BufferValues

# Of the buffers that a warning names, with their digests.
_MOST_NAMES = 16


class BufferChanges:
    """Compares one rank's buffers with what they were after the last exchange.

    By the versions that torch counts and, where something is written past those, by values. Of
    running statistics, see `running_statistics`.

    Attributes:
        reducer: It has the next round; None before there is any.
        values: Of the buffers; set before they are noted.
    """

    values: BufferValues

    def __init__(self) -> None:
        self.reducer: weakref.ref[_native.Reducer] | None = None
        self._noted: list[weakref.ref[Tensor]] = []
        self._marks: list[tuple[int, int]] = []
        # Digests of changed buffers, by number: those to be told, and those told since the last
        # round.
        self._untold: dict[int, bytes] = {}
        self._told: dict[int, bytes] = {}
        self._follows_averaging = True
        self._has_warned = False
        self._has_warned_of_grad = False

    def note(self, buffers: Sequence[Tensor]) -> None:
        """Remembers what there is: all ranks have it."""
        if not self._has_warned:
            self._untold.clear()
            self._told.clear()
            self.values.note_exchanged()
            self.values.note(buffers)  # a -0.0 was not exchanged where all ranks have 0.0
            self._note_marks(buffers)

    def before_forward(
        self, buffers: Sequence[Tensor], exchanged: Sequence[Tensor], *, averages: bool
    ) -> None:
        """Tells the next round what was changed. Costs nothing where nothing was.

        Args:
            buffers: Those that are exchanged, in the order of `note`.
            exchanged: Their values when they were last exchanged, on all ranks.
            averages: Whether the backward of this forward averages. torch copies buffers in the
                first forward after one that does, and in no later one.
        """
        follows_averaging, self._follows_averaging = self._follows_averaging, averages
        if not follows_averaging or not self._look(buffers, exchanged) or not self._untold:
            return
        reducer = None if self.reducer is None else self.reducer()
        if reducer is None:
            return
        for number, digest in self._untold.items():
            # Whatever was told before counts as well.
            self._told[number] = _digest(self._told.get(number, b""), digest)
        told = (n.to_bytes(4, "big") + self._told[n] for n in sorted(self._untold))
        first = min(self._untold)
        reducer.note_changed_buffers(first + 1, int.from_bytes(_digest(*told)[:7], "big"))
        self._untold.clear()

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def during_forward_without_gradients(
        self, buffers: Callable[[], Sequence[Tensor]], exchanged: Sequence[Tensor]
    ) -> Iterator[None]:
        """Tells changes that are made inside from those before it: see the note on top."""
        has_looked = self._look(buffers(), exchanged)
        try:
            yield
        finally:
            left = buffers()
            if has_looked and all(isinstance(buffer, Tensor) for buffer in left):
                self.values.note(left)
                self._note_marks(left)

    def _look(self, buffers: Sequence[Tensor], exchanged: Sequence[Tensor]) -> bool:
        """Takes down what has changed since it was last looked; returns whether it could be."""
        if self._has_warned or len(buffers) != len(self._noted):
            return False
        changed = [
            number
            for number, (buffer, known, mark) in enumerate(
                zip(buffers, self._noted, self._marks, strict=True)
            )
            if known() is not buffer
            or mark_of(buffer) != mark
            or self.values.has_changed(number, buffer)
        ]
        if not changed:
            return True
        if not all(_has_values(buffers[n]) for n in changed):
            return False
        for number in changed:
            value = _bytes_of(buffers[number])
            if number not in self._told and value == _bytes_of(exchanged[number]):
                self._untold.pop(number, None)  # no forward that trains has seen it otherwise
            else:
                self._untold[number] = _digest(value)
        self.values.note(buffers)
        self._note_marks(buffers)
        return True

    def _note_marks(self, buffers: Sequence[Tensor]) -> None:
        if len(self._noted) == len(buffers):
            for number, (known, buffer) in enumerate(zip(self._noted, buffers, strict=True)):
                if known() is not buffer:
                    self._noted[number] = weakref.ref(buffer)
        else:
            self._noted = [weakref.ref(buffer) for buffer in buffers]
        self._marks = [mark_of(buffer) for buffer in buffers]

    def warn_where_none_is_exchanged(self, names: Sequence[str]) -> None:
        """Warns once of what was changed since a backward that averages nothing. After
        `before_forward`.

        Args:
            names: Of the buffers, in the order of `note`.
        """
        if not self._told or self._has_warned_of_grad:
            return
        reducer = None if self.reducer is None else self.reducer()
        if reducer is None or not reducer.has_left_out_average:
            return
        self._has_warned_of_grad = True
        named = ", ".join(names[number] for number in sorted(self._told)[:_MOST_NAMES])
        warnings.warn(
            f"buffers of the model ({named}) have changed, and no backward since has averaged: "
            "torch.autograd.grad accumulates nothing. torch's DistributedDataParallel copies rank "
            "0's buffers at the beginning of a forward, and pydist.DataParallel at the end of an "
            "averaged backward: call pydist.broadcast(buffer, root=0) on all ranks, or "
            "model.sync_gradients(); if forward does not compute with them, ignore this",
            UserWarning,
            stacklevel=2,
        )

    def warn_where_ranks_differ(self, names: Sequence[str]) -> None:
        """Warns once, on all ranks, of what the present round has found. Called in its closing."""
        reducer = None if self.reducer is None else self.reducer()
        if self._has_warned or reducer is None or not reducer.first_differing_buffer:
            return
        self._has_warned = True
        self._noted = []
        numbers = sorted(self._told)
        named = [f"{names[n]} ({self._told[n].hex()[:8]})" for n in numbers[:_MOST_NAMES]]
        more = f" and {len(numbers) - len(named)} more" if len(numbers) > len(named) else ""
        warnings.warn(
            "buffers of the model were changed after an averaged backward and before a forward "
            "that trains, by the program or by another such forward, on some ranks only or to "
            "other values on each, so that forwards of the ranks had different values. Rank "
            f"{membership.rank()} had changed {', '.join(named) or 'none'}{more}; a buffer differs "
            "where another rank's warning does not have it with the same digest in parentheses. "
            "torch's DistributedDataParallel copies rank 0's buffers at the beginning of the first "
            "forward (also under no_grad) after one that averages; pydist.DataParallel copies them "
            "at the end of a backward. Change buffers on all ranks alike "
            "(pydist.broadcast(buffer, root=0) gives them rank 0's); if forward does not compute "
            "with them, ignore this",
            UserWarning,
            stacklevel=2,
        )


def mark_of(buffer: Tensor) -> tuple[int, int]:
    """Another one where a buffer was written in place, or given memory (`buffer.data = ...`)."""
    try:
        return version_of(buffer), buffer.data_ptr()
    except (AttributeError, RuntimeError):  # it has none: what is no tensor, or stands for one
        return version_of(buffer), 0


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def _has_values(buffer: Any) -> bool:
    """Whether the host may look at a buffer now."""
    if not isinstance(buffer, Tensor) or is_of_functorch(buffer):
        return False  # what is no buffer any more, the exchange will refuse
    return not (buffer.is_cuda and _native.is_capturing(buffer.device))


def _bytes_of(buffer: Tensor) -> bytes:
    plain = buffer.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes()
