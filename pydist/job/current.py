"""The job that this process is in: one object has all that goes when the process leaves.

Note [Generations]: a process that leaves a job and joins again is in the next generation of it,
with as many ranks as there are then, and perhaps another number among them. Each generation is a
`Job` of its own: it meets under names with its number, makes its communicators anew, and uses
nothing of an earlier one, which was closed before.

The functions of `pydist.job` that know nothing of an object (`pydist.rank()`, collectives without a
group) are about `current.job`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from pydist import _native, errors
from pydist.errors import InvalidUsage

if TYPE_CHECKING:
    from pydist.gpu.selection import Choice
    from pydist.job.backend_choice import Agreement
    from pydist.job.meeting.backend_agreement import HopeOf

__all__ = [
    "Job",
    "Membership",
    "before_closing",
    "before_going_on",
    "mine",
    "not_joined_error",
    "replace",
]


@dataclass(frozen=True)
class Membership:
    """What this process is in a job that it has joined."""

    communicator: _native.Communicator
    # torch.distributed's default group, and whether pydist made it.
    group: dist.ProcessGroup
    owns_group: bool
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str


def not_joined_error() -> InvalidUsage:
    """For whoever needs the world before there is one."""
    return InvalidUsage("this process has not joined a job yet: call pydist.init() first.")


class _NotJoined:
    """Stands where the communicator of the world will be."""

    def __getattr__(self, name: str) -> object:
        raise not_joined_error()


_not_joined: _native.Communicator = _NotJoined()  # type: ignore[assignment]


def _refuse(*_: object) -> None:
    raise not_joined_error()


class Job:
    """One generation of a job, as one of its processes has it; see Note [Generations].

    There is one from the beginning: a process may meet others in groups of torch.distributed
    without joining them by `pydist.init`.

    Args:
        generation: Its number: how often the ranks of its launcher have met, with this time. The
            same on all ranks; 0 where they have not, or where the program itself has made torch's
            default group.
        require_hope: Raises where some of its ranks can't come to their meeting, as far as that is
            known; None where nothing is.
        kept_gpu: The number of the GPU that this process keeps from the generation before.
        joining: How long joining may take, where operations may take longer.

    Attributes:
        generation, require_hope, kept_gpu, joining: As above.
        pid: The process that made it. A forked child has it in memory and can't use or close it.
        agreement: What its ranks have agreed on; None before they have met.
        membership: What this process is in it; None before it has joined.
        gpus: Those that the program has chosen when it joined; None: it has not, or a launcher has.
        world: The communicator of all ranks; see `set_world`.
        all_reduce: Its method; see `look_up`.
        bootstrapped: Communicators for groups of other backends.
        split: Those split off others.
        of_layers: Those split off for the layers of models: one for each group, whatever the number
            of layers.
        meeting: Held while a group of another backend is met: threads that need it at the same time
            meet it once.
        lock: Guards the tables.
    """

    def __init__(
        self,
        generation: int = 0,
        require_hope: HopeOf | None = None,
        kept_gpu: int | None = None,
        joining: timedelta | None = None,
    ) -> None:
        self.generation = generation
        self.require_hope = require_hope
        self.kept_gpu = kept_gpu
        self.joining = joining
        self.pid = os.getpid()
        self.agreement: Agreement | None = None
        self.membership: Membership | None = None
        self.gpus: Choice | None = None
        self.set_world(None)
        self.bootstrapped: WeakKeyDictionary[dist.ProcessGroup, _native.Communicator] = (
            WeakKeyDictionary()
        )
        self.split: WeakSet[_native.Communicator] = WeakSet()
        self.of_layers: WeakKeyDictionary[
            dist.ProcessGroup | _native.Communicator, _native.Communicator
        ] = WeakKeyDictionary()
        self.meeting: WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = WeakKeyDictionary()
        self.lock = threading.Lock()

    def set_world(self, communicator: _native.Communicator | None) -> None:
        """Takes the communicator of all ranks; None: there is none any more."""
        self.world = _not_joined if communicator is None else communicator
        self.look_up()

    def look_up(self) -> None:
        """Looks the world's `all_reduce` up, since that takes a tenth of the time of a small one.

        Called anew by whoever gives the class another method of that name.
        """
        self.all_reduce: Callable[..., _native.Work | None] = (
            self.world.all_reduce if self.has_world else _refuse
        )

    def take(self, membership: Membership) -> None:
        """Makes it the one of this process."""
        self.membership = membership
        self.set_world(membership.communicator)

    @property
    def has_world(self) -> bool:
        """Whether `world` is a communicator."""
        return self.world is not _not_joined

    def check_close(self) -> None:
        """Raises InvalidUsage where `close` would break a capture into a CUDA graph."""
        if self.pid == os.getpid() and self.membership is not None:
            made = [self.membership.communicator, *self.split, *self.bootstrapped.values()]
            for communicator in made:
                communicator.check_shutdown()

    def close(self) -> None:
        """Lets go of every communicator made for it; those of torch's own groups stay with torch.

        In a forked child they are not closed: they are the parent's.
        """
        is_own = self.pid == os.getpid()
        if is_own:
            for finish in list(before_closing):
                finish()
        self.set_world(None)
        if is_own:
            for communicator in [*self.split, *self.bootstrapped.values()]:
                communicator.shutdown()
        self.split.clear()
        self.bootstrapped.clear()
        self.of_layers.clear()


# A module variable and not a function: the collectives read it on every call.
job = Job()

# What runs in threads on communicators of a job is finished by these before it closes.
before_closing: list[Callable[[], None]] = []

# Called when the program has ended, before its rank leaves the job at exit.
before_leaving_at_exit: list[Callable[[], object]] = []

# What has waited for ranks that are lost is given up by these, where the survivors go on.
before_going_on: list[Callable[[], None]] = []


def mine() -> Job:
    """The job to which communicators of this process are added, which are closed at exit.

    A forked child has none of its parent's.
    """
    if job.pid != os.getpid():
        _take(Job())
    atexit.register(_close_at_exit)
    return job


def note_program_end() -> None:
    """At exit: ranks that still wait for this one read that its program has ended."""
    for call in before_leaving_at_exit:
        call()
    _native.note_program_end()


def replace(
    generation: int = 0,
    require_hope: HopeOf | None = None,
    kept_gpu: int | None = None,
    joining: timedelta | None = None,
) -> None:
    """Closes the job, and puts another one in its place, which has nothing of it.

    Args:
        generation: Of the new one, as in `Job`; and so are the others.
        require_hope: As in `Job`.
        kept_gpu: As in `Job`.
        joining: As in `Job`.
    """
    job.close()
    _take(Job(generation, require_hope, kept_gpu, joining))
    atexit.unregister(_close_at_exit)


def _take(new: Job) -> None:
    global job
    job = new
    errors.note_generation(new.generation)


def _close_at_exit() -> None:
    _native.note_program_end()
    job.close()
