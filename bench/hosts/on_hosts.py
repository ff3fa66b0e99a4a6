"""What the scripts of this folder share: hosts as the command line asks for them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

# Otherwise torch, once imported, warns that the hosts' addresses have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hosts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hosts" / "network"))
from namespaces import Hosts, HostsUnavailableError

ROOT = Path(__file__).resolve().parents[2]

BUILD = ROOT / "build" / "hosts"


def stop(message: str, status: int = 1) -> NoReturn:
    """One line on stderr, and the end."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those about the network, and where results are kept."""
    add = parser.add_argument
    add("--rate", help="of each link, in tc's words, such as 1gbit (default: as fast as it goes)")
    add("--delay-ms", type=float, default=0.0, help="of a packet, one way; by a slow relay")
    add("--loss", type=float, default=0.0, help="the share of packets, 0 to 1; by a slow relay")
    add("--mtu", type=int, default=1500, help="bytes of the largest packet (default: 1500)")
    add("--json", type=Path, metavar="FILE", help="everything, with the machine")


def make_hosts(args: argparse.Namespace, count: int = 2) -> Hosts:
    """Hosts for a `with`, not shaped yet. Ends the script where the arguments make no sense."""
    try:
        return Hosts(count, mtu=args.mtu, delay_ms=args.delay_ms, loss=args.loss)
    except ValueError as error:
        stop(str(error), status=2)


def describe_network(args: argparse.Namespace) -> str:
    """A line for people."""
    said = [f"rate {args.rate or 'not limited'}", f"packets of {args.mtu} bytes"]
    if args.delay_ms or args.loss:
        said += [f"delay {args.delay_ms:g} ms", f"loss {args.loss:.2%}"]
    return f"network namespaces of one machine; {', '.join(said)}"


def network_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same for JSON."""
    names = ("rate", "mtu", "delay_ms", "loss")
    return {name: getattr(args, name) for name in names}


__all__ = [
    "BUILD",
    "ROOT",
    "Hosts",
    "HostsUnavailableError",
    "add_arguments",
    "describe_network",
    "make_hosts",
    "network_of",
    "stop",
]
