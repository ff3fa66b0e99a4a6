"""The tables of `pydist info --topology`."""

from collections.abc import Sequence

from rich.table import Table

from pydist.benchmarks.sizes import size_text
from pydist.cli.printing import print_whole
from pydist.topology.host import HostFacts
from pydist.topology.interfaces import Interface, Told, interfaces_with
from pydist.topology.job import JobTopology
from pydist.topology.links import Link
from pydist.topology.processors import NumaNode, cpu_list

__all__ = ["print_host", "print_job"]

_UNKNOWN = "?"


def print_host(host: HostFacts, told: Told) -> None:
    """One host, for people.

    Args:
        host: It.
        told: The addresses by which other hosts would connect to it.
    """
    print_whole(f"Host {host.name}, {host.identity}")
    _print_parts(host, interfaces_with(told.addresses, host.interfaces))
    if told.addresses:
        print_whole(f"\nOther hosts would connect to {', '.join(told.addresses)}: {told.reason}.")
    else:
        why = told.reason or "neither PYDIST_INTERFACE nor MASTER_ADDR is set"
        print_whole(
            f"\nWhich interface other hosts would connect to is not known: {why}. Started on all "
            "ranks by a launcher, this command also says what is between them."
        )


def print_job(job: JobTopology) -> None:
    """A job, for people."""
    ranks = job.placement.ranks
    print_whole(f"{ranks} ranks on {_hosts(job)}, backend {job.backend}: {job.reason}.\n")
    print_whole(_host_table(job))
    print_whole(_rank_table(job))
    for number, host in enumerate(job.hosts):
        print_whole(f"\nHost {number}, {host.name}")
        used = {
            name for rank in job.placement.ranks_on[number] for name in job.ranks[rank].interfaces
        }
        _print_parts(host, used)
    if job.links:
        print_whole(_link_table(job))


def _hosts(job: JobTopology) -> str:
    return "1 host" if job.placement.hosts == 1 else f"{job.placement.hosts} hosts"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _print_parts(host: HostFacts, used: Sequence[str] | set[str]) -> None:
    """What a host consists of."""
    print_whole(_node_table(host.nodes))
    gpus = _table("\nGPUs", "GPU", "name")
    for number, name in enumerate(host.gpus):
        gpus.add_row(str(number), name)
    if host.gpus:
        print_whole(gpus)
    print_whole(_interface_table(host.interfaces, used))


def _node_table(nodes: Sequence[NumaNode]) -> Table:
    table = _table("\nProcessors", "NUMA node", "socket", "cores", "usable", "memory", "free")
    for node in nodes:
        table.add_row(
            str(node.number),
            ", ".join(map(str, node.sockets)) or _UNKNOWN,
            cpu_list(node.cpus),
            cpu_list(node.allowed),
            _UNKNOWN if node.memory_bytes is None else size_text(node.memory_bytes),
            _UNKNOWN if node.free_bytes is None else size_text(node.free_bytes),
        )
    return table


def _interface_table(interfaces: Sequence[Interface], used: Sequence[str] | set[str]) -> Table:
    table = _table("\nInterfaces", "name", "state", "speed", "MTU", "addresses", "")
    for each in interfaces:
        table.add_row(
            each.name,
            each.state,
            _UNKNOWN if each.mbit_per_s is None else f"{each.mbit_per_s / 1000:g} Gbit/s",
            _UNKNOWN if each.mtu_bytes is None else str(each.mtu_bytes),
            ", ".join(each.addresses) or "none",
            "in use" if each.name in used else "",
        )
    if not interfaces:
        table.add_row("none but the loopback")
    return table


def _host_table(job: JobTopology) -> Table:
    table = _table("Hosts", "host", "name", "told apart by", "leader", "ranks")
    for number, (host, ranks) in enumerate(zip(job.hosts, job.placement.ranks_on, strict=True)):
        table.add_row(str(number), host.name, host.identity, str(ranks[0]), cpu_list(ranks))
    return table


def _rank_table(job: JobTopology) -> Table:
    has_gpus = any(rank.gpu is not None for rank in job.ranks)
    has_addresses = any(rank.addresses for rank in job.ranks)
    columns = ["rank", "host", "local rank", "pid", "NUMA node", "cores"]
    columns += ["GPU"] if has_gpus else []
    columns += ["interface", "address", "which is"] if has_addresses else []
    table = _table("\nRanks", *columns)
    for rank in job.ranks:
        row = [
            *(str(rank.rank), str(job.placement.host_of[rank.rank]), str(rank.local_rank)),
            *(str(rank.pid), cpu_list(rank.nodes), cpu_list(rank.cores)),
        ]
        if has_gpus:
            row.append("none" if rank.gpu is None else f"cuda:{rank.gpu}")
        if has_addresses:
            row += [", ".join(rank.interfaces) or _UNKNOWN, ", ".join(rank.addresses), rank.reason]
        table.add_row(*row)
    return table


def _link_table(job: JobTopology) -> Table:
    """Host by host: a row has what goes from its host to that of the column."""
    cells: dict[tuple[int, int], str] = {}
    for link in job.links:
        first, second = link.hosts
        cells[first, second] = _cell(link, link.out_bytes_per_s)
        cells[second, first] = _cell(link, link.back_bytes_per_s)
    table = _table("\nLinks, measured between the leaders of hosts", "from \\ to")
    for number, host in enumerate(job.hosts):
        table.add_column(f"{number} {host.name}", justify="right")
    for number, host in enumerate(job.hosts):
        others = [cells.get((number, other), "") for other in range(len(job.hosts))]
        table.add_row(f"{number} {host.name}", *others)
    by = f"By pydist.send and recv on {job.host_backend}"
    if job.sockets is not None:
        connections = "1 connection" if job.sockets == 1 else f"{job.sockets} connections"
        by += f", over {connections} from each end"
    table.caption = (
        "half a round trip of a small message; a stream one way; one of two streams, both ways at "
        f"once. {by}."
    )
    if job.covers == "ring":
        table.caption += (
            " With so many hosts, each was measured with the next one alone, several pairs at a "
            "time."
        )
    table.caption_justify = "left"
    return table


def _cell(link: Link, one_way_bytes_per_s: float) -> str:
    return (
        f"{link.latency_s * 1e6:.1f} µs\n{_gigabits(one_way_bytes_per_s)}\n"
        f"{_gigabits(link.both_bytes_per_s)} both ways"
    )


def _gigabits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g} Gbit/s"
