"""Refuses groups in which different threads of the ranks have met.

Ranks tell the groups that are split off another one apart by their number. Where two threads of
each rank make a group at the same time, the first of one rank may be the second of another: the
model of one thread would be averaged with the other thread's model, which may look just like it.

So the ranks of a new group compare the names of the threads that have made it. Different names
alone say nothing, since frameworks number the threads in which they train, on each rank otherwise.
The threads are crossed in two cases:

1. Two threads with different names have met, and on either rank a living thread with the other's
   name makes groups of the same parent as well.
2. In all meetings of threads with different names so far, two ranks had the same names, in another
   order: A with B, and then B with A. So the threads may have ended meanwhile.

Names that end in a number ("Thread-2", "ThreadPoolExecutor-0_1") say nothing where two living
threads with such names make groups: each may have either number on another rank. That is refused.

Ranks may know only when their last threads come. Then groups that were made before by threads of
different names fail as well.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch

from pydist.errors import Mismatch

if TYPE_CHECKING:
    from pydist._native import Communicator

# How much of a thread's name is compared.
_NAME_BYTES = 128

_REMEDY = (
    "Threads that make groups at the same time meet in any order. Build the models and optimizers "
    "of all threads one after the other, in one thread, and then train them in the threads; or "
    "give each thread a process_group of its own"
)

_lock = threading.Lock()
# For each group the threads that have split others off, or are about to. Guarded by _lock.
_makers: WeakKeyDictionary[Communicator, WeakSet[threading.Thread]] = WeakKeyDictionary()
# For each group those split off by threads of different names, or of names that end in a number.
# Guarded by _lock.
_doubtful: WeakKeyDictionary[Communicator, WeakSet[Communicator]] = WeakKeyDictionary()
# For each group, by the ranks of the groups split off: how often a thread of each name has come to
# the meetings in which names differed, for each of these ranks. The counts are the same on all of
# them. Guarded by _lock.
_Names = dict[tuple[int, ...], list[Counter[str]]]
_different: WeakKeyDictionary[Communicator, _Names] = WeakKeyDictionary()


def note_maker(parent: Communicator) -> None:
    """Notes that the calling thread is about to split a group off `parent`. Talks to nobody."""
    with _lock:
        _makers.setdefault(parent, WeakSet()).add(threading.current_thread())


def refuse_crossed(communicator: Communicator, parent: Communicator, ranks: Sequence[int]) -> None:
    """Compares the threads that have made a group. Every rank of the new group calls it.

    Args:
        communicator: the new group.
        parent: the one that it was split off.
        ranks: those of `parent` that are in the new group, in its order.

    Raises:
        Mismatch: different threads have met; on all ranks. The caller drops the new group.
    """
    thread = threading.current_thread()
    own = _short(thread.name)
    with _lock:
        is_counted = _is_counted(thread) and any(
            other is not thread and other.is_alive() and _is_counted(other)
            for other in _makers[parent]
        )
    names, counted = _told_by_all(communicator, own, is_counted)
    if any(counted):
        rank = counted.index(True)
        _refuse(
            parent,
            f"thread {names[rank]!r} of rank {ranks[rank]} made a group (for a model, an optimizer "
            "or a checkpoint), and another thread of that rank makes groups as well, whose name "
            "ends in a number too: a number does not tell which threads of the ranks belong "
            f"together. {_REMEDY}, or give each thread a name of its own, the same on all ranks.",
        )
    if len(set(names)) == 1:
        if _is_counted(thread):
            _note_doubtful(parent, communicator)
        return
    with _lock:
        makers = {_short(thread.name) for thread in _makers[parent] if thread.is_alive()}
        counts = _different.setdefault(parent, {}).setdefault(
            tuple(ranks), [Counter() for _ in ranks]
        )
        for count, name in zip(counts, names, strict=True):
            count[name] += 1
        crossed = [
            (rank, other)
            for rank, other in combinations(range(len(names)), 2)
            if names[rank] != names[other] and counts[rank] == counts[other]
        ]
    if not crossed:
        # A rank whose thread this thread should not have met, because this process has a thread of
        # that one's name, which makes groups too.
        mine = next((r for r, name in enumerate(names) if name != own and name in makers), -1)
        others = torch.empty(communicator.size, dtype=torch.int64, device="cpu")
        communicator.all_gather(torch.tensor([mine], device="cpu"), others, False)
        crossed = [(rank, other) for rank, other in enumerate(others.tolist()) if other >= 0]
    if not crossed:
        _note_doubtful(parent, communicator)
        return
    rank, other = crossed[0]
    _refuse(
        parent,
        f"thread {names[rank]!r} of rank {ranks[rank]} met thread {names[other]!r} of rank "
        f"{ranks[other]} when they made a group (for a model, an optimizer or a checkpoint), but "
        f"thread {names[other]!r} of rank {ranks[rank]} makes groups as well. {_REMEDY}.",
        sorted((ranks[rank], ranks[other])),
    )


def _refuse(parent: Communicator, message: str, ranks: Sequence[int] = ()) -> NoReturn:
    with _lock:
        doubtful = list(_doubtful.get(parent, ()))
    for each in doubtful:
        each.abort(message)
    raise Mismatch(message, ranks=ranks)


def _note_doubtful(parent: Communicator, communicator: Communicator) -> None:
    with _lock:
        _doubtful.setdefault(parent, WeakSet()).add(communicator)


def _is_counted(thread: threading.Thread) -> bool:
    """Whether the thread's name ends in a number, as the names that Python gives do."""
    return re.search(r"\d( \(.*\))?$", thread.name) is not None


def _short(name: str) -> str:
    return name.encode()[:_NAME_BYTES].decode(errors="ignore")


def _told_by_all(communicator: Communicator, name: str, flag: bool) -> tuple[list[str], list[bool]]:
    told = bytearray(bytes([flag]) + name.encode()).ljust(1 + _NAME_BYTES, b"\0")
    all_told = torch.empty(communicator.size * len(told), dtype=torch.uint8, device="cpu")
    communicator.all_gather(torch.frombuffer(told, dtype=torch.uint8), all_told, False)
    rows = [bytes(row.tolist()) for row in all_told.view(-1, len(told))]
    return [row[1:].rstrip(b"\0").decode() for row in rows], [bool(row[0]) for row in rows]
