"""Which backend carries a group, and the communicator that the ranks make on it.

The ranks of a job agree on one backend when they meet (Note [One choice for the whole job] in
`pydist.job.meeting.backend_agreement`). On NCCL, which moves nothing but GPU tensors, a group has a
communicator on native or gloo beside it, for tensors on the CPU.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pydist import _native
from pydist._load import __version__
from pydist.config.variables import parse_backend
from pydist.errors import InvalidUsage, Mismatch, PeerLost, Timeout, TransportError
from pydist.gpu.nccl import connect_at_joining, find_nccl
from pydist.job import current
from pydist.job.gloo_factory import gloo_factory
from pydist.job.last_words import in_words
from pydist.job.log import logger
from pydist.job.meeting.backend_agreement import Verdict, agree
from pydist.job.meeting.gloo_network import GlooNetwork, describe_network, join_network
from pydist.job.meeting.gpu_assignment import describe_gpus, make_current
from pydist.job.meeting.meeting_number import next_number, require_only_process
from pydist.job.processes import Process, end_with_torchrun, own_process


@dataclass(frozen=True)
class Agreement:
    """What all ranks of the job have agreed on."""

    # "native", "gloo" or "nccl".
    backend: str
    # What carries tensors on the CPU: the same, except beside nccl.
    host_backend: str
    # Why that one; for people.
    reason: str
    # An identity of each rank's host, in rank order.
    hosts: tuple[str, ...]
    # The number of the GPU that each rank takes, of those that it sees; None where it sees none.
    gpus: tuple[int | None, ...]
    # Where gloo listens on this rank.
    network: GlooNetwork
    # Each rank's process, in rank order.
    processes: tuple[Process, ...]

    def local_ranks(self, rank: int) -> list[int]:
        """The ranks on the host of `rank`, in order."""
        return [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]


def _wish(backend: str | None) -> tuple[str, str]:
    """What this rank was asked for, and by whom."""
    if backend is not None:
        return parse_backend(backend, "backend="), "backend="
    return parse_backend(os.environ.get("PYDIST_BACKEND") or "auto", "PYDIST_BACKEND"), (
        "PYDIST_BACKEND"
    )


def _hello(
    backend: str | None, store: dist.Store, rank: int, size: int
) -> tuple[dict[str, Any], _native.NativeIntroduction | None]:
    """What this rank says, and its introduction there to ranks of the native engine."""
    introduction = None
    hello: dict[str, Any] = {
        "host": _native.host_identity(),
        "process": asdict(own_process()),
        "pydist": __version__,
        "torch": torch.__version__.split("+")[0],
    }
    try:
        hello["wish"], hello["source"] = _wish(backend)
        _native.read_environment()
        hello["network"] = describe_network(store, size)
        hello.update(describe_gpus(wants_nccl=hello["wish"] in ("auto", "nccl")))
        if (kept := current.job.kept_gpu) is not None:
            hello["chosen"] = kept
        if size > 1 and hello["wish"] != "gloo":
            introduction = _native.NativeIntroduction(rank)
            hello["introduction"] = introduction.text.decode("latin-1")  # any bytes
    except InvalidUsage as error:
        hello["error"] = str(error)
    except Exception as error:
        # No descriptor, no memory: the others must not wait for a rank that raises alone.
        hello["error"], hello["kind"] = in_words(error), "TransportError"
    return hello, introduction


def _known(
    processes: Sequence[Process], members: Sequence[int]
) -> list[tuple[int, str, int, int, bool]]:
    """What the ranks of a group are, for the engine: with their numbers in the job."""
    machine = own_process().machine
    return [
        (member, each.host, each.pid, each.started, bool(machine) and each.machine == machine)
        for member, each in zip(members, processes, strict=True)
    ]


@dataclass(frozen=True)
class _Meeting:
    """The ranks of one group, as they meet to make its communicators."""

    store: dist.Store
    rank: int
    size: int
    name: str
    timeout: timedelta
    network: GlooNetwork
    # Of each rank, in rank order.
    processes: tuple[Process, ...]
    # The number of each rank in the job, which errors name.
    members: Sequence[int]
    # All of the job, where they have met before.
    world: _native.Communicator | None = None

    def create(
        self,
        backend: str,
        introduction: _native.NativeIntroduction | None = None,
        roster: bytes | None = None,
    ) -> _native.Communicator:
        """A communicator on native or gloo."""
        store, timeout_s = dist.PrefixStore(backend, self.store), self.timeout.total_seconds()
        known = _known(self.processes, self.members)
        if backend == "native":
            made = _native.create_native(
                store,
                self.rank,
                self.size,
                self.name,
                timeout_s,
                known,
                self.world,
                self.network.address,
                introduction,
                roster,
            )
        else:
            self.network.require_usable()
            factory = gloo_factory(self.network)
            made = _native.create_gloo(
                store,
                self.rank,
                self.size,
                self.name,
                timeout_s,
                factory,
                known,
                parent=self.world,
                interfaces=self.network.interfaces,
                address=self.network.address,
            )
        made.timeout = timeout_s
        return made

    def create_nccl(self, host: _native.Communicator, gpu: int) -> _native.Communicator:
        """A communicator on NCCL that leaves tensors on the CPU to `host`, and owns it."""
        connect_at_joining()
        made = _native.create_nccl(host, gpu, find_nccl().path)
        made.timeout = self.timeout.total_seconds()
        return made


def create_communicator(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    name: str,
    timeout: timedelta,
    members: Sequence[int] | None = None,
    backend: str | None = None,
    is_world: bool = False,
    may_meet_again: bool = True,
) -> _native.Communicator:
    """Joins a group. Every rank of the group calls it.

    A rank that sees a GPU has its own as the current one after it has joined the world.

    Args:
        store: the group's own key-value store.
        rank: this process's rank in the group.
        size: the number of ranks in the group.
        name: unique among the process's groups, the same on every rank.
        timeout: how long joining, and later each operation, may take: ranks have as long to come,
            and from then on as long again to share memory.
        members: the ranks of the group by their rank in the world; None for all.
        backend: as in PYDIST_BACKEND, which it overrides.
        is_world: whether the group holds all ranks of the job, so that its choice is the job's.
        may_meet_again: whether these ranks may have met in this store before, or will again.

    Raises:
        InvalidUsage: an unknown backend, or one that this version does not have; or NCCL was asked
            for and a rank has no GPU, or shares one.
        Mismatch: the ranks were asked for different backends, or run different versions.
        Timeout: a rank did not come.
        TransportError: the backend asked for can't serve these ranks.
    """
    end_with_torchrun()
    known = None if is_world else current.job.agreement
    ranks = range(size) if members is None else members
    first = None if known is None else known.processes[ranks[0]]
    world = current.job.world if known is not None and current.job.has_world else None
    if world is not None:
        world.require_hope(list(ranks))

    def look() -> None:
        if first is None:
            return
        if world is not None:
            world.require_hope(list(ranks))
        if first.is_known_dead:
            _native.show_awaiting_nobody()
            raise PeerLost(
                f"rank {ranks[0]} ({first}) has died before {name} was made.",
                ranks=(ranks[0],),
                host=first.host,
                pid=first.pid,
                cause="has died",
            )
        _native.show_awaited(name, 0, first.host, first.pid)

    # After destroy_process_group torch begins its names anew, on the same store.
    met_by = f"{name} of {','.join(map(str, members)) if members is not None else size}"
    numbers = dist.PrefixStore(met_by, store)
    number = next_number(numbers, rank, timeout, look) if may_meet_again else 1
    if number is None:
        require_only_process(numbers, rank)
        if known is not None:
            tuples = _known([known.processes[member] for member in ranks], ranks)
            raise _native.error_of_lateness(tuples, name, [0], parent=world)
        raise Timeout(
            f"rank 0 did not join {name} within {timeout.total_seconds():g} s: look at what it "
            "prints.",
            ranks=(0,),
            cause="did not join",
        )
    store = dist.PrefixStore(f"{met_by}#{number}", store)
    if known is not None:
        _native.show_awaiting_nobody()
        processes = tuple(known.processes[member] for member in ranks)
        meeting = _Meeting(store, rank, size, name, timeout, known.network, processes, ranks, world)
        gpu = known.gpus[rank if members is None else members[rank]]
        return _create(meeting, known, gpu)
    start_s = time.monotonic()
    hello, introduction = _hello(backend, store, rank, size)
    try:
        agreed = agree(
            dist.PrefixStore("agree", store),
            rank,
            size,
            hello,
            timeout,
            current.job.require_hope,
            None
            if size == 1
            else partial(
                _make_roster, introduction, dist.PrefixStore("native", store), name, ranks
            ),
        )
        gpu = agreed.gpus[rank]
        network = join_network(rank, agreed.hosts, agreed.networks)
        meeting = _Meeting(store, rank, size, name, timeout, network, agreed.processes, ranks)
        job, communicator = _choose(meeting, agreed, gpu, introduction)
    finally:
        if introduction is not None:
            introduction.end()
    if is_world:
        if gpu is not None:
            # Not before all have joined: where it fails, it may fail on this rank alone.
            make_current(gpu)
        current.mine().agreement = job
    if rank == 0:
        took_s = time.monotonic() - start_s
        # Where there is no GPU, and none was meant, nobody misses NCCL.
        best = "native" if size == 1 or set(agreed.gpus) == {None} else "nccl"
        fell_back = agreed.wish == "auto" and (job.backend != best or agreed.misses_gpu)
        logger.log(
            logging.WARNING if fell_back else logging.INFO,
            "backend %s on %d rank%s (%s); joined in %.2f s",
            job.backend,
            size,
            "" if size == 1 else "s",
            job.reason,
            took_s,
        )
    return communicator


def _make_roster(
    own: _native.NativeIntroduction | None,
    store: dist.Store,
    name: str,
    members: Sequence[int],
    introductions: Sequence[str],
    processes: Sequence[Process],
) -> bytes:
    """See `backend_agreement.MakeRoster`; the others as in `_Meeting`."""
    texts = [text.encode("latin-1") for text in introductions]
    try:
        assert own is not None  # this rank has said it, as all have
        return _native.make_native_roster(own, store, name, texts, _known(processes, members))
    except (Mismatch, TransportError):
        raise
    except Exception as error:
        # No memory, say: the others must hear of that.
        raise TransportError(
            f"rank {members[0]} ({processes[0]}) can't tell the others who they are: "
            f"{in_words(error)}",
            ranks=(members[0],),
            host=processes[0].host,
            pid=processes[0].pid,
            cause=in_words(error),
        ) from error


def _choose(
    meeting: _Meeting,
    agreed: Verdict,
    gpu: int | None,
    introduction: _native.NativeIntroduction | None,
) -> tuple[Agreement, _native.Communicator]:
    """Takes the best backend that can serve all ranks of those that the wish leaves."""
    is_auto = agreed.wish == "auto"
    host_backend = "native" if agreed.wish in ("auto", "nccl") else agreed.wish
    reason = "asked for"
    try:
        if agreed.not_native is not None:
            raise agreed.not_native
        communicator = meeting.create(host_backend, introduction, agreed.roster)
        if is_auto:
            reason = "the fastest that every rank can use"
    except TransportError as error:
        if agreed.wish not in ("auto", "nccl"):
            raise
        host_backend, reason = "gloo", f"native can't serve these ranks: {error}"
        communicator = meeting.create(host_backend)
    backend, not_nccl = host_backend, agreed.not_nccl
    if is_auto and meeting.size == 1 and not_nccl is None:
        # Nothing to move, and CUDA and NCCL take seconds to start.
        not_nccl = "one rank alone does without"
    if agreed.wish in ("auto", "nccl") and not_nccl is None:
        assert gpu is not None
        try:
            communicator = meeting.create_nccl(communicator, gpu)
            backend = "nccl"
            reason = "every rank has a GPU" if is_auto else "asked for"
            reason += f"; {host_backend} for tensors on the CPU"
        except TransportError as error:
            if not is_auto:
                communicator.shutdown()
                raise
            not_nccl = str(error)
    if is_auto and backend != "nccl" and agreed.for_cuda:
        reason += f"; not nccl: {not_nccl}"
    job = Agreement(
        backend,
        host_backend,
        reason,
        agreed.hosts,
        agreed.gpus,
        meeting.network,
        agreed.processes,
    )
    return job, communicator


def _create(meeting: _Meeting, job: Agreement, gpu: int | None) -> _native.Communicator:
    """A further group of a job that has agreed."""
    communicator = meeting.create(job.host_backend)
    if job.backend == "nccl":
        assert gpu is not None
        return meeting.create_nccl(communicator, gpu)
    return communicator
