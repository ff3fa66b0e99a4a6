"""Which ranks are on which host, as the engine counts them (csrc/topology/placement.h)."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydist.job import current

__all__ = ["Placement", "placement_of", "placement_of_job"]


@dataclass(frozen=True)
class Placement:
    """The ranks of a group on their hosts.

    Attributes:
        host_of: The number of each rank's host, in rank order. Hosts are numbered by their lowest
            rank.
        ranks_on: The ranks of each host, in ascending order. The first is the host's leader.
    """

    host_of: tuple[int, ...]
    ranks_on: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.host_of)

    @property
    def hosts(self) -> int:
        return len(self.ranks_on)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The leader of each host."""
        return tuple(ranks[0] for ranks in self.ranks_on)

    @property
    def least_on_a_host(self) -> int:
        """The least number of ranks on a host."""
        return min(map(len, self.ranks_on))

    def counterpart(self, rank: int, host: int) -> int:
        """The rank of another host that hears what `rank` has for all ranks there."""
        index = self.ranks_on[self.host_of[rank]].index(rank)
        return self.ranks_on[host][index % len(self.ranks_on[host])]


def placement_of(identities: Sequence[str]) -> Placement:
    """The placement that follows from the identity of each rank's host, in rank order."""
    numbers: dict[str, int] = {}
    host_of = tuple(numbers.setdefault(each, len(numbers)) for each in identities)
    ranks_on = tuple(
        tuple(rank for rank, its in enumerate(host_of) if its == host)
        for host in range(len(numbers))
    )
    return Placement(host_of, ranks_on)


def placement_of_job() -> Placement:
    """That of the ranks of the job that this process has joined."""
    agreement = current.job.agreement
    assert agreement is not None  # the ranks have met
    return placement_of(agreement.hosts)
