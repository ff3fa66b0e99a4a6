"""Which backend carries a group, and the "pydist" backend of torch.distributed.

Note [One choice for the whole job]
`auto` must come out the same on every rank, and a rank that was told something else must not be
left waiting. So the first thing that the ranks of a job exchange, through the store and before
anything is built on it, is what each was asked for and which versions it runs (`_agree`). Rank 0
reads what all said and publishes one verdict, which all follow: the backend to try, or the error
that all raise. Whether the native engine can serve them all is agreed by the engine itself
(`create_native` succeeds on every rank, or raises the same TransportError on every rank); on
TransportError `auto` takes gloo, everywhere. Groups that are made later follow the job's choice
without asking again.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pydist import _native
from pydist._load import __version__
from pydist.errors import Error, InvalidUsage, Mismatch, Timeout, TransportError

__all__ = ["Job", "Options", "create_communicator", "parse_backend", "register", "valid_backends"]

logger = logging.getLogger("pydist")

NCCL_IS_MISSING = "not built yet in this version of pydist"

# How long after rank 0's own deadline the others wait for its verdict.
_VERDICT_GRACE_S = 5.0

_VERDICTS: dict[str, type[Error]] = {
    kind.__name__: kind for kind in (InvalidUsage, Mismatch, Timeout, TransportError)
}


@dataclass(frozen=True)
class Options:
    """What `init_process_group("pydist", pg_options=...)` takes."""

    # As in PYDIST_BACKEND, which it overrides.
    backend: str | None = None


@dataclass(frozen=True)
class Job:
    """What all ranks of the job have agreed on."""

    # "native" or "gloo".
    backend: str
    # Why that one; for people.
    reason: str
    # An identity of each rank's host, in rank order.
    hosts: tuple[str, ...]

    @property
    def is_on_one_host(self) -> bool:
        return len(set(self.hosts)) == 1

    def local_ranks(self, rank: int) -> list[int]:
        """The ranks on the host of `rank`, in order."""
        return [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]


# The agreement of the job's world group, from its creation until shutdown.
_job: Job | None = None


def job() -> Job | None:
    """The job's agreement, if its ranks have met."""
    return _job


def forget_job() -> None:
    """Lets the next world group agree anew."""
    global _job
    _job = None


def valid_backends() -> tuple[str, ...]:
    """The values of PYDIST_BACKEND and of `pydist.init(backend=)`."""
    for name, values, *_ in _native.environment_variables():
        if name == "PYDIST_BACKEND":
            return tuple(value.strip() for value in values.split("|"))
    raise Error("the engine declares no PYDIST_BACKEND: pydist and its engine differ in version.")


def parse_backend(value: str, where: str) -> str:
    """Checks a backend's name.

    Args:
        value: the name.
        where: its source, for the message: "PYDIST_BACKEND", "backend=".

    Raises:
        InvalidUsage: the name is unknown; the message lists the valid ones.
    """
    if value not in valid_backends():
        raise InvalidUsage(
            f"{where}{'' if where.endswith('=') else '='}'{value}' is not valid; use one of: "
            f"{', '.join(valid_backends())}."
        )
    return value


def _wish(backend: str | None) -> tuple[str, str]:
    """What this rank was asked for, and by whom."""
    if backend is not None:
        return parse_backend(backend, "backend="), "backend="
    return parse_backend(os.environ.get("PYDIST_BACKEND") or "auto", "PYDIST_BACKEND"), (
        "PYDIST_BACKEND"
    )


def host_identity() -> str:
    """The same on two ranks when both see one machine, one host name and one network."""
    if override := os.environ.get("PYDIST_HOST_ID"):
        return override
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return " ".join(parts)


def _hello(backend: str | None) -> dict[str, str]:
    hello = {
        "host": host_identity(),
        "pydist": __version__,
        "torch": torch.__version__.split("+")[0],
    }
    try:
        hello["wish"], hello["source"] = _wish(backend)
        _native.read_environment()
    except InvalidUsage as error:
        hello["error"] = str(error)
    return hello


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _who_said_what(said: Iterable[str]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(said):
        by_value.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())


