"""The errors of pydist: one tree, the same in Python and in C++::

    Error(RuntimeError)
      InvalidUsage(ValueError)    the call itself is wrong
      Mismatch                    ranks disagree about what to do
      PeerLost                    a rank died or left
      Timeout(TimeoutError)       a deadline passed
      Aborted                     somebody gave the group up
      TransportError              the operating system refused
      CheckpointError             a checkpoint can't be written, or is damaged

After Mismatch, PeerLost, Timeout, Aborted and TransportError a group's ranks are out of step: the
group is of no further use, the process is. It can save its state, and go on in a new group. After
InvalidUsage and CheckpointError the group goes on.

Note [Who is to blame]: the engine knows more than the text of an error says, and the errors carry
it as attributes. Torch, through which many errors come (those of `loss.backward()`, say), makes an
exception of its class and its text alone. So the engine announces the attributes right before, on
the same thread, and `Error` takes up what was announced with its text.

Note [Errors and generations]: no group outlives its generation of the job, and groups meet under
names with the number of theirs. So what a group's ranks tell each other of a failure is never heard
in a later generation, and need not say to which one it belongs. But programs keep exceptions: those
say by themselves of which generation they are.
"""

import threading
from collections.abc import Iterable
from typing import Any

__all__ = [
    "Aborted",
    "CheckpointError",
    "Error",
    "InvalidUsage",
    "Mismatch",
    "PeerLost",
    "Timeout",
    "TransportError",
]


class Error(RuntimeError):
    """Everything that pydist raises by itself.

    Catch it to tell a failure of communication from one of the model.

    Attributes:
        ranks: The ranks that are to blame, as far as they are known, numbered as in the group whose
            operation failed, or that a group was to be made of: those that died, left, were
            stopped or never came, both sides of a Mismatch, the one that aborted. `()` where nobody
            knows.
        host: The name of the host of the first of them; None if unknown.
        pid: The process of the first of them, on its host; None if unknown.
        operation: What failed, such as `"all_reduce #812 of group 'world'"`; None if nothing was
            under way.
        cause: What `ranks` did or what befell them, such as `"has died"`, or the reason that was
            given to `pydist.abort`; None if unknown. On native at most 511 bytes: a longer one is
            cut and ends with an ellipsis.
        generation: The generation of the job in which this process was when the error was raised:
            1 for ranks that have met for the first time, 2 once they have met again, by
            `pydist.init` or `pydist.reform`, and so on. 0 before this process has joined a job, and
            where the program itself has made torch's default group.
    """

    ranks: tuple[int, ...]
    host: str | None
    pid: int | None
    operation: str | None
    cause: str | None
    generation: int

    def __init__(
        self,
        *args: object,
        ranks: Iterable[int] = (),
        host: str | None = None,
        pid: int | None = None,
        operation: str | None = None,
        cause: str | None = None,
        generation: int | None = None,
    ) -> None:
        super().__init__(*args)
        self.generation = _generation if generation is None else generation
        announced = _announced.__dict__.pop("blame", None)
        if announced is not None and args and args[0] == announced[0]:
            _, self.ranks, self.host, self.pid, self.operation, self.cause = announced
        else:
            self.ranks, self.host, self.pid = tuple(ranks), host, pid
            self.operation, self.cause = operation, cause

    @property
    def blame(self) -> dict[str, Any]:
        """The attributes above, for another error of the same culprits: `Error(text, **blame)`."""
        return {
            "ranks": self.ranks,
            "host": self.host,
            "pid": self.pid,
            "operation": self.operation,
            "cause": self.cause,
            "generation": self.generation,
        }


# Of the job that this process is in; see Note [Errors and generations].
_generation = 0


def note_generation(generation: int) -> None:
    """From now on errors are of this generation of the job."""
    global _generation
    _generation = generation


# What `Error` takes up next; see Note [Who is to blame].
_announced = threading.local()


def _announce(
    message: str,
    ranks: tuple[int, ...],
    host: str | None,
    pid: int | None,
    operation: str | None,
    cause: str | None,
) -> None:
    _announced.blame = (message, ranks, host, pid, operation, cause)


class InvalidUsage(Error, ValueError):  # noqa: N818
    """The call, a setting or an environment variable is wrong on this rank, whatever others do.

    The message names the value, and what is valid. Nothing was sent: the group stays usable.
    """


class Mismatch(Error):  # noqa: N818
    """Ranks disagree: about an operation (kind, dtype, count, op, root), or how to start the job.

    Every rank of the group gets it, with both sides named, before anybody's data is touched (of
    CUDA tensors on NCCL only with `PYDIST_DEBUG=1`). The cause is in the script: ranks took
    different branches, or have models that differ.
    """


class PeerLost(Error):  # noqa: N818
    """A rank died, or left the group while others still needed it.

    The message names it, and what it was last in. Look at that rank's own output for the cause;
    here, save what is worth saving and exit, or go on with the ranks that are left.
    """


class Timeout(Error, TimeoutError):  # noqa: N818
    """A deadline passed before the operation was done.

    The message says "timed out", which tools that restart jobs look for, and names the rank that is
    waited for and what it is in. If that rank is only slow (it loads data, compiles, writes a
    checkpoint), give more time: `PYDIST_TIMEOUT`, the `timeout` of `pydist.init`, or that of the
    call.
    """

    def __init__(self, message: str = "", **blame: Any) -> None:
        text = message if "timed out" in message else f"timed out: {message}"
        super().__init__(text, **blame)


class Aborted(Error):  # noqa: N818
    """The group was given up, here or by another rank; the message carries the reason."""


class TransportError(Error):
    """The operating system refused: no room for shared memory, no connection, no permission.

    The message names the call and the limit met. With `PYDIST_BACKEND=auto` a job that can't have
    the native backend for such a reason takes gloo.
    """


class CheckpointError(Error):
    """A checkpoint can't be written, or what is there is damaged or incomplete.

    Every rank gets it, with the ranks named that met it, and the file. The group stays usable, and
    so do earlier checkpoints.
    """
