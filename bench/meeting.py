"""What the meeting of many ranks costs: python bench/meeting.py --ranks 1024 --hosts 128

Each rank is a thread here with a client of its own at one TCPStore. They say and hear through it
what the ranks of a native group do when they meet, by the engine's own code; no group is made.
Counted is what the kernel saw at the server's sockets: the messages and the bytes both ways. The
seconds, until the last rank has heard all, are those of ranks that share this machine's cores with
the server.
"""

import argparse
import resource
import socket
import struct
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from pydist import _native
from pydist.benchmarks import machine

# In struct tcp_info of linux/tcp.h: tcpi_bytes_acked, tcpi_bytes_received; tcpi_data_segs_in.
_BYTES_OFFSET = 120
_SEGMENTS_IN_OFFSET = 152
_INFO_BYTES = 160
_STACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Traffic:
    """Of all connections of a server, since they were made."""

    messages: int  # that came to it
    received: int  # bytes
    sent: int  # bytes

    def since(self, before: "Traffic") -> "Traffic":
        return Traffic(
            self.messages - before.messages,
            self.received - before.received,
            self.sent - before.sent,
        )


def traffic_at(port: int) -> Traffic:
    """What went over the sockets of this process that were accepted at `port`."""
    messages = received = sent = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            connection = socket.socket(fileno=int(entry.name))
        except OSError:
            continue  # closed meanwhile, or of a kind that Python does not know
        try:
            if connection.getsockname()[1] == port:
                connection.getpeername()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                acked, incoming = struct.unpack_from("=QQ", info, _BYTES_OFFSET)
                messages += struct.unpack_from("=I", info, _SEGMENTS_IN_OFFSET)[0]
                sent += acked
                received += incoming
        except (OSError, IndexError, TypeError):
            pass  # it listens, or is of another family
        finally:
            connection.detach()
    return Traffic(messages, received, sent)


def meet(ranks: int, ranks_per_host: int, timeout_s: float) -> tuple[Traffic, list[float]]:
    """One meeting: what it cost the server, and the seconds of each rank."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [
        TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        for _ in range(ranks)
    ]
    took_s = [0.0] * ranks
    errors: list[BaseException] = []
    start = threading.Barrier(ranks + 1)

    def play(rank: int) -> None:
        start.wait(timeout_s)
        start_s = time.perf_counter()
        try:
            _native.rehearse_meeting(clients[rank], rank, ranks, ranks_per_host, timeout_s)
        except BaseException as error:
            errors.append(error)
        took_s[rank] = time.perf_counter() - start_s

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    before = traffic_at(server.port)
    start.wait(timeout_s)
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    return traffic_at(server.port).since(before), took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--hosts", type=int, help="(default: one for 8 ranks)")
    parser.add_argument("--timeout", type=float, default=600.0, help="s (default: %(default)s)")
    arguments = parser.parse_args()
    threading.stack_size(_STACK_BYTES)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(machine.describe())
    table = Table(title="one meeting (a rank's share in brackets)")
    for column in ("ranks", "hosts", "messages", "MB to the store", "MB from it", "s"):
        table.add_column(column, justify="right")
    for ranks in arguments.ranks:
        hosts = arguments.hosts or max(1, ranks // 8)
        if ranks % hosts != 0:
            parser.error(f"{ranks} ranks can't be dealt out evenly to {hosts} hosts")
        traffic, took_s = meet(ranks, ranks // hosts, arguments.timeout)
        table.add_row(
            str(ranks),
            str(hosts),
            f"{traffic.messages} ({traffic.messages / ranks:.0f})",
            f"{traffic.received / 1e6:.2f} ({traffic.received / ranks / 1e3:.1f} KB)",
            f"{traffic.sent / 1e6:.2f} ({traffic.sent / ranks / 1e3:.1f} KB)",
            f"{max(took_s):.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
