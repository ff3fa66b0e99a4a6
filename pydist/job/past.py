"""What this process remembers of the job that it was in last, or is in: it outlives the job.

By it the ranks of a job that has failed find each other again, and know whom not to wait for.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from pydist.errors import InvalidUsage
from pydist.job import current
from pydist.job.current import Membership
from pydist.job.launchers import Placement, read_placement
from pydist.job.processes import Process, own_process


@dataclass(frozen=True)
class Past:
    """A generation of the job.

    Attributes:
        rank: This process's.
        processes: The process of each rank, in rank order.
        placement: Where its ranks can meet again; None where the script has made the default group
            in a way that no launcher describes.
        backend: As it was asked for; None if nobody did.
        timeout: Of its operations.
        gpu: The number of the GPU that this process took.
        turn: The last verdict on survivors that this process has followed.
    """

    rank: int
    processes: tuple[Process, ...]
    placement: Placement | None
    backend: str | None
    timeout: timedelta
    gpu: int | None
    turn: int = 0


_last: Past | None = None

# The number of the last generation.
_generations = 0


def last() -> Past | None:
    """The generation that this process was in last, or is in; None if there was none.

    A forked process has none of its parent's.
    """
    if _last is None or _last.processes[_last.rank] != own_process():
        return None
    return _last


def generations() -> int:
    """The number of the last generation of which this process knows."""
    return _generations


def begin(generation: int) -> None:
    """Remembers the number under which the ranks have met."""
    global _generations
    _generations = generation


def note(member: Membership, backend: str | None) -> None:
    """Remembers the job that this process has joined.

    Args:
        member: What the process is in it.
        backend: As it was asked for.
    """
    global _last
    agreement, before = current.job.agreement, last()
    placement = None
    with suppress(InvalidUsage):
        placement = read_placement()
    if placement is not None and (placement.rank, placement.world_size) != (
        member.rank,
        member.world_size,
    ):
        placement = None
    _last = None
    if agreement is not None:
        _last = Past(
            rank=member.rank,
            processes=agreement.processes,
            placement=placement,
            backend=backend,
            timeout=timedelta(seconds=member.communicator.timeout),
            gpu=member.device.index,
            turn=0 if before is None else before.turn,
        )


def succeed(successor: Past, generation: int) -> None:
    """Remembers the generation that follows, whether this process can join it or not.

    Args:
        successor: That generation.
        generation: Its number.
    """
    global _last, _generations
    _last, _generations = successor, generation
