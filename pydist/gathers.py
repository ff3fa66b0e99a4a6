"""Parameters whose new values are still on their way from the ranks that have updated them.

Note [Whoever reads, waits]: until its gather is over, such a parameter is of the class `InFlight`,
which torch asks before it does anything with it. So whatever reads or writes it through torch's
functions, a layer's forward first of all, waits for the gather of its bucket, and goes on with an
ordinary parameter; what asks for its shape only does not wait. Code that takes tensors past torch's
dispatch, compiled graphs say, is waited for before forward (pydist.ShardedOptimizer sees to it).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from pydist._native import Work

_lock = threading.Lock()
# By the parameter's id, as long as it is of the class InFlight.
_gathers: dict[int, Gather] = {}


class Gather:
    """One bucket's parameters, on their way.

    Args:
        parameters: Of the class `nn.Parameter` itself.
        work: What brings their values.
    """

    def __init__(self, parameters: Sequence[Tensor], work: Work) -> None:
        self._parameters = parameters
        self._work = work
        self._is_over = False
        for parameter in self._parameters:
            _gathers[id(parameter)] = self
            parameter.__class__ = InFlight

    def wait(self) -> None:
        """Returns once the values are there. Raises what went wrong on their way, every time."""
        if self._is_over:
            return
        self._work.wait()
        with _lock:
            if self._is_over:
                return
            self._is_over = True
            for parameter in self._parameters:
                parameter.__class__ = nn.Parameter
                del _gathers[id(parameter)]


def wait_for(parameters: Iterable[Tensor]) -> None:
    """Waits for the values of some parameters."""
    for parameter in parameters:
        gather = _gathers.get(id(parameter))
        if gather is not None:
            gather.wait()


class InFlight(nn.Parameter):
    """See Note [Whoever reads, waits]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _NEED_NO_VALUES:
            wait_for(_in_flight((args, kwargs)))
        # What is in flight still, is nested deeper than anybody looks, or not read.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_for([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for([self])
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        wait_for([self])
        return repr(self)


def _in_flight(value: Any) -> Iterable[Tensor]:
    if isinstance(value, InFlight):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _in_flight(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _in_flight(item)


_FACTS = (
    "_backward_hooks",
    "_version",
    "device",
    "dtype",
    "grad",
    "grad_fn",
    "is_leaf",
    "is_sparse",
    "itemsize",
    "layout",
    "nbytes",
    "ndim",
    "requires_grad",
    "retains_grad",
    "shape",
)

_NEED_NO_VALUES: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _FACTS),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    cast(Any, Tensor.grad).__delete__,
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_shared,
    Tensor.nelement,
    Tensor.numel,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.stride,
    Tensor.storage_offset,
    Tensor.__hash__,
    Tensor.__len__,
}
