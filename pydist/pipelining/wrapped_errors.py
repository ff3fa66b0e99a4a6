"""The errors of pydist that torch's stages wrap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pydist.errors import Error


@contextlib.contextmanager
def unwrapped_errors() -> Iterator[None]:
    """Raises an error of pydist's as itself where torch's stage made a RuntimeError of it.

    Torch does so with whatever a stage's backward raises, in which replicas wait for each other.
    Programs that go on after a failure catch `PeerLost`, and read its attributes.
    """
    try:
        yield
    except RuntimeError as error:
        own = error.__cause__
        if not isinstance(own, Error):
            raise
        # Torch's error only repeats it: `from` leaves that out of what is printed.
        raise own from own.__cause__
