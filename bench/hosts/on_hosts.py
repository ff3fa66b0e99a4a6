"""What the scripts of this folder share: hosts as the command line asks for them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

# Otherwise torch, once imported, warns that the hosts' addresses have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hosts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hosts" / "network"))
from namespaces import Hosts, HostsUnavailableError
from rich.console import Console

from pydist.benchmarks import machine
from pydist.benchmarks.outputs import require_writable
from pydist.errors import InvalidUsage

ROOT = Path(__file__).resolve().parents[2]

BUILD = ROOT / "build" / "hosts"


def stop(message: str, status: int = 1) -> NoReturn:
    """One line on stderr, and the end."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def failing_in_one_line() -> Iterator[None]:
    """For what is measured: ends the script where there are no hosts, or where ranks fail."""
    try:
        yield
    except HostsUnavailableError as error:
        stop(str(error), status=2)
    except AssertionError as error:
        # Of the ranks, with what each says; or another program has taken too long.
        stop(str(error))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those about the network, and where results are kept."""
    add = parser.add_argument
    add("--rate", help="of each link, in tc's words, such as 1gbit (default: as fast as it goes)")
    add("--delay-ms", type=float, default=0.0, help="of a packet, one way; by a slow relay")
    add("--loss", type=float, default=0.0, help="the share of packets, 0 to 1; by a slow relay")
    add("--mtu", type=int, default=1500, help="bytes of the largest packet (default: 1500)")
    add(
        "--congestion", metavar="NAME", help="control of TCP, such as cubic (default: the system's)"
    )
    add("-J", "--json", type=Path, metavar="FILE", help="everything, with the machine")


def add_ranks_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds `--ranks`."""
    parser.add_argument(
        "--ranks",
        type=_parse_ranks,
        default=_parse_ranks(default),
        help=f"on each host (default: {default})",
    )


def _parse_ranks(text: str) -> list[int]:
    """The numbers of ranks of --ranks."""
    words = text.split(",")
    if len(words) < 2 or not all(word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text}: two hosts or more, with a rank or more each")
    return [int(word) for word in words]


def check_output(args: argparse.Namespace) -> None:
    """Ends the script where the file of --json can't be written, before anything is measured."""
    if args.json:
        try:
            require_writable(args.json)
        except InvalidUsage as error:
            stop(str(error), status=2)


def rank_environment(hosts: Hosts) -> dict[str, str]:
    """For `RanksOn`: the variables PYDIST_* of this process, and where gloo listens."""
    own = {name: value for name, value in os.environ.items() if name.startswith("PYDIST_")}
    return {**own, "GLOO_SOCKET_IFNAME": hosts[0].interface}


def make_hosts(args: argparse.Namespace, count: int = 2) -> Hosts:
    """Hosts for a `with`, not shaped yet. Ends the script where the arguments make no sense."""
    try:
        return Hosts(
            count,
            mtu=args.mtu,
            delay_ms=args.delay_ms,
            loss=args.loss,
            congestion=args.congestion,
        )
    except ValueError as error:
        stop(str(error), status=2)


def print_header(console: Console, args: argparse.Namespace, ranks: int) -> None:
    """Says for people what figures depend on: the machine, the network, and its crowd of ranks."""
    console.print(str(machine.describe()), highlight=False)
    console.print(_describe_network(args), highlight=False)
    if ranks > machine.describe().usable_cpus:
        console.print("[yellow]Warning:[/] more ranks than CPUs: ranks wait for a core.")


def _describe_network(args: argparse.Namespace) -> str:
    said = [
        f"rate {args.rate or 'not limited'}",
        f"packets of {args.mtu} bytes",
        f"TCP {args.congestion or _congestion_control()}",
    ]
    if args.delay_ms or args.loss:
        said += [f"delay {args.delay_ms:g} ms", f"loss {args.loss:.2%}"]
    return f"network namespaces of one machine; {', '.join(said)}"


def _congestion_control() -> str:
    """The system's congestion control, which namespaces begin with."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def network_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same for JSON."""
    names = ("rate", "mtu", "delay_ms", "loss")
    return {
        **{name: getattr(args, name) for name in names},
        "congestion_control": args.congestion or _congestion_control(),
    }


__all__ = [
    "BUILD",
    "ROOT",
    "Hosts",
    "HostsUnavailableError",
    "add_arguments",
    "add_ranks_argument",
    "check_output",
    "failing_in_one_line",
    "make_hosts",
    "network_of",
    "print_header",
    "rank_environment",
    "stop",
]
