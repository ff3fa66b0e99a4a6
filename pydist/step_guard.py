"""Stops an optimizer from using gradients that were never averaged."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pydist import _native
from pydist.errors import InvalidUsage

_reducers: weakref.WeakSet[_native.Reducer] = weakref.WeakSet()
_is_hooked = False


def guard_steps(reducer: _native.Reducer) -> None:
    """Checks, before every step of any optimizer, that what it uses was averaged by this reducer.

    A step inside `no_sync()` is left alone: there, ranks train apart on purpose. So is an optimizer
    with `refuses_pending_gradients`, whose ranks can't.
    """
    global _is_hooked
    if not _is_hooked:
        register_optimizer_step_pre_hook(_check)
        _is_hooked = True
    _reducers.add(reducer)


def forget_steps(reducer: _native.Reducer) -> None:
    """Checks no longer for a reducer that averages nothing any more."""
    _reducers.discard(reducer)


def _check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for reducer in _reducers:
        if reducer.is_in_backward and _uses(optimizer, reducer.parameters):
            raise InvalidUsage(
                f"{type(optimizer).__name__}.step() is called within backward, from a hook say, "
                "before gradients are averaged: call it after backward()"
            )
        if getattr(optimizer, "refuses_pending_gradients", False):
            continue
        if reducer.enabled and reducer.has_pending and _uses(optimizer, reducer.pending):
            raise InvalidUsage(
                f"{type(optimizer).__name__}.step() would use gradients that were accumulated "
                "under no_sync() and never averaged, so the ranks' models would part: run the last "
                "backward outside of no_sync(), or call sync_gradients() first; to train the ranks "
                "apart on purpose, call step() inside no_sync()"
            )


def _uses(optimizer: Optimizer, parameters: list[Tensor]) -> bool:
    ids = {id(parameter) for parameter in parameters}
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
