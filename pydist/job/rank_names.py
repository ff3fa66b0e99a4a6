"""How messages name ranks."""

from collections.abc import Iterable, Sequence

__all__ = ["name_ranks", "who_said_what"]


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def who_said_what(said: Iterable[str]) -> str:
    """What each rank said, in rank order, as "a on ranks 0, 2; b on rank 1"."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(said):
        by_value.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
