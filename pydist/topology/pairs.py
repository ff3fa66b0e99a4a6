"""Which pairs of hosts are measured, and which of them at the same time. Pure arithmetic."""

from typing import Literal, NamedTuple

__all__ = ["MOST_HOSTS_IN_PAIRS", "Pair", "Plan", "plan_for"]

# Beyond, all pairs would take more than some seconds.
MOST_HOSTS_IN_PAIRS = 6

# The numbers of two hosts. The first leads.
Pair = tuple[int, int]


class Plan(NamedTuple):
    """What is measured, in turns that follow each other.

    Attributes:
        covers: "all pairs", each in a turn of its own, so that nothing else is on the network; or
            "ring": each host with the next one, and the last with the first.
        turns: The pairs of each turn. No host is in two pairs of one turn.
    """

    covers: Literal["all pairs", "ring"]
    turns: tuple[tuple[Pair, ...], ...]


def plan_for(hosts: int) -> Plan:
    """All pairs of up to MOST_HOSTS_IN_PAIRS hosts, and of more a ring of them.

    The ring is done in two turns, or three where the number of hosts is odd, however many there
    are. Pairs of a turn share what the network between them shares.

    Args:
        hosts: How many there are, 1 or more.
    """
    if hosts <= MOST_HOSTS_IN_PAIRS:
        pairs = [(one, other) for one in range(hosts) for other in range(one + 1, hosts)]
        return Plan("all pairs", tuple((pair,) for pair in pairs))
    even = tuple((host, host + 1) for host in range(0, hosts - 1, 2))
    odd = tuple((host, host + 1) for host in range(1, hosts - 1, 2))
    closing = ((0, hosts - 1),)
    return Plan("ring", (even, odd + closing) if hosts % 2 == 0 else (even, odd, closing))
