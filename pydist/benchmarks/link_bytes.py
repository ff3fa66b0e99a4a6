"""What a collective of the native engine has to send between hosts. Pure arithmetic.

The ways and their limits are those of the table in docs/network.md, for p ranks on h hosts and s
bytes of a rank's buffer. Announcements and what stays inside a host are left out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pydist import _native
from pydist.benchmarks.collective_cases import Case
from pydist.topology.placement import Placement

__all__ = ["Sent", "Settings", "busiest_host", "sent_between_hosts"]

_OF_SPEAKERS = ("reduce_scatter", "reduce", "all_gather", "broadcast")
_OF_RINGS = ("all_reduce", "reduce_scatter", "all_gather")


class Sent(NamedTuple):
    """What one rank sends to another one, on another host, in all."""

    sender: int
    receiver: int
    size_bytes: float


@dataclass(frozen=True)
class Settings:
    """What the way depends on beside the case.

    Attributes:
        chunk_bytes: PYDIST_CHUNK_BYTES.
        one_shot_bytes: PYDIST_ONE_SHOT_BYTES; None where it is not set.
        is_ring: Whether PYDIST_ALGORITHM says ring.
    """

    chunk_bytes: int = 512 << 10
    one_shot_bytes: int | None = None
    is_ring: bool = False


def sent_between_hosts(case: Case, placement: Placement, settings: Settings) -> list[Sent]:
    """What each rank sends to each one of another host; nothing for a barrier, or on one host."""
    found: dict[tuple[int, int], float] = {}
    host_of = placement.host_of
    for each in _ways(case, placement, settings):
        if host_of[each.sender] != host_of[each.receiver] and each.size_bytes:
            pair = each.sender, each.receiver
            found[pair] = found.get(pair, 0) + each.size_bytes
    return [Sent(sender, receiver, size) for (sender, receiver), size in found.items()]


def busiest_host(sent: Iterable[Sent], placement: Placement) -> float:
    """Bytes that the host with the most to do sends to others, or receives if that is more."""
    out, into = [0.0] * placement.hosts, [0.0] * placement.hosts
    host_of = placement.host_of
    for each in sent:
        out[host_of[each.sender]] += each.size_bytes
        into[host_of[each.receiver]] += each.size_bytes
    return max(*out, *into)


def _ways(case: Case, placement: Placement, settings: Settings) -> Iterator[Sent]:
    name = case.collective
    if name == "barrier":
        return
    if name == "send_recv":
        for rank in range(case.ranks):
            yield Sent(rank, (rank + 1) % case.ranks, case.size_bytes)
    elif settings.is_ring and name in _OF_RINGS:
        rounds = 2 if name == "all_reduce" else 1
        each = rounds * (case.ranks - 1) / case.ranks * case.size_bytes
        for rank in range(case.ranks):
            yield Sent(rank, (rank + 1) % case.ranks, each)
    elif max(_contributed(case)) <= _native.sent_ahead_limit(
        name, case.ranks, settings.chunk_bytes, settings.one_shot_bytes
    ):
        yield from _one_shot(case, placement)
    elif name == "all_reduce" and placement.ranks > placement.hosts:
        yield from _by_hosts(case, placement)
    elif name in _OF_SPEAKERS and placement.ranks > placement.hosts:
        yield from _by_speakers(case, placement)
    else:
        yield from _exchange(case)


def _contributed(case: Case) -> list[int]:
    """The bytes that each rank has for others."""
    own = case.sent * case.torch_dtype.itemsize
    if case.collective in ("broadcast", "scatter"):
        return [own if rank == case.root else 0 for rank in range(case.ranks)]
    if case.collective in ("reduce", "gather"):
        return [0 if rank == case.root else own for rank in range(case.ranks)]
    return [own] * case.ranks


def _one_shot(case: Case, placement: Placement) -> Iterator[Sent]:
    """All that a rank has goes to one rank of each other host."""
    host_of = placement.host_of
    for rank, size_bytes in enumerate(_contributed(case)):
        for host in range(placement.hosts):
            if host != host_of[rank]:
                yield Sent(rank, placement.counterpart(rank, host), size_bytes)


def _by_hosts(case: Case, placement: Placement) -> Iterator[Sent]:
    """As many lanes as the host with the fewest ranks has; in each, hosts exchange their sums.

    A host sends the others the sums of their pieces, and then the result of its own.
    """
    lanes = placement.least_on_a_host
    each = 2 * case.size_bytes / lanes / placement.hosts
    for lane in range(lanes):
        drivers = [ranks[lane] for ranks in placement.ranks_on]
        yield from (Sent(one, other, each) for one in drivers for other in drivers)


def _by_speakers(case: Case, placement: Placement) -> Iterator[Sent]:
    """What a host has to say of a rank's block crosses once, by the rank's counterpart there."""
    for rank in range(case.ranks):
        if case.collective in ("reduce", "broadcast"):
            block: float = case.size_bytes if rank == case.root else 0
        else:
            block = case.size_bytes / case.ranks
        for host in range(placement.hosts):
            speaker = placement.counterpart(rank, host)
            reduces = case.collective in ("reduce_scatter", "reduce")
            yield Sent(speaker, rank, block) if reduces else Sent(rank, speaker, block)


def _exchange(case: Case) -> Iterator[Sent]:
    """Each rank sends every other one what that one needs."""
    block = case.size_bytes / case.ranks
    for sender in range(case.ranks):
        for receiver in range(case.ranks):
            if sender != receiver:
                yield Sent(sender, receiver, _needed(case, sender, receiver, block))


def _needed(case: Case, sender: int, receiver: int, block: float) -> float:
    name = case.collective
    if name == "all_reduce":
        return 2 * block  # a slice to be reduced, and the result of the sender's own
    if name == "broadcast":
        return case.size_bytes if sender == case.root else 0
    if name == "reduce":
        return case.size_bytes if receiver == case.root else 0
    if name == "scatter":
        return block if sender == case.root else 0
    if name == "gather":
        return block if receiver == case.root else 0
    return block
