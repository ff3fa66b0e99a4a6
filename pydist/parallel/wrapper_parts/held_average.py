"""An average that a backward begins and that is concluded later, or given up."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydist._torch import runs_uncompiled_throughout
from pydist.job import current
from pydist.parallel.wrapper_parts.wrapper_state import WrapperState

if TYPE_CHECKING:
    from pydist import _native

# The groups of wrappers that are gone. The other ranks have yet to be told that an average was
# given up; when they make another wrapper with this rank, they have been. Reducers, which have the
# parameters, need not stay: what is under way keeps its own memory.
_giving_up: list[_native.Communicator] = []


class HeldAverage(WrapperState):
    """The part of `pydist.DataParallel` that lets an average wait, for stages of a pipeline."""

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def holding_average(self) -> Iterator[None]:
        """Lets a backward that ends inside return before its gradients are averaged.

        What is ready of them is on its way by then. `conclude_average()` waits for the rest, and
        all ranks call it before anything else of the model but evaluation: a forward with gradients
        enabled, or a backward, that comes first gives the average up. Then `conclude_average()`, or
        the optimizer's step, raises here, and the other ranks get a `pydist.Error`.
        """
        self.require_joined()
        reducer = self._reducer
        before, reducer.holding = reducer.holding, True
        try:
            yield
        finally:
            reducer.holding = before

    @runs_uncompiled_throughout
    def conclude_average(self) -> None:
        """Returns once gradients are averaged of a backward that ended in `holding_average()`.

        All ranks call it. Does nothing where there was none.

        Raises:
            InvalidUsage: A forward, or something else, came first, and gave the average up.
            Error: Another rank gave it up; or what that backward would have raised at its end.
        """
        if self._working_reducer is not None:
            self._working_reducer.conclude_held()

    def give_up_average(self) -> None:
        """Lets the other ranks know that the average is not wanted that `holding_average()` holds.

        They get a `pydist.Error` from `conclude_average()`. Does nothing where none is held.
        """
        if self._working_reducer is not None:
            self._working_reducer.give_up_held()

    def _give_up_when_gone(
        self, reducer: _native.Reducer, communicator: _native.Communicator
    ) -> None:
        """Gives up what is held once the wrapper is gone, as nobody can conclude it then."""
        weakref.finalize(self, _give_up_held, weakref.ref(reducer), communicator).atexit = False
        _forget_given_up()
        if _forget_given_up not in current.before_closing:
            current.before_closing.append(_forget_given_up)


def _give_up_held(itself: weakref.ref[_native.Reducer], communicator: _native.Communicator) -> None:
    reducer = itself()
    if reducer is not None and reducer.is_held:
        reducer.give_up_held()
        _giving_up.append(communicator)


def _forget_given_up() -> None:
    _giving_up.clear()
