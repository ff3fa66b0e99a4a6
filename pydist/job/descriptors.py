"""Whether this process can open as many files more as something is about to."""

import os

from pydist.errors import TransportError


def require_descriptors(count: int, what: str) -> None:
    """Raises where it can't.

    Args:
        count: how many.
        what: takes them, for the error.

    Raises:
        TransportError: says how many it gets, and what to do.
    """
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise TransportError(
            f"{what} takes up to {count} descriptor{'' if count == 1 else 's'}, and this process "
            f"gets {len(opened)} ({error.strerror}): raise the limit (ulimit -n), or close files"
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)
