"""When a launcher that spares survivors has nobody to wait for any more, though processes run."""

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from pydist import _native
from pydist.config.variables import default_timeout
from pydist.job.processes import status_of
from pydist.job.recovery.left_behind import is_left_behind

__all__ = ["LastOnes"]

# How long ranks may be stopped before somebody is told of them.
_WARN_AFTER_S = 5.0
# Who did not look for so long was stopped itself, or starved: what it saw before does not count.
_MOST_BETWEEN_LOOKS_S = 3.0


class LastOnes:
    """Looks at the processes that still run, and tells when none of them goes on.

    Those that the others have left behind are ended after a grace. One that is stopped may yet be
    let go on; as no other rank is left to miss it, it is ended after the time-out of operations.

    Args:
        store: The one that this process serves.
        grace_s: How long those that were left behind get: they may be ending yet.
        warn: Is told of stopped ranks, soon, and once.
    """

    def __init__(self, store: dist.Store, grace_s: float, warn: Callable[[str], None]) -> None:
        self._store = store
        self._grace_s = grace_s
        self._warn = warn
        self._stopped_limit_s = default_timeout().total_seconds()
        self._has_warned = False
        self._looked_s = 0.0
        self._alone_since_s: dict[bool, float] = {}  # by whether one of them is only stopped

    def why_to_end(self, running: Mapping[int, int], has_any_ended: bool) -> str | None:
        """Why nobody has to wait any longer; None while somebody has.

        Args:
            running: The numbers of the processes that run, by rank.
            has_any_ended: Whether any other rank has ended.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s > _MOST_BETWEEN_LOOKS_S:
            self._alone_since_s.clear()
        self._looked_s = now_s
        stopped: dict[int, int] = {}
        for rank, pid in running.items():
            if is_left_behind(self._store, pid):
                continue
            if not (has_any_ended and _is_stopped(pid)):
                self._alone_since_s.clear()
                return None
            stopped[rank] = pid
        since_s = self._alone_since_s.setdefault(bool(stopped), now_s)
        if not stopped:
            is_over = now_s - since_s >= self._grace_s
            return "the others have gone on without it" if is_over else None
        limit_s = self._stopped_limit_s
        if now_s - since_s > _WARN_AFTER_S and not self._has_warned:
            self._has_warned = True
            names = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in stopped.items())
            self._warn(
                f"no other rank runs any more, and {names} is stopped or frozen: let it go on "
                "(SIGCONT, or thaw its cgroup); otherwise it is ended after "
                f"{limit_s:g} s (PYDIST_TIMEOUT)"
            )
        return f"it was stopped for {limit_s:g} s" if now_s - since_s > limit_s else None


def _is_stopped(pid: int) -> bool:
    try:
        return status_of(pid).state == "T" or _native.is_frozen(pid)
    except OSError:
        return False
