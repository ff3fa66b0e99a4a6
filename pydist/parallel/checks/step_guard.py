"""Stops an optimizer from using gradients that were never averaged."""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pydist import _native
from pydist._torch import runs_uncompiled, runs_uncompiled_throughout
from pydist.errors import InvalidUsage
from pydist.parallel.ownership import newest_first

_lock = threading.Lock()
_is_hooked = False

# An attribute of the closures that are checked.
_HAS_RUN = "_pydist_has_run"


def guard_steps() -> None:
    """Checks, before every step of any optimizer, that what it uses of wrapped models is averaged.

    A step inside `no_sync()` is left alone: there, ranks train apart on purpose. So is an optimizer
    with `refuses_pending_gradients`, whose ranks can't. Where the step is given a closure, which
    may run the backward that averages, the check follows each run of the closure, and a step that
    has not run it.
    """
    global _is_hooked
    with _lock:
        if not _is_hooked:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _is_hooked = True


@runs_uncompiled_throughout
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    reducers = _concerned(optimizer)
    if not reducers:
        return None
    _require_outside_backward(optimizer, reducers)
    closure = _closure_of(args, kwargs)
    if not callable(closure):
        _require_averaged(optimizer, reducers)
        return None

    @runs_uncompiled
    @functools.wraps(closure)
    def checked(*of_closure: Any, **named: Any) -> Any:
        checked.__dict__[_HAS_RUN] = True
        loss = closure(*of_closure, **named)
        _require_averaged(optimizer, _concerned(optimizer))
        return loss

    checked.__dict__[_HAS_RUN] = False
    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs


@runs_uncompiled_throughout
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    closure = _closure_of(args, kwargs)
    if getattr(closure, _HAS_RUN, True) is False:
        _require_averaged(optimizer, _concerned(optimizer))


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _require_outside_backward(optimizer: Optimizer, reducers: list[_native.Reducer]) -> None:
    for reducer in reducers:
        if reducer.is_in_backward:
            raise InvalidUsage(
                f"{type(optimizer).__name__}.step() is called within backward, from a hook say, "
                "before gradients are averaged: call it after backward()"
            )

    _require_concluded(optimizer, reducers)


def _require_concluded(optimizer: Optimizer, reducers: list[_native.Reducer]) -> None:
    """Nothing is left of a round that was held: it is concluded."""
    for reducer in reducers:
        if reducer.is_held:
            raise InvalidUsage(
                f"{type(optimizer).__name__}.step() is called before gradients are averaged: a "
                "stage of a pipeline has gone backward, and its schedule was interrupted, or has "
                "called neither perform_reduce_grad() nor scale_grads() of the stage; run the "
                "schedule's step again, after zero_grad()"
            )
        if reducer.enabled and reducer.why_lost:
            raise InvalidUsage(
                f"{type(optimizer).__name__}.step() has no gradients: {reducer.why_lost}"
            )


@runs_uncompiled_throughout
def _require_averaged(optimizer: Optimizer, reducers: list[_native.Reducer]) -> None:
    _require_concluded(optimizer, reducers)  # which a closure may have left
    uses_pending = not getattr(optimizer, "refuses_pending_gradients", False)
    for wrapper in newest_first():
        if wrapper._working_reducer in reducers:
            wrapper._finite_check.before_step(uses_pending=uses_pending)
    if not uses_pending:
        return
    for reducer in reducers:
        if not (reducer.enabled and reducer.has_pending and _uses(optimizer, reducer.pending)):
            continue
        if reducer.has_bypassed:
            raise InvalidUsage(
                f"{type(optimizer).__name__}.step() would use gradients that were never averaged, "
                "so the ranks' models may part: they come from a backward past the wrapper, which "
                "starts from no output of model(...). That is one of model.module(...), of a part "
                "of the module that is called by itself, of another wrapper of the module, of a "
                "penalty of parameters alone, within a forward of the wrapper, or a second one "
                "through outputs in an object that cannot be searched. Go backward from the "
                "outputs of model(...), with the penalty added to the loss, or call "
                "sync_gradients() before the step; to train the ranks apart on purpose, call "
                "step() inside no_sync()"
            )
        raise InvalidUsage(
            f"{type(optimizer).__name__}.step() would use gradients that were accumulated "
            "under no_sync() and never averaged, so the ranks' models would part: run the last "
            "forward outside of no_sync(), whose backward then averages all of them, or call "
            "sync_gradients() first; to train the ranks apart on purpose, call step() inside "
            "no_sync()"
        )


@runs_uncompiled_throughout
def _concerned(optimizer: Optimizer) -> list[_native.Reducer]:
    """The reducers that average any of an optimizer's parameters.

    Nothing else is asked of the others, nor waited for: other threads may train their models.
    """
    working = [wrapper._working_reducer for wrapper in newest_first()]
    reducers = [reducer for reducer in working if reducer is not None]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    concerned = [reducer for reducer in reducers if any(map(reducer.averages, parameters))]
    for reducer in concerned:
        reducer.await_thrown()
    return concerned


def _uses(optimizer: Optimizer, parameters: list[Tensor]) -> bool:
    ids = {id(parameter) for parameter in parameters}
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
