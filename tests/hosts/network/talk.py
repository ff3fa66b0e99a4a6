"""A connection between two hosts, held by the test process: sockets stay where they were made."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from namespaces import Host
from network_namespace import inside

# Of whatever a socket waits for.
LIMIT_S = 10.0


@contextlib.contextmanager
def connection(
    client: Host, server: Host, address: str
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection from one host to an address of another: both of its ends."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        with inside(server.namespace):
            listener = stack.enter_context(socket.create_server((address, 0), family=family))
        with inside(client.namespace):
            place = listener.getsockname()[:2]
            one = stack.enter_context(socket.create_connection(place, LIMIT_S))
        listener.settimeout(LIMIT_S)
        other = stack.enter_context(listener.accept()[0])
        other.settimeout(LIMIT_S)
        yield one, other
