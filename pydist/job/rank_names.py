"""How errors name ranks, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from pydist._native import Communicator


class Culprits(TypedDict):
    """Who is to blame for an error, as `pydist.errors.Error` takes it."""

    ranks: tuple[int, ...]
    host: str | None
    pid: int | None
    cause: str


def culprits(communicator: Communicator, ranks: Sequence[int], cause: str) -> Culprits:
    """Some ranks of a group, with the process of the first, as far as that is known.

    Args:
        communicator: The group.
        ranks: At least one.
        cause: What they did.
    """
    host, pid = communicator.place_of(ranks[0])
    return {"ranks": tuple(ranks), "host": host, "pid": pid, "cause": cause}


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def first_that_differs(said: Sequence[str]) -> int | None:
    """The first rank that said something else than rank 0; None if all said the same."""
    return next((rank for rank, each in enumerate(said) if each != said[0]), None)


def who_said_what(said: Iterable[str]) -> str:
    """What each rank said, in rank order, as "a on ranks 0, 2; b on rank 1"."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(said):
        by_value.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
