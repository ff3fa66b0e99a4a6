"""Methods of a module that are called through its wrapper: what they return may go backward.

A backward averages if it comes from what a forward of the wrapper has returned. `model.encode(x)`,
where `encode` is the module's, is such a forward, too; `model.module.encode(x)` is none.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

from pydist._torch import runs_uncompiled

# Takes what a forward has returned.
Watch = Callable[[Any], None]


class WatchedMethods:
    """Makes methods that call a module's own and then `watch` what those return.

    Made once for each function, so that a method equals itself: `model.encode == model.encode`.

    Args:
        watch: Called with what a method has returned, or has yielded, where that is a generator.
            Called at once with what is awaited or asynchronous otherwise.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._made: dict[Any, Callable[..., Any]] = {}

    def of(self, method: types.MethodType) -> types.MethodType:
        """What stands for a bound method: bound to the same object."""
        function = method.__func__
        if function not in self._made:
            self._made[function] = _watched(function, self._watch)
        return types.MethodType(self._made[function], method.__self__)


def _watched(function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            outputs = await function(*args, **kwargs)
            watch(outputs)
            return outputs

        return awaited
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generated(*args: Any, **kwargs: Any) -> Any:
            return (yield from _Watched(function(*args, **kwargs), watch))

        return generated

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        outputs = function(*args, **kwargs)
        watch(outputs)
        return outputs

    return runs_uncompiled(called)


class _Watched(Generator[Any, Any, Any]):
    """A generator whose values are watched."""

    def __init__(self, generator: Generator[Any, Any, Any], watch: Watch) -> None:
        self._generator = generator
        self._watch = watch

    def send(self, value: Any) -> Any:
        yielded = self._generator.send(value)
        self._watch(yielded)
        return yielded

    def throw(self, *error: Any) -> Any:
        yielded = self._generator.throw(*error)
        self._watch(yielded)
        return yielded
