"""How long a collective takes, by algorithm, in the alpha-beta-gamma model. Pure arithmetic.

Every function takes the costs, the shape (h hosts with L ranks each, p = hL in all) and s, the
bytes of the whole tensor: what each rank puts into an all-reduce or a reduce-scatter, and gets from
an all-gather. All hosts and links are alike, all ranks come at the same moment, and the network
between the hosts carries whatever their links do.

The formulas of the ring and of recursive halving and doubling are those of R. Thakur, R.
Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19 (2005); the direct exchange is
the bucket algorithm's bytes (E. Chan, M. Heimlich, A. Purkayastha and R. van de Geijn, "Collective
communication: theory, practice, and experience", Concurrency and Computation 19, 2007) in one step,
on processors with many ports. The all-to-all and the all-gather in rounds are those of J. Bruck,
C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for all-to-all communications
in multiport message-passing systems", IEEE Transactions on Parallel and Distributed Systems 8
(1997).

Note [Stages]: A large exchange moves in chunks through stages: a reduce-scatter on the host, one
over the link, an all-gather over the link, one on the host. They use two things, the rank's
processor and the link, and while the one works on something, the other works on what is next. So
the busier of the two decides. What the other does before the first message, and after the last,
comes on top: for the stages on the host a chunk, for the rest a message of it.

    link decides:       link + host / chunks + messages / (chunks (h-1))
    processor decides:  host + messages + link / (chunks (h-1))

where *link* is its time for all bytes, and *host* and *messages* are the processor's for the stages
on the host and for sending, receiving and combining. The larger of the two is the time, beside the
delays. A chunk is as large as gives messages of `message_bytes`. An exchange that is too small
for two chunks has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydist.planning.costs import Costs

# Of one rank's data, which then travels with its announcement (csrc/collectives/group_segment.h).
INLINE_BYTES = 256
# Of an announcement without data.
ANNOUNCEMENT_BYTES = 64
# From how many hosts on ranks talk in rounds, and the largest all-reduce that goes so, for each
# host and at most (PYDIST_ROUNDS_FROM and PYDIST_ROUNDS_BYTES, as they are between machines).
ROUNDS_FROM = 32
ROUNDS_BYTES_OF_A_HOST = 4 << 10
ROUNDS_BYTES = 256 << 10
# Of the lanes of a host (collective_lanes() in csrc/transport/lane_segment.h): bytes of all
# together, slots of each, bytes of a slot at least and, with chunks as they are by default, at
# most, and the share of one that a part fills (Cut in csrc/collectives/between_hosts/segments.h).
_LANES_BYTES = 4 << 30
_SLOTS = 8
_LEAST_SLOT_BYTES = 4 << 10
_MOST_SLOT_BYTES = 544 << 10
_FILLED = 16 / 17

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True)
class Shape:
    """How many hosts there are, and ranks on each."""

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.ranks_per_host}"


def message_bytes(shape: Shape, *, is_all_reduce: bool = True) -> float:
    """Of a message of a large exchange between hosts, where there are as many bytes.

    The lanes of a host share an address space. In an all-reduce of hosts with several ranks a slot
    takes a message for each host (csrc/collectives/between_hosts).
    """
    lanes = 2 * shape.ranks_per_host * shape.ranks
    slot = min(max(_LANES_BYTES / lanes / _SLOTS, _LEAST_SLOT_BYTES), _MOST_SLOT_BYTES)
    in_slot = shape.hosts if shape.ranks_per_host > 1 and is_all_reduce else 1
    return slot * _FILLED / in_slot


Time = Callable[[Costs, Shape, float], float]


# ---- on one host ----------------------------------------------------------------------------


def host_inline(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce of what travels in the posts: alpha, and (L-1) s gamma."""
    host, others = costs.host, shape.ranks_per_host - 1
    return host.alpha_s + others * size_bytes * host.gamma_s_per_byte if others else 0.0


