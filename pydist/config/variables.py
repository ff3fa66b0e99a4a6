"""The `PYDIST_` variables; what a user says of backends and time-outs, there and in arguments."""

import contextlib
import difflib
import numbers
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta

from pydist import _native
from pydist.errors import Error, InvalidUsage


def valid_backends() -> tuple[str, ...]:
    """The values of PYDIST_BACKEND and of `pydist.init(backend=)`."""
    for name, values, *_ in _native.environment_variables():
        if name == "PYDIST_BACKEND":
            return tuple(value.strip() for value in values.split("|"))
    raise Error("the engine declares no PYDIST_BACKEND: pydist and its engine differ in version.")


@contextlib.contextmanager
def environment_with(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Sets variables, or removes them (None), and then gives them back what they had before."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def unknown_variables() -> list[tuple[str, str]]:
    """Set variables that start with PYDIST_ and are not declared, with the nearest name that is.

    A misspelt setting must not pass for an accepted one.
    """
    declared = [name for name, *_ in _native.environment_variables()]
    unknown = [name for name in os.environ if name.startswith("PYDIST_") and name not in declared]
    return [(name, difflib.get_close_matches(name, declared, 1, cutoff=0)[0]) for name in unknown]


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


def default_timeout() -> timedelta:
    """PYDIST_TIMEOUT, or what stands for it."""
    return timedelta(seconds=_native.read_environment().timeout)


def parse_timeout(timeout: float | timedelta) -> timedelta:
    """A time-out as users give it: a timedelta, or seconds.

    Raises:
        InvalidUsage: it is neither, not positive, or longer than ten years.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < 3.2e8):
        raise InvalidUsage(
            f"timeout={timeout!r} is not valid; it must be a number of seconds > 0, or a timedelta."
        )
    return timedelta(seconds=float(seconds))
