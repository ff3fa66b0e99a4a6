"""Parameters whose new values are still on their way from the ranks that have updated them.

Note [Whoever reads, waits]: until its gather is over, such a parameter is of the class `InFlight`,
which torch asks before it does anything with it. So whatever reads or writes it through torch's
functions, a layer's forward first of all, waits for the gather of its bucket; what asks for its
shape only does not wait. What takes tensors past torch's dispatch is waited for before it runs:
`torch.func.vmap` and TorchScript in a module's forward by a hook of all modules, which waits for
what the module itself has; compiled graphs and scripted functions by pydist.ShardedOptimizer.

Note [Each stream waits]: where the communicator lets streams of a GPU wait, a reader's stream does
and the host does not. That says nothing of other streams, which may have been made to wait for the
one that stepped, and for no other. So the parameter stays in flight, and each read makes the stream
wait that is current there, until the host sees that the values have arrived. Only who takes over
the order of all streams makes it ordinary before: `finish`. What shares a parameter's memory, its
`detach()` say, is for the stream on which that was made, and those that wait for it.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pydist import _native
from pydist._torch import (
    BACKWARD_HOOKS,
    as_plain_tensors,
    children_of,
    compiles_anything,
    parameters_of,
    without_functorch,
)
from pydist.job import current
from pydist.sharding.tensor_facts import FACTS, getters

# A wait with a time limit waits on the host, not on the stream.
_NEVER_S = 1e9

_lock = threading.Lock()

# The gathers that are under way, and the hook on all modules, which exists as long as there is one.
_under_way: weakref.WeakSet[Gather] = weakref.WeakSet()
_hook: RemovableHandle | None = None


def _give_up_lost() -> None:
    """Makes parameters ordinary whose values won't arrive any more: ranks of the job are lost.

    Each of their elements is as it was before the step, or as it is after it.
    """
    for gather in list(_under_way):
        gather.give_up()


class Arrival(Protocol):
    """What brings values: a `_native.Work`, or what waits as that does."""

    def wait(self, timeout: float | None = None) -> None:
        """Lets the current stream wait, where it can; with a timeout in seconds, the host."""

    def is_completed(self) -> bool:
        """Whether the values are there, or won't come."""

    def exception(self) -> Any:
        """What went wrong; None as long as nothing has."""


class Gather:
    """One bucket's parameters, on their way.

    Args:
        parameters: Of the class `nn.Parameter` itself, on one device.
        work: What brings their values.
    """

    def __init__(self, parameters: Sequence[Tensor], work: Arrival) -> None:
        # Parameters have the gather, and nothing has them: a model that nobody reads again goes.
        self._references = [weakref.ref(parameter) for parameter in parameters]
        self._work = work
        self._device = parameters[0].device
        self._is_over = False
        for parameter in parameters:
            parameter.__class__ = InFlight
            cast(InFlight, parameter).gathered_by = self
        if _give_up_lost not in current.before_going_on:
            current.before_going_on.append(_give_up_lost)
        with _lock:
            _under_way.add(self)
            _hook_modules()

    def wait(self) -> None:
        """Lets who reads next, on the current stream or the host, see the values.

        Raises what went wrong on their way, every time.
        """
        if self._is_over:
            return
        self._hold_back()
        if self._work.is_completed() and self._work.exception() is None:
            self._end()

    def wait_on_host(self, limit_s: float = _NEVER_S) -> None:
        """Returns once the values are there, for whatever stream."""
        if not self._is_over:
            self._work.wait(limit_s)
            self._end()

    def finish(self) -> None:
        """Waits as `wait` does, and lets nobody wait again: the caller has put streams in order."""
        if not self._is_over:
            self._hold_back()
            self._end()

    def give_up(self) -> None:
        """Lets nobody wait again if something went wrong on the way."""
        if self._work.is_completed() and self._work.exception() is not None:
            self._end()

    def _hold_back(self) -> None:
        # A CUDA graph can wait only for work that was captured into it.
        self._work.wait(_NEVER_S if _native.is_capturing(self._device) else None)

    def _end(self) -> None:
        with _lock:
            if self._is_over:
                return
            self._is_over = True
            for reference in self._references:
                parameter = reference()
                # A later one may have begun, of another optimizer.
                if parameter is not None and getattr(parameter, "gathered_by", None) is self:
                    del cast(InFlight, parameter).gathered_by
                    parameter.__class__ = nn.Parameter
            _under_way.discard(self)
            _unhook_modules()


def _hook_modules() -> None:
    global _hook
    # Dynamo would compile every module again for the hook. Compiled modules need no hook: their
    # parameters are waited for before they run.
    if _hook is None and not compiles_anything():
        _hook = nn.modules.module.register_module_forward_pre_hook(_wait_for_own)


def _unhook_modules() -> None:
    global _hook
    if _hook is not None and not _under_way:
        _hook.remove()
        _hook = None


def _wait_for_own(module: nn.Module, _: Any) -> None:
    """Before a module's forward: it may give what it has itself to code that doesn't wait."""
    for parameter in _own_parameters(module):
        # torch.func.functional_call puts tensors of its own in the places of parameters.
        for gather in _gathers_in(None if parameter is None else without_functorch(parameter)):
            gather.wait()
    if not _under_way:  # models that nobody has any more ended nothing
        with _lock:
            _unhook_modules()


def _own_parameters(module: nn.Module) -> Iterable[Tensor | None]:
    if isinstance(module, torch.jit.ScriptModule):
        # The modules within it are run without their hooks.
        yield from module.parameters()
        return
    yield from (parameters_of(module) or {}).values()
    for part in children_of(module).values():
        if isinstance(part, (nn.ParameterList, nn.ParameterDict)):
            yield from (parameters_of(part) or {}).values()


class InFlight(nn.Parameter):
    """See Note [Whoever reads, waits]."""

    gathered_by: Gather

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _NEED_NO_VALUES:
            for gather in dict.fromkeys(_gathers_in((args, kwargs))):
                gather.wait()
        # A tensor that is still in flight here is nested deeper than is looked, or is not read.
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_on_host(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_on_host(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        _wait_on_host(self)
        return repr(self)


def _wait_on_host(parameter: InFlight) -> None:
    for gather in _gathers_in(parameter):
        gather.wait_on_host()


def _gathers_in(value: Any) -> Iterable[Gather]:
    if isinstance(value, InFlight):
        # Another thread may just have seen it arrive.
        gather = getattr(value, "gathered_by", None)
        if gather is not None:
            yield gather
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _gathers_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _gathers_in(item)


_NEED_NO_VALUES = {
    *FACTS,
    BACKWARD_HOOKS,
    *getters(["retains_grad"]),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    cast(Any, Tensor.grad).__delete__,
    Tensor.is_contiguous,
    Tensor.is_shared,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.stride,
    Tensor.storage_offset,
}
