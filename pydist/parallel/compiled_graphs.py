"""Lets torch.compile cut the graph of a wrapped module, so that communication overlaps backward.

A compiled backward is one node of the autograd graph, whose gradients all come at its end. Inside
the forward of torch's own DistributedDataParallel, dynamo therefore cuts graphs where buckets end
(`torch._dynamo.config.optimize_ddp`). It looks for the module that is active on that class and
reads nothing of it but the size of the buckets.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame
from torch.nn.parallel import DistributedDataParallel

# Dynamo wants its first bucket, of this size, to be no larger than the others.
_LEAST_CAP_BYTES = int(getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 20))


_Function = TypeVar("_Function", bound=Callable[..., Any])


def runs_uncompiled(function: _Function) -> _Function:
    """Lets dynamo leave a function alone, and yet compile what it calls.

    What `torch.compiler.disable(recursive=False)` does, without importing dynamo, which takes
    seconds, for those who compile nothing.
    """
    return _left_alone(function, eval_frame._FrameAction.DEFAULT)


def runs_uncompiled_throughout(function: _Function) -> _Function:
    """Lets dynamo leave a function alone, with all that it calls.

    What `torch.compiler.disable` does, as above. What was given to `torch.compile` by itself, such
    as the model that a closure calls, is compiled all the same.
    """
    return _left_alone(function, eval_frame._FrameAction.SKIP)


def _left_alone(function: _Function, what_it_calls: eval_frame._FrameAction) -> _Function:
    # The first mark keeps Dynamo from inlining the wrapper, the second from compiling the function
    # when it runs.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, what_it_calls)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def compiles_anything() -> bool:
    """Whether this process has compiled something with torch.compile, or is about to."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", {None: dynamo})
    return any(backend is not None for backend in backends.values())


def scripts_any_function() -> bool:
    """Whether this process has compiled a function with `torch.jit.script`."""
    return bool(torch.jit._state._jit_caching_layer)


def uncompiled(module: Any) -> Any:
    """The module that `torch.compile` has wrapped; anything else as it is."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # without it, nothing is wrapped
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


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
        owner: Any = DistributedDataParallel
        self._caps().append(cap_bytes)
        with self._lock:
            self._forwards += 1
            now = getattr(owner, "_active_ddp_module", None)
            if now is not self:
                # Torch's own, which may have changed since a forward of another thread.
                self._before, owner._active_ddp_module = now, self

    @runs_uncompiled_throughout
    def leave(self) -> None:
        owner: Any = DistributedDataParallel
        self._caps().pop()
        with self._lock:
            self._forwards -= 1
            if self._forwards == 0:
                before, self._before = self._before, None
                if owner._active_ddp_module is self:
                    owner._active_ddp_module = before

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
    if "torch._dynamo.eval_frame" not in sys.modules:
        return _nothing_to_cut
    return _Cutting(max(cap_bytes, _LEAST_CAP_BYTES))
