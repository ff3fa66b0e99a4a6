"""Which rank lives on which host, and what a launcher would tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from namespaces import Host, Hosts


@dataclass(frozen=True)
class Place:
    """Where one rank lives."""

    rank: int
    host: Host
    variables: dict[str, str]


def place_ranks(hosts: Hosts, ranks_per_host: Sequence[int]) -> list[Place]:
    """The places of all ranks, in rank order: those of the first host come first.

    Args:
        hosts: at least as many as `ranks_per_host` has numbers.
        ranks_per_host: the number of ranks on each host, in the order of the hosts.

    Raises:
        ValueError: there are fewer hosts, or no ranks at all.
    """
    if len(ranks_per_host) > len(hosts) or sum(ranks_per_host) < 1:
        raise ValueError(
            f"ranks_per_host={list(ranks_per_host)} needs a rank or more, on no more hosts than "
            f"there are ({len(hosts)})"
        )
    places: list[Place] = []
    for host, count in zip(hosts, ranks_per_host, strict=False):
        for local_rank in range(count):
            rank = len(places)
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(sum(ranks_per_host)),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": hosts[0].address,
            }
            places.append(Place(rank, host, variables))
    return places
