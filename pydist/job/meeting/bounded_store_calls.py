"""Calls of a store that may never return.

A TCPStore whose server is stopped answers never, whatever time-out it was given, and its client is
deaf to Ctrl-C meanwhile. So it is called on a thread of its own, which is given up with the store.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from typing import Any, TypeVar

from pydist.errors import TransportError

__all__ = ["STORE_PATIENCE_S", "answer_within"]

T = TypeVar("T")

# A TCPStore whose name server is silent may take 10 s over each process that connects to it.
STORE_PATIENCE_S = 30.0


def answer_within(
    limit_s: float,
    call: Callable[..., T],
    *args: Any,
    meanwhile: Callable[[], None] | None = None,
    **kwargs: Any,
) -> T:
    """What a call returns or raises, if that comes in time.

    Args:
        limit_s: How long it may take.
        call: What to call, with the other arguments.
        meanwhile: What the calling thread does before it waits.

    Raises:
        TransportError: Nothing has come.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call(*args, **kwargs))
        except BaseException as error:
            answer.set_exception(error)

    try:
        threading.Thread(target=ask, name="pydist-store", daemon=True).start()
    except RuntimeError:  # no thread to be had; and whoever can't ask the store can't tell anybody
        ask()
    if meanwhile is not None:
        meanwhile()
    try:
        return answer.result(limit_s)
    except NotYetError:
        if answer.done():
            raise  # of the call
        raise TransportError(
            f"the store of the job has not answered for {limit_s:.3g} s: is the process that hosts "
            "it (the launcher or rank 0) still alive, and not stopped?"
        ) from None
