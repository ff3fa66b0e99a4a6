"""The seed of a loader to which the script gave none: drawn from torch's generator, rank 0's.

Note [When a seed is drawn]
A loader of torch draws a seed when an iteration begins. Here a rank draws when it prepares the
loader: every rank prepares, but not every rank may iterate, and ranks that were seeded alike shall
have equal generators afterwards. A script may also seed its generator between preparing and
iterating. Then the number drawn before means nothing, and the first iteration draws another.

Note [Rank 0's seed]
The ranks may have been seeded differently, so the seed of rank 0 counts. Rank 0 puts it into the
job's store when its first iteration begins, and waits for nobody: a loader that rank 0 alone
iterates over works. Any other rank waits, when its own first iteration begins, until the seed is
there. Loaders are told apart by the order in which a thread has prepared them. Where ranks prepare
different loaders, or one prepares more than another, what they say about their loaders differs, the
lines that have prepared them included. That raises Mismatch.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from pydist.errors import InvalidUsage, Mismatch, PeerLost, Timeout
from pydist.job import groups, membership
from pydist.job.launchers import read_placement
from pydist.job.meeting.store_waits import wait_for_keys

# How many loaders each thread has prepared that ranks agree about.
_prepared: Counter[str] = Counter()
_lock = threading.Lock()


def _draw(generator: torch.Generator) -> int:
    """A number from 0 to 2^63 - 1."""
    number = torch.empty((), dtype=torch.int64, device=generator.device)
    return int(number.random_(generator=generator))


def place_of_caller() -> str:
    """The line that calls `pydist.prepare`, which calls this. Files may differ between hosts."""
    frame = sys._getframe(3)  # between them is what gives it its configuration
    return f"line {frame.f_lineno} of {frame.f_code.co_name}"


class SeedChoice:
    """A seed that is not chosen yet. Making one draws a number; not collective.

    Args:
        generator: what the seed is drawn from; by default torch's for the CPU.
        ranks: how many ranks share the samples; 1 agrees with nobody.
        place: what has prepared the loader; see `place_of_caller`.
    """

    def __init__(self, generator: torch.Generator | None, ranks: int, place: str) -> None:
        self._given = generator
        self._seeded_with = self._generator.initial_seed()
        self._drawn = _draw(self._generator)
        self._ranks = ranks
        self._place = place
        self._thread = threading.current_thread().name
        self._number = 0
        if ranks > 1:
            with _lock:
                _prepared[self._thread] += 1
                self._number = _prepared[self._thread]

    @property
    def _generator(self) -> torch.Generator:
        # Not kept: a copy of torch's generator would not hear of torch.manual_seed.
        return torch.default_generator if self._given is None else self._given

    def settle(self, known: int | None, rank: int, facts: Mapping[str, int | str]) -> int:
        """The seed. See Note [Rank 0's seed] for who waits for whom.

        Args:
            known: a seed that a state has brought, which counts on this rank; rank 0 tells it.
            rank: this process's, of those that share the samples.
            facts: what the ranks' loaders must have in common.

        Raises:
            InvalidUsage: the ranks that share the samples are not those of a job that this process
                has joined.
            Mismatch: rank 0 has prepared another loader.
            PeerLost: a rank died meanwhile.
            Timeout: rank 0's iteration has not begun within the time that operations may take.
        """
        seed = self._own() if known is None else known
        if self._ranks == 1 or (known is not None and rank != 0):
            return seed
        if known is not None and not self._is_job():
            return seed  # nobody asks
        facts = {**facts, "prepared at": self._place}
        store, timeout = self._store()
        key = f"{self._thread}/{self._number}"
        if rank == 0:
            store.set(key, json.dumps({"seed": seed, "facts": facts}))
            return seed
        if not wait_for_keys(store, [key], timeout, _raise_if_anybody_died):
            raise Timeout(
                f"rank {rank} has begun to iterate over a prepared loader ({_described(facts)}), "
                f"and rank 0, whose seed counts, has not within {timeout.total_seconds():g} s: let "
                "rank 0 begin, too, or give pydist.prepare(seed=), the same on every rank.",
                ranks=(0,),
                cause="has not begun",
            )
        told = json.loads(store.get(key))
        if told["facts"] != facts:
            raise Mismatch(
                f"the loader that rank {rank} begins with ({_described(facts)}) is the "
                f"{_ordinal(self._number)} that it has prepared without seed=, and that of rank 0 "
                f"is another ({_described(told['facts'])}): prepare the same loaders on every "
                "rank, in the same order, or give pydist.prepare(seed=), the same on every rank.",
                ranks=(0, rank),
                cause="prepared other loaders",
            )
        return int(told["seed"])

    def _own(self) -> int:
        """This rank's own; see Note [When a seed is drawn]."""
        seeded_with = self._generator.initial_seed()
        if seeded_with != self._seeded_with:
            self._seeded_with, self._drawn = seeded_with, _draw(self._generator)
        return self._drawn

    def _is_job(self) -> bool:
        return dist.is_initialized() and dist.get_world_size() == self._ranks

    def _store(self) -> tuple[dist.Store, timedelta]:
        """Where the job's ranks find the seed, and how long they look."""
        if not self._is_job():
            joined = dist.is_initialized()
            ranks = dist.get_world_size() if joined else read_placement().world_size
            if not joined and ranks == self._ranks:
                raise InvalidUsage(
                    f"the {ranks} ranks take the seed of a prepared loader from rank 0, and this "
                    "process has not joined the job yet: call pydist.init() (or "
                    "init_process_group) before iterating, or give pydist.prepare(seed=), the same "
                    "on every rank."
                )
            job = "alone" if ranks == 1 else f"in a job of {ranks}"
            raise InvalidUsage(
                f"{self._ranks} ranks share the samples of a prepared loader, and this process is "
                f"{job}, so it does not know whose seed to take: give pydist.prepare(seed=), the "
                "same on every rank."
            )
        world = dist.group.WORLD
        assert world is not None
        store = dist.PrefixStore("pydist seeds of loaders", groups.store_of(world))
        if membership.is_initialized():
            return store, timedelta(seconds=groups.communicator_of().timeout)
        waits: timedelta = store.timeout  # type: ignore[attr-defined] # missing from the stub
        return store, waits


def _raise_if_anybody_died() -> None:
    if not membership.is_initialized():
        return
    # The only trace of a death between operations.
    dead = [line for line in groups.communicator_of().whereabouts() if " has died" in line]
    if dead:
        raise PeerLost(f"waiting for rank 0's seed of a prepared loader: {'; '.join(dead)}")


def _described(facts: Mapping[str, int | str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    end = "th" if 10 < number % 100 < 20 else ends.get(number % 10, "th")
    return f"{number}{end}"
