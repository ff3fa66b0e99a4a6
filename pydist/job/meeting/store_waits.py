"""Waiting for what other ranks write into the job's store."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pydist.errors import Error, TransportError

__all__ = ["blaming_the_store", "root_of", "values_of", "wait_for_keys", "wait_until"]

# How often a wait looks whether it is in vain.
_LOOK_S = 0.5


def root_of(store: dist.Store) -> dist.Store:
    """The store without the prefixes in which a part of it lies."""
    root: Any = store
    while isinstance(root, dist.PrefixStore):
        root = root.underlying_store
    found: dist.Store = root
    return found


def values_of(store: dist.Store, keys: list[str]) -> list[bytes]:
    """What is under each key, in one request where the store can. All of them are there."""
    with blaming_the_store():
        if store.has_extended_api():  # type: ignore[attr-defined]
            found: list[bytes] = store.multi_get(keys)
            return found
        return [store.get(key) for key in keys]


@contextmanager
def blaming_the_store() -> Iterator[None]:
    """Takes an error of the store, which only says what failed, for the end of the store."""
    try:
        yield
    except Error:
        raise  # of what was done between requests to the store
    except RuntimeError as error:
        raise TransportError(
            f"the store of the job is gone; is the rank that hosts it still alive? ({error})"
        ) from error


def wait_until(
    has_come: Callable[[], bool],
    timeout: timedelta,
    look: Callable[[], None] | None = None,
) -> bool:
    """Waits for something; False when the time is up.

    Args:
        has_come: asked again and again.
        timeout: how long to wait.
        look: called every half second, to raise where waiting is in vain.
    """
    now_s = time.monotonic()
    deadline_s, look_s = now_s + timeout.total_seconds(), now_s + _LOOK_S
    pause_s = 0.00005
    while not has_come():
        now_s = time.monotonic()
        if now_s > deadline_s:
            return False
        if look is not None and now_s > look_s:
            look()
            look_s = now_s + _LOOK_S
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.01)
    return True


def wait_for_keys(
    store: dist.Store,
    keys: list[str],
    timeout: timedelta,
    look: Callable[[], None] | None = None,
) -> bool:
    """Waits until all the keys are in the store; False when the time is up.

    Unlike the store's own wait it lets signal handlers run, and a TCPStore serve other threads.

    Raises:
        TransportError: the store is gone.
    """
    with blaming_the_store():
        return wait_until(lambda: store.check(keys), timeout, look)
