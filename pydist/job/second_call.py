"""What a second call of `pydist.init` may ask for: what the first one did."""

from datetime import timedelta

from pydist import _native
from pydist.config import in_force
from pydist.config.config import Config
from pydist.config.variables import parse_backend
from pydist.errors import InvalidUsage
from pydist.gpu import selection
from pydist.job import current
from pydist.job.current import Membership
from pydist.job.launchers import read_placement


def require_same(
    running: Membership,
    backend: str | None,
    timeout: timedelta | None,
    processes: int | None,
    gpus: "selection.Gpus | None",
    configuration: Config | None,
) -> None:
    """Raises InvalidUsage where a job that runs has another setting than one that is asked for.

    What else a configuration says is in force from then on.
    """
    if processes not in (None, running.world_size):
        raise InvalidUsage(
            f"the job runs with {running.world_size} rank(s) already, so processes={processes} "
            "can't be had now: give it in the first call of pydist.init(), which comes before the "
            "first pydist.DataParallel."
        )
    _require_same_gpus(gpus)
    if backend is not None:
        wanted = parse_backend(backend, "backend=")
        if wanted not in ("auto", running.backend):
            raise InvalidUsage(
                f"pydist runs on backend '{running.backend}' already, so backend='{wanted}' can't "
                "be had now; ask for it in the first call, or call pydist.shutdown() before."
            )
    require_timeout(
        running.communicator,
        timeout,
        "pydist runs",
        "give it in the first call of pydist.init(), which comes before the first "
        "pydist.DataParallel, set PYDIST_TIMEOUT, or call pydist.shutdown() before.",
    )
    in_force.change(configuration, running.communicator.timeout, running.backend)


def _require_same_gpus(gpus: "selection.Gpus | None") -> None:
    if gpus is None:
        return
    from pydist.job.own_ranks import has_started_ranks  # not at import: few need it

    # Rank 0 that has started the others has variables like those of a launcher.
    if read_placement().launcher != "no launcher" and not has_started_ranks():
        return  # a launcher chooses them
    first = current.job.gpus
    if first is None or not first.is_of(gpus):
        had = "without gpus=" if first is None else f"with gpus={first.asked!r}"
        raise InvalidUsage(
            f"the job runs {had} already, so gpus={gpus!r} can't be had now: give it in the first "
            "call of pydist.init(), which comes before the first pydist.DataParallel."
        )


def require_timeout(
    running: _native.Communicator, wanted: timedelta | None, what: str, remedy: str
) -> None:
    """Raises InvalidUsage where a group that runs has another time-out than the one asked for."""
    # The engine counts in milliseconds.
    if wanted is not None and abs(wanted.total_seconds() - running.timeout) >= 0.001:
        raise InvalidUsage(
            f"{what} with a time-out of {running.timeout:g} s already, so timeout="
            f"{wanted.total_seconds():g} can't be had now: {remedy}"
        )
