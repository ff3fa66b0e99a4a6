"""Which ranks of the job are on which host, as the engine counts them."""

from pydist._native import Placement
from pydist.job import current

__all__ = ["Placement", "leaders_of", "placement_of_job"]


def placement_of_job() -> Placement:
    """That of the ranks of the job that this process has joined."""
    agreement = current.job.agreement
    assert agreement is not None  # the ranks have met
    return Placement(agreement.hosts)


def leaders_of(placement: Placement) -> list[int]:
    """The lowest rank of each host."""
    return [ranks[0] for ranks in placement.ranks_on]
