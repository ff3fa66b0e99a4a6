"""The communicator on which the ranks of a group save, and what is still being saved there.

A save that goes on in a thread talks to the other ranks too, so it needs a communicator that nobody
else uses, and saves follow each other.

Note [Turns]: ranks exchange several messages in a save, and in a load. One that leaves in the
middle of them, interrupted say, and comes back for another save, would give the others an answer to
what they did not ask. So whoever leaves aborts the lane: the others raise at once, and so does
every later save and load of these ranks. Errors that all ranks raise together leave nobody behind.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.nn.parallel import DistributedDataParallel

from pydist._torch import uncompiled
from pydist.checkpoint.replacement import real
from pydist.checkpoint.verdict import KnownToAll
from pydist.errors import CheckpointError, InvalidUsage, Mismatch
from pydist.job import current, groups, membership
from pydist.job.last_words import in_words
from pydist.parallel.wrapper import DataParallel
from pydist.sharding.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from pathlib import Path

    from pydist._native import Communicator


# Savings that are being written in threads, or have failed there without anybody having been told,
# even if the model and its lane are gone.
_under_way: set[Saving] = set()


class Saving:
    """A save that goes on while training does.

    Attributes:
        path: The checkpoint's folder, once it is done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], None], *, asynchronous: bool) -> None:
        """Does the work, here or in a thread that the interpreter waits for at exit."""
        if not asynchronous:
            work()
            return
        _under_way.add(self)
        self._thread = threading.Thread(target=self._guarded, args=(work,), name="pydist save")
        self._thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
            _under_way.discard(self)
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether the checkpoint is written, or will not be. Talks to nobody."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Returns once the checkpoint is written.

        Raises:
            CheckpointError: It could not be, on every rank.
        """
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> BaseException | None:
        """Waits, and returns an error that nobody was told yet."""
        if self._thread is not None:
            self._thread.join()
        _under_way.discard(self)
        error, self._error = self._error, None
        return error


def settle_at(path: Path) -> BaseException | None:
    """Waits for saves under way at a place or within it, whoever's; returns what went wrong."""
    error = None
    for saving in list(_under_way):
        if path in (saving.path, saving.path.parent):
            error = saving.settle() or error
    return error


class Lane:
    """What saves of one group share."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.last: Saving | None = None

    def settle(self, path: str | os.PathLike[str]) -> BaseException | None:
        """Waits for the save under way, and for others at this place, say of another model.

        Returns an error that nobody was told yet.
        """
        last, self.last = self.last, None
        error = None if last is None else last.settle()
        with suppress(InvalidUsage):  # which the caller finds as well
            error = settle_at(real(path)) or error
        return error

    @contextmanager
    def turn(self, doing: str) -> Iterator[None]:
        """Around all that a rank says in a save or a load; see Note [Turns]."""
        own: BaseException | None = None
        try:
            yield
        except KnownToAll as carrier:
            own = carrier.error
        except (CheckpointError, InvalidUsage, Mismatch):
            raise
        except BaseException as error:
            self.communicator.abort(
                f"{doing} ended half-way on rank {self.communicator.rank}, with {in_words(error)}"
            )
            raise
        if own is not None:
            raise own


_lanes: WeakKeyDictionary[Communicator, Lane] = WeakKeyDictionary()


def lane_of(models: Iterable[Any], optimizers: Iterable[Any], group: groups.Group | None) -> Lane:
    """The lane of the ranks of models, or of optimizers, or of a group. All ranks call it.

    Args:
        models: In an order that all ranks have; the first that has a group says whose lane it is.
        optimizers: Likewise, where no model has one.
        group: Takes precedence.

    Raises:
        InvalidUsage: They are on groups of different ranks.
    """
    if group is not None:
        return _lane(groups.communicator_of(group, "process_group"))
    found: list[Communicator] = []
    for model in map(uncompiled, models):
        if isinstance(model, DataParallel):
            found.append(model.communicator_to_split())
        elif isinstance(model, DistributedDataParallel):
            membership.init()
            found.append(groups.communicator_of(model.process_group))
    if not found:
        found = [o._communicator for o in optimizers if isinstance(o, ShardedOptimizer)]
    if not found:
        membership.init()
        found = [groups.communicator_of()]
    places = {(communicator.rank, communicator.size): None for communicator in found}
    if len(places) > 1:
        where = " and ".join(f"rank {rank} of {size}" for rank, size in places)
        raise InvalidUsage(
            f"what one checkpoint is to hold is on groups of different ranks: this process is "
            f"{where}. Save it into checkpoints of their own, or pass process_group="
        )
    return _lane(found[0])


def _lane(parent: Communicator) -> Lane:
    lane = _lanes.get(parent)
    if lane is None:
        lane = _lanes[parent] = Lane(groups.split(parent, range(parent.size), on_host=True))
        if _finish_all not in current.before_closing:
            current.before_closing.append(_finish_all)
    return lane


def _finish_all() -> None:
    for saving in list(_under_way):
        error = saving.settle()
        if error is not None:
            warnings.warn(f"the last checkpoint was not written: {error}", stacklevel=2)
    _lanes.clear()
