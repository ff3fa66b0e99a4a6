"""Faults on purpose, for programs that test their own recovery.

    from pydist.testing import faults

    with faults.inject(faults.Fault("kill", rank=1, step=3, phase="backward")):
        train()

kills rank 1 in the backward of its third training step. The same for a program as it is::

    PYDIST_FAULTS="kill rank=1 step=3 phase=backward" pydist run -n 2 train.py

Several faults stand one after the other, separated by ";". A program in which no fault is armed
does no work for this module, and does not import it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydist.errors import InvalidUsage
from pydist.testing.damage import Action
from pydist.testing.exhaustion import exhausted
from pydist.testing.places import KINDS, PHASES, Armed

__all__ = ["Fault", "InjectedError", "exhausted", "inject", "parse"]

_ACTIONS: tuple[str, ...] = get_args(Action)
# Receiving writes its tensor, and a barrier has none.
_NOTHING_TO_CORRUPT = ("barrier", "recv")


class InjectedError(RuntimeError):
    """What `raise` raises. Not a `pydist.Error`: it stands for an error of the program."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and where. What is left out may be anything.

    Args:
        action: What happens. "kill" ends the process by SIGKILL, "stop" stops it by SIGSTOP (until
            somebody continues it), "delay" sleeps, "raise" raises, "corrupt" damages data, and
            "exhaust-descriptors", "exhaust-threads" and "exhaust-memory" leave none of these to
            the process until `inject` ends. "corrupt" sets the first element of an operation's
            tensor, or of a gradient in backward, to NaN (integers: to its bitwise opposite); in
            "forward" and "step" it adds 1 to the first element of the first parameter, and in
            "checkpoint" it flips a bit of the file that this rank has written.
        rank: The rank in the world; default: every rank.
        step: The training step, from 1. A step ends with a step of the optimizer that was the first
            to step since the faults were armed.
        operation: A collective or message of pydist's public functions, by its name: "all_reduce".
            The fault strikes before it starts.
        number: Which one of that name, from 1, counted since the faults were armed.
        phase: "start-up" (the launcher's job is known, its group not yet made), "forward" (the
            beginning of a `DataParallel`'s), "backward" (when a gradient in the middle of the
            model is ready), "step" (the beginning of the optimizer's), or "checkpoint" (this rank
            has written its file of a checkpoint, and told nobody).
        seconds: For "delay": how long. For "kill" and "stop": how long after the place was reached;
            the process goes on meanwhile, so it is in an operation then, say. Default: 0.
        spare: For "exhaust-descriptors": how many are left. For "exhaust-memory": how many bytes.
        times: How often it strikes at most.
        error: What "raise" raises; default: an `InjectedError`.

    Raises:
        InvalidUsage: Something is unknown, or does not go together.

    Example:
        >>> Fault("delay", operation="all_reduce", number=2, seconds=0.5).where()
        'all_reduce number 2'
    """

    action: Action
    rank: int | None = None
    step: int | None = None
    operation: str | None = None
    number: int | None = None
    phase: str | None = None
    seconds: float = 0.0
    spare: int = 0
    times: int = 1
    error: BaseException | None = None

    def __post_init__(self) -> None:
        _require_known("action", self.action, _ACTIONS)
        if (self.operation is None) == (self.phase is None):
            raise InvalidUsage(
                f"a fault needs a place: either operation= ({', '.join(KINDS)}) or phase= "
                f"({', '.join(PHASES)}); got operation={self.operation!r}, phase={self.phase!r}."
            )
        if self.operation is not None:
            _require_known("operation", self.operation, KINDS)
        else:
            _require_known("phase", self.phase, PHASES)
        for name, least in (("rank", 0), ("step", 1), ("number", 1), ("spare", 0), ("times", 1)):
            _require_whole(name, getattr(self, name), least)
        self._require_together()

    def _require_together(self) -> None:
        if self.number is not None and self.operation is None:
            raise InvalidUsage(f"number={self.number} counts operations: pass operation= as well.")
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise InvalidUsage(f"seconds={self.seconds!r} is not valid; it must be 0 or more.")
        if self.action == "delay" and self.seconds == 0:
            raise InvalidUsage('Fault("delay") needs seconds=, how long it sleeps.')
        if self.seconds and self.action not in ("delay", "kill", "stop"):
            raise InvalidUsage(f"seconds= goes with delay, kill and stop, not with {self.action}.")
        if self.spare and self.action not in ("exhaust-descriptors", "exhaust-memory"):
            raise InvalidUsage(
                f"spare= goes with exhaust-descriptors and exhaust-memory, not with {self.action}."
            )
        if self.error is not None and self.action != "raise":
            raise InvalidUsage(f"error= goes with raise, not with {self.action}.")
        place = self.operation or self.phase
        if self.action == "corrupt" and place in (*_NOTHING_TO_CORRUPT, "start-up"):
            raise InvalidUsage(f"there is no data to corrupt in {place}.")

    def where(self) -> str:
        """The place, in words."""
        parts = [] if self.step is None else [f"step {self.step}"]
        parts.append(self.phase or self.operation or "")
        text = ", ".join(parts)
        return text if self.number is None else f"{text} number {self.number}"


def _require_known(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidUsage(f"{name}={value!r} is not known; use one of: {', '.join(known)}.")


def _require_whole(name: str, value: object, least: int) -> None:
    if value is None and name in ("rank", "step", "number"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidUsage(f"{name}={value!r} is not valid; it must be a whole number >= {least}.")


@contextlib.contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Arms faults in this process until the end of the block. Not to be nested.

    Every rank may call it with the same faults: each fault strikes on the ranks that it names.
    Processes that are forked meanwhile (workers of data loaders) are not struck.

    Args:
        faults: What goes wrong, and where.

    Raises:
        InvalidUsage: Faults are armed already.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> with inject(Fault("raise", operation="all_reduce", number=2)):
        ...     _ = pydist.all_reduce(torch.ones(1))
        ...     pydist.all_reduce(torch.ones(1))
        Traceback (most recent call last):
        ...
        pydist.testing.faults.InjectedError: raised on purpose in all_reduce number 2 on rank 0
    """
    armed = Armed(faults, InjectedError)
    armed.arm()
    try:
        yield
    finally:
        armed.disarm()


