"""Moments of a job at which fault injection may strike (`pydist.testing.faults`).

Only rare moments report here: joining the job, and writing a checkpoint. Nothing listens unless
faults are armed.
"""

from collections.abc import Callable

START_UP = "start-up"
CHECKPOINT = "checkpoint"

# Gets the phase, and what the phase is about: the file of a checkpoint, or None.
listener: Callable[[str, object], None] | None = None


def reach(phase: str, about: object = None) -> None:
    """Tells the listener, if there is one, that this process has come to a phase."""
    if listener is not None:
        listener(phase, about)
