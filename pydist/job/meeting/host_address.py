"""By which address a host is reached whose name Slurm gives, and no name server knows.

Slurm's names of nodes are its own. It reaches them by an address of their configuration (NodeAddr),
and so do the ranks, where the name alone leads nowhere.
"""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from pydist.errors import InvalidUsage

__all__ = ["reachable_address"]

# A name server may be slow, or lose a request.
_PATIENCE_S = 5.0
_SCONTROL_S = 10.0


def reachable_address(host: str) -> str:
    """The name or address to connect to for a host.

    Args:
        host: a name or an address.

    Returns:
        The same, where it can be resolved, or this is no job of Slurm's; otherwise the address by
        which Slurm reaches the node of that name.

    Raises:
        InvalidUsage: neither the host nor Slurm knows an address.
    """
    if "SLURM_JOB_ID" not in os.environ or _resolves(host):
        return host
    return _address_by_slurm(host)


@cache
def _address_by_slurm(host: str) -> str:
    if address := _alias(host, os.environ) or _node_address(host):
        return address
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        if _resolves(host):
            return host
        time.sleep(0.2)
    raise InvalidUsage(
        f"rank 0 is on node {host}, a name that host {socket.gethostname()} can't resolve, and "
        f"`scontrol show node {host}` tells no other address (NodeAddr): set MASTER_ADDR to one by "
        "which all nodes reach it."
    )


def _resolves(host: str) -> bool:
    with suppress(OSError, UnicodeError):
        socket.getaddrinfo(host, None)
        return True
    return False


def _alias(host: str, env: Mapping[str, str]) -> str | None:
    """From SLURM_NODE_ALIASES, "node:address:host,…", which Slurm sets for nodes of a cloud."""
    for each in env.get("SLURM_NODE_ALIASES", "").split(","):
        found = re.fullmatch(r"([^:]+):(?:\[([^\]]+)\]|([^:]+)):[^:]*", each)
        if found and found[1] == host:
            return found[2] or found[3]
    return None


def _node_address(host: str) -> str | None:
    """From Slurm's controller."""
    scontrol = shutil.which("scontrol")
    if scontrol is None or host.startswith("-"):
        return None
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            [scontrol, "--oneliner", "show", "node", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=_SCONTROL_S,
        ).stdout
        found = re.search(r"(?:^|\s)NodeAddr=(\S+)", said)
        if found and _resolves(found[1]):
            return found[1]
    return None
