"""`pydist info --topology`: what this host is, or where the ranks of a job are and what is between
them."""

import json
import sys
from dataclasses import asdict
from typing import Any

import pydist
from pydist.cli.topology_tables import print_host, print_job
from pydist.errors import Error, InvalidUsage
from pydist.job.launchers import read_placement
from pydist.topology.host import HostFacts, describe_host
from pydist.topology.interfaces import Told, told_alone
from pydist.topology.job import JobTopology, collect_job

__all__ = ["show_topology"]

# For the ranks to come together, and for a message on a slow link.
_TIMEOUT_S = 120.0


def show_topology(*, as_json: bool) -> int:
    """Prints the topology; where a launcher has started several ranks, all of them call it.

    Args:
        as_json: whether to print it for programs.

    Returns:
        0; 1 where the ranks did not come together, or one of them failed.

    Raises:
        InvalidUsage: the environment describes half a job, or PYDIST_INTERFACE an interface that is
            not there.
    """
    if read_placement().world_size == 1:
        host, told = describe_host(), told_alone()
        if as_json:
            print(json.dumps(_host_report(host, told), indent=2))
        else:
            print_host(host, told)
        return 0
    try:
        pydist.init(timeout=_TIMEOUT_S)
        job = collect_job()
        leads = pydist.rank() == 0
        pydist.shutdown()
    except InvalidUsage:
        raise
    except Error as error:
        print(f"pydist info: {error}", file=sys.stderr)
        return 1
    if leads and as_json:
        print(json.dumps(_job_report(job), indent=2))
    elif leads:
        print_job(job)
    return 0


def _host_report(host: HostFacts, told: Told) -> dict[str, Any]:
    return {"hosts": [{"host": 0, **asdict(host)}], "would_connect_to": asdict(told)}


def _job_report(job: JobTopology) -> dict[str, Any]:
    hosts = [
        {"host": number, "leader": ranks[0], "ranks": ranks, **asdict(host)}
        for number, (host, ranks) in enumerate(zip(job.hosts, job.placement.ranks_on, strict=True))
    ]
    ranks = [{**asdict(rank), "host": job.placement.host_of[rank.rank]} for rank in job.ranks]
    return {
        "backend": {"name": job.backend, "for_cpu": job.host_backend, "reason": job.reason},
        "hosts": hosts,
        "ranks": ranks,
        "links": {
            "covers": job.covers,
            "sockets": job.sockets,
            "measured": [asdict(link) for link in job.links],
        },
    }
