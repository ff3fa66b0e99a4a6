"""Lets torch.compile cut the graph of a wrapped module, so that communication overlaps backward.

A compiled backward is one node of the autograd graph, whose gradients all come at its end. Inside
the forward of torch's own DistributedDataParallel, dynamo therefore cuts graphs where buckets end
(`torch._dynamo.config.optimize_ddp`). It looks for the module that is active on that class and
reads nothing of it but the size of the buckets.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from pydist._torch import (
    LEAST_BUCKET_BYTES,
    active_wrapper,
    is_dynamo_there,
    runs_uncompiled_throughout,
    set_active_wrapper,
)


class _Active:
    """Stands for the active module while any thread is in a forward of ours.

    For dynamo in such a thread it has the size of that forward's buckets. In any other it is what
    was there before: nothing, as a rule, so that another thread's graphs stay whole.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forwards = 0
        self._before: Any = None
        self._of_thread = threading.local()

    @runs_uncompiled_throughout
    def enter(self, cap_bytes: int) -> None:
        self._caps().append(cap_bytes)
        with self._lock:
            self._forwards += 1
            now = active_wrapper()
            if now is not self:
                # Torch's own, which may have changed since a forward of another thread.
                self._before = now
                set_active_wrapper(self)

    @runs_uncompiled_throughout
    def leave(self) -> None:
        self._caps().pop()
        with self._lock:
            self._forwards -= 1
            if self._forwards == 0:
                before, self._before = self._before, None
                if active_wrapper() is self:
                    set_active_wrapper(before)

    def __bool__(self) -> bool:
        return bool(self._caps()) or self._before is not None

    @property
    def bucket_bytes_cap(self) -> int:
        caps = self._caps()
        return int(caps[-1] if caps else self._before.bucket_bytes_cap)

    def _caps(self) -> list[int]:
        # Wrappers may nest.
        if not hasattr(self._of_thread, "caps"):
            self._of_thread.caps = []
        caps: list[int] = self._of_thread.caps
        return caps


_active = _Active()


class _Cutting:
    """A context in which this thread's graphs are cut."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes

    @runs_uncompiled_throughout
    def __enter__(self) -> None:
        _active.enter(self._cap_bytes)

    @runs_uncompiled_throughout
    def __exit__(self, *of_error: object) -> None:
        _active.leave()


_nothing_to_cut = contextlib.nullcontext()


@runs_uncompiled_throughout
def graphs_cut_at(cap_bytes: int) -> contextlib.AbstractContextManager[None]:
    """Lets dynamo cut what it compiles inside into pieces with so many bytes of parameters.

    In this thread; others may be inside as well. Costs nothing where dynamo was never imported; so
    what the first torch.compile of a process compiles within that very forward stays whole.
    """
    if not is_dynamo_there():
        return _nothing_to_cut
    return _Cutting(max(cap_bytes, LEAST_BUCKET_BYTES))