def judge(hellos: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """What follows from what all ranks said: a wish and the hosts, or an error for all."""
    wrong = [f"{_ranks([r])}: {h['error']}" for r, h in enumerate(hellos) if "error" in h]
    if wrong:
        return {"error": "InvalidUsage", "message": " ".join(wrong)}
    for package in ("pydist", "torch"):
        if len({hello[package] for hello in hellos}) > 1:
            versions = _who_said_what(f"{package} {hello[package]}" for hello in hellos)
            return {
                "error": "Mismatch",
                "message": f"the ranks run different versions: {versions}. Install the same "
                "everywhere.",
            }
    if len({hello["wish"] for hello in hellos}) > 1:
        wishes = _who_said_what(
            f"{hello['source']}{'' if hello['source'].endswith('=') else '='}'{hello['wish']}'"
            for hello in hellos
        )
        return {
            "error": "Mismatch",
            "message": f"the ranks were asked for different backends: {wishes}. Give all of them "
            "the same.",
        }
    return {"wish": hellos[0]["wish"], "hosts": [hello["host"] for hello in hellos]}


def _appear(store: dist.Store, keys: list[str], timeout: timedelta) -> bool:
    """Waits until the keys are in the store; False when the time is up.

    Unlike the store's own wait it lets signal handlers run, and a TCPStore serve other threads.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    pause_s = 0.0002
    try:
        while not store.check(keys):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
    except RuntimeError as error:
        raise TransportError(
            f"the store of the job is gone; is the rank that hosts it still alive? ({error})"
        ) from error
    return True


def _collect(store: dist.Store, size: int, timeout: timedelta) -> dict[str, Any]:
    keys = [f"hello/{rank}" for rank in range(size)]
    if not _appear(store, keys, timeout):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return {
            "error": "Timeout",
            "message": f"{_ranks(missing)} of {size} did not join within "
            f"{timeout.total_seconds():g} s. Look at what they print; PYDIST_TIMEOUT or "
            "pydist.init(timeout=) gives them more time.",
        }
    return judge([json.loads(store.get(key)) for key in keys])


def _agree(
    store: dist.Store, rank: int, size: int, backend: str | None, timeout: timedelta
) -> tuple[str, tuple[str, ...]]:
    """The wish of all ranks, and where each is; see Note [One choice for the whole job]."""
    store.set(f"hello/{rank}", json.dumps(_hello(backend)))
    if rank == 0:
        verdict = _collect(store, size, timeout)
        store.set("verdict", json.dumps(verdict))
    else:
        if not _appear(store, ["verdict"], timeout + timedelta(seconds=_VERDICT_GRACE_S)):
            raise Timeout(
                f"rank 0 did not join within {timeout.total_seconds():g} s: look at what it prints."
            )
        verdict = json.loads(store.get("verdict"))
    if "error" in verdict:
        raise _VERDICTS[verdict["error"]](verdict["message"])
    return verdict["wish"], tuple(verdict["hosts"])


def gloo_factory(
    one_host: bool,
) -> Callable[[dist.Store, int, int, float | timedelta], dist.ProcessGroup]:
    """What makes torch's gloo for `create_gloo`; `one_host`: all ranks share the loopback."""

    def create(
        store: dist.Store, rank: int, size: int, timeout: float | timedelta
    ) -> dist.ProcessGroup:
        if not dist.is_gloo_available():
            raise TransportError("this torch was built without gloo.")
        # Any: torch's stubs leave out its options.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        # Left to itself gloo takes the interface that the host's name resolves to, which may be a
        # slow one, or none.
        if one_host and "GLOO_SOCKET_IFNAME" not in os.environ:
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
        else:
            options._devices = [gloo.create_default_device()]
        group: dist.ProcessGroup = gloo(store, rank, size, options)
        return group

    return create


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
) -> _native.Communicator:
    """Joins a group. Every rank of the group calls it.

    Args:
        store: the group's own key-value store.
        rank: this process's rank in the group.
        size: the number of ranks in the group.
        name: unique among the process's groups, the same on every rank.
        timeout: how long joining, and later each operation, may take.
        members: the ranks of the group by their rank in the world; None for all.
        backend: as in PYDIST_BACKEND, which it overrides.
        is_world: whether the group holds all ranks of the job, so that its choice is the job's.

    Raises:
        InvalidUsage: an unknown backend, or one that this version does not have.
        Mismatch: the ranks were asked for different backends, or run different versions.
        Timeout: a rank did not come.
        TransportError: the backend asked for can't serve these ranks.
    """
    global _job
    # After destroy_process_group torch begins its names anew, on the same store. The same ranks
    # have met under a name equally often; others may have met under it in between.
    met_by = f"{name} of {','.join(map(str, members)) if members is not None else size}"
    turn = store.add(f"{met_by}/{rank}", 1)
    store = dist.PrefixStore(f"{met_by}#{turn}", store)
    if _job is not None and not is_world:
        return _create(_job.backend, _job.is_on_one_host, store, rank, size, name, timeout)
    start_s = time.monotonic()
    wish, hosts = _agree(dist.PrefixStore("agree", store), rank, size, backend, timeout)
    if wish == "nccl":
        raise InvalidUsage(
            f"backend 'nccl' is {NCCL_IS_MISSING}; use auto, native or gloo. "
            'For CUDA tensors, torch\'s own nccl works beside pydist: "cpu:pydist,cuda:nccl".'
        )
    one_host = len(set(hosts)) == 1
    chosen = "native" if wish == "auto" else wish
    reason = "asked for"
    try:
        communicator = _create(chosen, one_host, store, rank, size, name, timeout)
        if wish == "auto":
            reason = "the fastest that every rank can use"
    except TransportError as error:
        if wish != "auto":
            raise
        chosen, reason = "gloo", f"native can't serve these ranks: {error}"
        communicator = _create(chosen, one_host, store, rank, size, name, timeout)
    if is_world:
        _job = Job(chosen, reason, hosts)
    if rank == 0:
        took_s = time.monotonic() - start_s
        fell_back = wish == "auto" and chosen != "native"
        logger.log(
            logging.WARNING if fell_back else logging.INFO,
            "backend %s on %d rank%s (%s); joined in %.2f s",
            chosen,
            size,
            "" if size == 1 else "s",
            reason,
            took_s,
        )
    return communicator


