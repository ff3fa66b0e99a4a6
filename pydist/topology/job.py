"""What the ranks of a job tell each other of where they are, and the links that they measure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import pydist
from pydist import _native
from pydist.job import current
from pydist.job.backend_choice import Agreement
from pydist.topology.host import HostFacts, describe_host
from pydist.topology.interfaces import Told, interfaces_with, list_interfaces, told_in_job
from pydist.topology.links import Link, measure_link
from pydist.topology.pairs import plan_for
from pydist.topology.placement import Placement, leaders_of, placement_of_job
from pydist.topology.processors import numa_nodes

__all__ = ["JobTopology", "RankFacts", "collect_job"]


@dataclass(frozen=True)
class RankFacts:
    """One rank of a job.

    Attributes:
        rank: Its number.
        local_rank: Among the ranks of its host.
        pid: Of its process.
        cores: The numbers of the processors that it may run on.
        nodes: The numbers of the NUMA nodes that these are in.
        gpu: The number of the GPU that it takes, of those that it sees; None without one.
        addresses: Those that other hosts are told to connect to; none where there are no others.
        interfaces: The names of the interfaces that have them.
        reason: Why these, for people.
    """

    rank: int
    local_rank: int
    pid: int
    cores: tuple[int, ...]
    nodes: tuple[int, ...]
    gpu: int | None
    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class JobTopology:
    """A job and what is under it; the same on every rank.

    Attributes:
        placement: Which ranks are on which host.
        hosts: Each host, as its leader sees it.
        ranks: Each rank.
        backend: What carries the job's data, and `host_backend` its tensors on the CPU.
        host_backend: See `backend`.
        reason: Why that one, for people.
        covers: Which links were measured: "all pairs" or "ring".
        links: What was measured between hosts.
        sockets: Connections that each end makes to another process; None on another backend than
            native, or where the engine chooses by machine (PYDIST_SOCKETS).
    """

    placement: Placement
    hosts: tuple[HostFacts, ...]
    ranks: tuple[RankFacts, ...]
    backend: str
    host_backend: str
    reason: str
    covers: str
    links: tuple[Link, ...]
    sockets: int | None


def collect_job() -> JobTopology:
    """Describes the job that this process has joined. Every rank calls it, on any backend.

    Returns:
        The same on every rank.

    Raises:
        PeerLost: A rank has died, or its host can't be reached any more.
        Timeout: A rank did not come, or a message took longer than the job's time-out.
    """
    agreement = current.job.agreement
    assert agreement is not None  # the ranks have met
    placement = placement_of_job()
    rank = pydist.rank()
    own = _describe_rank(agreement, told_in_job(agreement))
    host = describe_host() if rank in leaders_of(placement) else None
    told: list[tuple[RankFacts, HostFacts | None]] = _tell_all((own, host))
    links, covers = _measure_links(placement)
    return JobTopology(
        placement,
        tuple(facts for _, facts in told if facts is not None),
        tuple(facts for facts, _ in told),
        agreement.backend,
        agreement.host_backend,
        agreement.reason,
        covers,
        links,
        _native.read_environment().sockets if agreement.host_backend == "native" else None,
    )


def _tell_all(mine: Any) -> list[Any]:
    told: list[Any] = [None] * pydist.world_size()
    dist.all_gather_object(told, mine)
    return told


def _describe_rank(agreement: Agreement, told: Told) -> RankFacts:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    rank = pydist.rank()
    return RankFacts(
        rank,
        pydist.local_rank(),
        os.getpid(),
        cores,
        tuple(node.number for node in numa_nodes(cores) if node.allowed),
        agreement.gpus[rank],
        told.addresses,
        tuple(interfaces_with(told.addresses, list_interfaces())),
        told.reason,
    )


def _measure_links(placement: Placement) -> tuple[tuple[Link, ...], str]:
    """Every rank calls it: those that measure nothing wait for the others."""
    plan = plan_for(placement.hosts)
    rank, leaders = pydist.rank(), leaders_of(placement)
    measured: list[Link] = []
    for turn in plan.turns:
        for first, second in turn:
            one, other = leaders[first], leaders[second]
            if rank in (one, other):
                peer = other if rank == one else one
                link = measure_link((first, second), peer, leads=rank == one)
                measured += [link] if link else []
        pydist.barrier()
    links = [link for of_rank in _tell_all(measured) for link in of_rank]
    return tuple(sorted(links, key=lambda link: link.hosts)), plan.covers
