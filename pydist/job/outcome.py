"""What ranks tell each other about a call that all have made: whether it succeeded everywhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pydist.errors import InvalidUsage

if TYPE_CHECKING:
    from pydist._native import Communicator


class Outcome(NamedTuple):
    """How a call went on one rank.

    Attributes:
        error: The class of what it has raised; empty if nothing.
        text: What that says.
        is_usage: Whether the call itself was wrong.
        facts: What else the rank has told.
    """

    error: str
    text: str
    is_usage: bool
    facts: Any

    @property
    def said(self) -> str:
        """The error for people; empty if there is none."""
        return f"{self.error}: {self.text}" if self.error else ""


def exchange(
    communicator: Communicator, mine: bytes, label: str, *, timeout: float | None = None
) -> list[bytes]:
    """Some bytes of each rank, in rank order, of any length. All ranks call it.

    Args:
        communicator: The ranks.
        mine: What this one tells.
        label: What the user called, for the errors of ranks that wait for those that did not.
        timeout: Seconds that it may take; by default as in the group.
    """
    if communicator.size == 1:
        return [mine]
    cpu = torch.device("cpu")  # whatever torch's default is
    lengths = torch.empty(communicator.size, dtype=torch.int64, device=cpu)
    own = torch.tensor([len(mine)], device=cpu)
    communicator.all_gather(own, lengths, label=label, timeout=timeout)
    sizes: list[int] = lengths.tolist()
    gathered = torch.empty(sum(sizes), dtype=torch.uint8, device=cpu)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else gathered[:0]
    communicator.all_gather(sent, list(gathered.split(sizes)), label=label, timeout=timeout)
    return [part.numpy().tobytes() for part in gathered.split(sizes)]


def outcomes(
    communicator: Communicator,
    label: str,
    error: BaseException | None,
    facts: Any = None,
    *,
    timeout: float | None = None,
) -> list[Outcome]:
    """How a call went on each rank, in rank order. All ranks call it.

    Args:
        communicator: The ranks.
        label: As for `exchange`.
        error: What this rank has raised; None if nothing.
        facts: What else it tells, as JSON takes it.
        timeout: As for `exchange`.
    """
    mine = Outcome("", "", False, facts)
    if error is not None:
        mine = Outcome(type(error).__name__, str(error), isinstance(error, InvalidUsage), facts)
    told = exchange(communicator, json.dumps(mine).encode(), label, timeout=timeout)
    return [Outcome(*json.loads(each)) for each in told]


def failed(everybody: Sequence[Outcome]) -> list[int]:
    """The ranks that have raised something."""
    return [rank for rank, outcome in enumerate(everybody) if outcome.error]


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether an exception comes out of a handler of signals, and not from what was under way."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    # A function, a method or an object.
    functions = [getattr(each, "__func__", each) for each in handlers if callable(each)]
    codes = [
        getattr(each, "__code__", None) or getattr(type(each).__call__, "__code__", None)
        for each in functions
    ]
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