def _create(
    backend: str,
    one_host: bool,
    store: dist.Store,
    rank: int,
    size: int,
    name: str,
    timeout: timedelta,
) -> _native.Communicator:
    store = dist.PrefixStore(backend, store)
    if backend == "native":
        communicator = _native.create_native(store, rank, size, name, timeout.total_seconds())
    else:
        communicator = _native.create_gloo(
            store, rank, size, name, timeout.total_seconds(), gloo_factory(one_host)
        )
    communicator.timeout = timeout.total_seconds()
    return communicator


def default_timeout() -> timedelta:
    """PYDIST_TIMEOUT, or what stands for it."""
    return timedelta(seconds=_native.read_environment().timeout)


def _create_process_group(options: Any, pg_options: Any = None) -> _native.ProcessGroup:
    """What torch.distributed calls for every group on backend "pydist"."""
    if pg_options is not None and not isinstance(pg_options, Options):
        raise InvalidUsage(
            f"pg_options of backend 'pydist' is a {type(pg_options).__name__}; it must be a "
            "pydist.backends.Options, or None."
        )
    # torch hands down its own default where the script gave no time-out.
    is_default = options.timeout == dist.distributed_c10d.default_pg_timeout
    timeout = default_timeout() if is_default else options.timeout
    # torch names no ranks for the default group.
    is_world = not options.global_ranks_in_group
    if is_world:
        forget_job()
    communicator = create_communicator(
        options.store,
        options.group_rank,
        options.group_size,
        name="world" if is_world else f"group {options.group_id}",
        timeout=timeout,
        members=options.global_ranks_in_group if not is_world else None,
        backend=pg_options.backend if pg_options is not None else None,
        is_world=is_world,
    )
    return _native.ProcessGroup(communicator, timeout)


def register() -> None:
    """Makes "pydist" a backend of torch.distributed, for CPU and CUDA tensors. Idempotent.

    `import pydist` calls it, and so does torch, where it looks for backends among the installed
    packages' entry points.
    """
    if "PYDIST" not in dist.Backend._plugins:
        dist.Backend.register_backend(
            "pydist", _create_process_group, extended_api=True, devices=["cpu", "cuda"]
        )