def parse(text: str) -> list[Fault]:
    """The faults in a text as PYDIST_FAULTS holds them.

    Args:
        text: Faults separated by ";". Each is an action and then `name=value`, with the names of
            `Fault` but for `error`, separated by spaces.

    Returns:
        The faults, in their order.

    Raises:
        InvalidUsage: The text can't be understood; the message names the fault in it.

    Example:
        >>> [fault.where() for fault in parse("kill rank=1 step=3 phase=backward")]
        ['step 3, backward']
    """
    return [_parse_one(part) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    action, *pairs = text.split()
    kinds = {each.name: each.type for each in dataclasses.fields(Fault)}
    values: dict[str, Any] = {}
    try:
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals or name in ("action", "error") or name not in kinds or name in values:
                names = ", ".join(each for each in kinds if each not in ("action", "error"))
                raise InvalidUsage(
                    f"{pair!r} is not understood; write name=value, once for each, with these "
                    f"names: {names}."
                )
            values[name] = _value(name, value, str(kinds[name]))
        return Fault(action, **values)  # type: ignore[arg-type]
    except InvalidUsage as error:
        raise InvalidUsage(f"PYDIST_FAULTS: in {text.strip()!r}: {error}") from None


def _value(name: str, text: str, kind: str) -> object:
    if kind.startswith("str"):
        return text
    try:
        return float(text) if kind == "float" else int(text)
    except ValueError:
        raise InvalidUsage(f"{name}={text!r} is not a number.") from None


def arm_for_good(text: str) -> None:
    """Arms the faults of PYDIST_FAULTS until the process ends."""
    Armed(parse(text), InjectedError).arm()
