"""The "pydist" backend of torch.distributed."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pydist import _native
from pydist._torch import forget_failed_world, is_timeout_torchs_own
from pydist.config.variables import default_timeout, parse_backend, parse_timeout, valid_backends
from pydist.errors import InvalidUsage
from pydist.job import current
from pydist.job.arguments import a_type
from pydist.job.backend_choice import Agreement, create_communicator

__all__ = [
    "Agreement",
    "Options",
    "create_communicator",
    "create_process_group",
    "parse_backend",
    "parse_timeout",
    "register",
    "valid_backends",
]


@dataclass(frozen=True)
class Options:
    """What `init_process_group("pydist", pg_options=...)` takes."""

    # As in PYDIST_BACKEND, which it overrides.
    backend: str | None = None
    # How long joining, and later each operation, may take; in seconds, if it is a number. None
    # leaves that to init_process_group's `timeout`, and to PYDIST_TIMEOUT if that has none either.
    timeout: float | timedelta | None = None


@dataclass(frozen=True)
class FirstMeeting(Options):
    """The same, of a group whose ranks have not met in its store before, nor will again."""


def _timeout_of(handed_down: timedelta, pg_options: Options | None) -> timedelta:
    """The time-out of a group that torch makes."""
    if pg_options is not None and pg_options.timeout is not None:
        return parse_timeout(pg_options.timeout)
    return default_timeout() if is_timeout_torchs_own() else handed_down


def create_process_group(options: Any, pg_options: Any = None) -> _native.ProcessGroup:
    """What torch.distributed calls for every group on backend "pydist"."""
    if pg_options is not None and not isinstance(pg_options, Options):
        raise InvalidUsage(
            f"pg_options of backend 'pydist' is {a_type(pg_options)}; it must be a "
            "pydist.backends.Options, or None."
        )
    timeout = _timeout_of(options.timeout, pg_options)
    # torch names no ranks for the default group.
    is_world = not options.global_ranks_in_group
    if is_world:
        current.mine().agreement = None  # the new world agrees anew
    try:
        communicator = create_communicator(
            options.store,
            options.group_rank,
            options.group_size,
            name="world" if is_world else f"group {options.group_id}",
            timeout=(is_world and current.job.joining) or timeout,
            members=options.global_ranks_in_group if not is_world else None,
            backend=pg_options.backend if pg_options is not None else None,
            is_world=is_world,
            may_meet_again=not isinstance(pg_options, FirstMeeting),
        )
    except BaseException:
        if is_world:
            forget_failed_world()
            _native.release_process()  # what this rank has made for the others
        raise
    communicator.timeout = timeout.total_seconds()
    return _native.ProcessGroup(communicator, timeout)


def register() -> None:
    """Makes "pydist" a backend of torch.distributed, for CPU and CUDA tensors. Idempotent.

    `import pydist` calls it, and so does torch from 2.14 on, where a program names "pydist" before
    that. Where `import torch` has called `_pydist_backend.register`, there is nothing left to do.
    """
    if not hasattr(dist.Backend, "PYDIST"):
        dist.Backend.register_backend(
            "pydist", create_process_group, extended_api=True, devices=["cpu", "cuda"]
        )