def host_one_shot(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce in which each rank shows all it has and reads all others.

    alpha + s beta + (L-1) s gamma.
    """
    if shape.ranks_per_host == 1:
        return 0.0
    return host_inline(costs, shape, size_bytes) + size_bytes * costs.host.beta_s_per_byte


def host_pipelined(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce of ordinary tensors through transit memory: 2 alpha + 2 s beta + (L-1)/L s gamma.

    A rank copies all it has there, combines its slice, and copies the result from there.
    """
    if shape.ranks_per_host == 1:
        return 0.0
    copies = 2 * size_bytes * costs.host.beta_s_per_byte
    return 2 * costs.host.alpha_s + copies + _host_combining(costs, shape, size_bytes)


def host_symmetric(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce on the symmetric heap, where gradients are: 2 alpha + (L-1)/L s (beta + gamma).

    The owner of a slice reads it from all ranks, and writes it to all.
    """
    return host_reduce_scatter(costs, shape, size_bytes) + host_all_gather(costs, shape, size_bytes)


def host_reduce_scatter(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """On the symmetric heap: alpha + (L-1)/L s gamma."""
    if shape.ranks_per_host == 1:
        return 0.0
    return costs.host.alpha_s + _host_combining(costs, shape, size_bytes)


def host_all_gather(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """On the symmetric heap: alpha + (L-1)/L s beta."""
    if shape.ranks_per_host == 1:
        return 0.0
    return costs.host.alpha_s + _host_copying(costs, shape, size_bytes)


def _host_combining(costs: Costs, shape: Shape, size_bytes: float) -> float:
    return _others(shape.ranks_per_host) * size_bytes * costs.host.gamma_s_per_byte


def _host_copying(costs: Costs, shape: Shape, size_bytes: float) -> float:
    return _others(shape.ranks_per_host) * size_bytes * costs.host.beta_s_per_byte


def _others(count: int) -> float:
    return (count - 1) / count


# ---- between hosts --------------------------------------------------------------------------


def inline(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce, or all-gather, of up to INLINE_BYTES a rank, which travel with the announcements.

    Each rank tells its counterpart on each of the h-1 other hosts, which shows it to its
    neighbours: alpha + (h-1) o + L (h-1) (s + ANNOUNCEMENT_BYTES) beta + (p-1) s gamma, and alpha
    within the host.
    """
    if shape.hosts == 1:
        return host_inline(costs, shape, size_bytes)
    link = costs.link
    others = shape.hosts - 1
    sent = shape.ranks_per_host * others * (size_bytes + ANNOUNCEMENT_BYTES)
    link_s = sent * link.beta_s_per_byte
    combine_s = (shape.ranks - 1) * size_bytes * link.gamma_s_per_byte
    return link.alpha_s + others * link.message_s + link_s + combine_s + _meeting(costs, shape)


def one_shot(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce in which each rank sends all it has to each other host, and combines all p inputs.

    As `inline`, and the bytes a rank sends and receives: (h-1) s of its processor; the copy that
    its neighbours read: s beta of the host.
    """
    if shape.hosts == 1:
        return host_one_shot(costs, shape, size_bytes)
    driven_s = (shape.hosts - 1) * size_bytes * costs.link.rank_s_per_byte
    shown_s = size_bytes * costs.host.beta_s_per_byte if shape.ranks_per_host > 1 else 0.0
    return inline(costs, shape, size_bytes) + driven_s + shown_s


def inline_in_rounds(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """As `inline`, but passed on from host to host: log2(h) messages one after the other.

    log2(h) (alpha + o) in place of alpha + (h-1) o; the same bytes.
    """
    return _passed_on(costs, shape, inline(costs, shape, size_bytes))


def one_shot_in_rounds(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """As `one_shot`, in log2(h) messages as `inline_in_rounds`."""
    return _passed_on(costs, shape, one_shot(costs, shape, size_bytes))


def _passed_on(costs: Costs, shape: Shape, direct_s: float) -> float:
    link, rounds = costs.link, _rounds(shape)
    saved_messages = shape.hosts - 1 - rounds
    return direct_s - saved_messages * link.message_s + max(0, rounds - 1) * link.alpha_s


def in_rounds(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce by an all-to-all and an all-gather in rounds, between hosts of one rank each.

    2 log2 h (alpha + o) + b (beta or, if more, the processor's time for a byte) + (h-1)/h s gamma,
    where b, what each rank sends, is `bytes_in_rounds`. A round is over before the next one begins.
    """
    link = costs.link
    byte_s = max(link.beta_s_per_byte, link.rank_s_per_byte)
    combine_s = _others(shape.hosts) * size_bytes * link.gamma_s_per_byte
    delays = 2 * _rounds(shape) * (link.alpha_s + link.message_s)
    return delays + bytes_in_rounds(shape, size_bytes) * byte_s + combine_s


def bytes_in_rounds(shape: Shape, size_bytes: float) -> float:
    """What each rank sends in `in_rounds`, with announcements: about (log2(h)/2 + (h-1)/h) s.

    A block that goes d ranks far is sent on as often as d has bits.
    """
    hops = sum(places.bit_count() for places in range(shape.hosts))
    announced = (shape.hosts - 1) * ANNOUNCEMENT_BYTES
    return (hops / shape.hosts + _others(shape.hosts)) * size_bytes + announced


def _rounds(shape: Shape) -> int:
    return (shape.hosts - 1).bit_length()


def direct_exchange(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce by a reduce-scatter and an all-gather, each in one step between the hosts.

    Within a host, each rank reduces its L-th part of the tensor. It sends to its counterpart on
    each other host that one's h-th of the part, combines what arrives, and sends the sum back to
    all. So the link carries 2 (h-1)/h s bytes each way, however many ranks drive it. Delays: 2
    alpha, and 2 alpha within the host; from ROUNDS_FROM hosts on log2(h) (alpha + o) to announce it
    in rounds. See Note [Stages] for the rest:

        link:       2 (h-1)/h s beta
        processor:  2 (h-1) o for each chunk, (h-1)/h s/L (gamma + 2 times its time for a byte),
                    (L-1)/L s (beta + gamma) of the host
    """
    return _direct(costs, shape, size_bytes, reduces=True, gathers=True)


def direct_reduce_scatter(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """The first half of the direct exchange: alpha, and (h-1)/h s bytes over the link each way."""
    return _direct(costs, shape, size_bytes, reduces=True, gathers=False)


def direct_all_gather(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """The second half of the direct exchange: alpha, and (h-1)/h s bytes over the link each way."""
    return _direct(costs, shape, size_bytes, reduces=False, gathers=True)


def _direct(
    costs: Costs, shape: Shape, size_bytes: float, *, reduces: bool, gathers: bool
) -> float:
    link = costs.link
    if shape.hosts == 1:
        reduce_s = host_reduce_scatter(costs, shape, size_bytes) if reduces else 0.0
        return reduce_s + (host_all_gather(costs, shape, size_bytes) if gathers else 0.0)
    halves = reduces + gathers
    other_hosts = shape.hosts - 1
    # Of one half: what the link carries each way, and what one of its ranks drives.
    carried = _others(shape.hosts) * size_bytes
    driven = carried / shape.ranks_per_host
    largest = message_bytes(shape, is_all_reduce=reduces and gathers)
    chunks = max(1.0, size_bytes / (shape.ranks * largest))
    messages_s = halves * (other_hosts * chunks * link.message_s + driven * link.rank_s_per_byte)
    host_s = 0.0
    if reduces:
        messages_s += driven * link.gamma_s_per_byte
        host_s += _host_combining(costs, shape, size_bytes)
    if gathers:
        host_s += _host_copying(costs, shape, size_bytes)
    announced = shape.ranks_per_host * other_hosts * ANNOUNCEMENT_BYTES
    delays = halves * (link.alpha_s + _meeting(costs, shape)) + announced * link.beta_s_per_byte
    if shape.hosts >= ROUNDS_FROM:
        delays += _rounds(shape) * (link.alpha_s + link.message_s)
    link_s = halves * carried * link.beta_s_per_byte
    return delays + pipelined(link_s, host_s, messages_s, chunks, chunks * other_hosts)


def pipelined(
    link_s: float, host_s: float, messages_s: float, chunks: float, messages: float
) -> float:
    """What a link and a processor take that work at the same time: see Note [Stages]."""
    return max(
        link_s + host_s / chunks + messages_s / messages,
        host_s + messages_s + link_s / messages,
    )


def _meeting(costs: Costs, shape: Shape) -> float:
    return costs.host.alpha_s if shape.ranks_per_host > 1 else 0.0


# ---- for comparison -------------------------------------------------------------------------


def ring(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce around all p ranks: 2 (p-1) alpha + 2 (p-1)/p s beta + (p-1)/p s gamma.

    The ranks of a host follow each other, so one rank of each host sends over the link.
    """
    if shape.ranks == 1:
        return 0.0
    delay_s, byte_s, gamma_s = _step(costs, over_link=shape.hosts > 1)
    part = _others(shape.ranks) * size_bytes
    return 2 * (shape.ranks - 1) * delay_s + 2 * part * byte_s + part * gamma_s


def halving_doubling(costs: Costs, shape: Shape, size_bytes: float) -> float:
    """All-reduce by recursive halving and doubling.

    2 log2 p alpha + 2 (p-1)/p s beta + (p-1)/p s gamma, where p is a power of two.
    Neighbours come first, so that L ranks send over a link only once each has an L-th. A number of
    hosts (or ranks of one) that is no power of two leaves some out: each of those hands all it has
    to one that stays, before, and gets all back, after.
    """
    total_s = 0.0
    for count, over_link in ((shape.ranks_per_host, False), (shape.hosts, True)):
        delay_s, byte_s, gamma_s = _step(costs, over_link=over_link)
        steps = int(math.log2(count))
        within = 2**steps
        # Over the link, L ranks send an L-th each: together as much as one of all.
        part = _others(within) * size_bytes
        combined = part / shape.ranks_per_host if over_link else part
        total_s += 2 * steps * delay_s + 2 * part * byte_s + combined * gamma_s
        if within < count:
            total_s += 2 * (delay_s + size_bytes * byte_s) + size_bytes * gamma_s
    return total_s


def _step(costs: Costs, *, over_link: bool) -> tuple[float, float, float]:
    """Of one message: seconds however small, for a byte, and for a byte that is combined."""
    if not over_link:
        return costs.host.alpha_s, costs.host.beta_s_per_byte, costs.host.gamma_s_per_byte
    link = costs.link
    byte_s = max(link.beta_s_per_byte, link.rank_s_per_byte)
    return link.alpha_s + link.message_s, byte_s, link.gamma_s_per_byte


# ---- which one ------------------------------------------------------------------------------

HOST_WAYS: dict[str, Time] = {
    "host inline": host_inline,
    "host one shot": host_one_shot,
    "host pipelined": host_pipelined,
    "host symmetric": host_symmetric,
}
# Of an all-reduce between hosts. The ring, halving and doubling are for comparison.
WAYS: dict[str, Time] = {
    "inline": inline,
    "one shot": one_shot,
    "inline in rounds": inline_in_rounds,
    "one shot in rounds": one_shot_in_rounds,
    "in rounds": in_rounds,
    "direct exchange": direct_exchange,
    "ring": ring,
    "halving and doubling": halving_doubling,
}


def seconds(
    collective: Collective, costs: Costs, shape: Shape, size_bytes: float, way: str = "auto"
) -> float:
    """What a collective takes.

    Args:
        collective: Which.
        costs: Of messages and bytes.
        shape: Of the job.
        size_bytes: Of the whole tensor.
        way: Of an all-reduce: a name in WAYS or HOST_WAYS. "auto": up to INLINE_BYTES those that
            travel with announcements; beyond that the faster of one shot and the direct exchange,
            or in rounds where that takes its place. On one host, buffers are in the symmetric heap.
    """
    if shape.ranks == 1:
        return 0.0
    if way != "auto":
        return {**WAYS, **HOST_WAYS}[way](costs, shape, size_bytes)
    if collective == "reduce_scatter":
        return direct_reduce_scatter(costs, shape, size_bytes)
    if collective == "all_gather":
        return direct_all_gather(costs, shape, size_bytes)
    return WAYS[_way_of(costs, shape, size_bytes)](costs, shape, size_bytes)


def _way_of(costs: Costs, shape: Shape, size_bytes: float) -> str:
    """Which way an all-reduce takes."""
    talks_in_rounds = shape.hosts >= ROUNDS_FROM
    announced = " in rounds" if talks_in_rounds else ""
    if size_bytes <= INLINE_BYTES:
        return "inline" + announced
    most_bytes = min(shape.hosts * ROUNDS_BYTES_OF_A_HOST, ROUNDS_BYTES)
    goes_in_rounds = talks_in_rounds and shape.ranks_per_host == 1 and size_bytes <= most_bytes
    ways = ["one shot" + announced, "in rounds" if goes_in_rounds else "direct exchange"]
    return min(ways, key=lambda way: WAYS[way](costs, shape, size_bytes))


def link_bytes(
    collective: Collective, costs: Costs, shape: Shape, size_bytes: float, way: str = "auto"
) -> float:
    """What `seconds` has a host's link carry, each way."""
    if shape.hosts == 1:
        return 0.0
    others = shape.ranks_per_host * (shape.hosts - 1)
    announced = others * ANNOUNCEMENT_BYTES
    carried = _others(shape.hosts) * size_bytes
    if collective != "all_reduce":
        return announced + carried
    if way == "auto":
        way = _way_of(costs, shape, size_bytes)
    if way.startswith(("inline", "one shot")):
        return announced + others * size_bytes
    if way == "in rounds":
        return bytes_in_rounds(shape, size_bytes)
    if way == "direct exchange":
        return announced + 2 * carried
    # Of a ring one rank of each host sends; halving and doubling sends a little less.
    return 2 * _others(shape.ranks if way == "ring" else shape.hosts) * size_bytes
