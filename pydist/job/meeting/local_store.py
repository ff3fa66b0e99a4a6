"""The store of a job whose ranks are all on this host."""

import socket

import torch.distributed as dist

__all__ = ["serve_local_store"]

# How many connections may wait to be accepted, for many ranks that start together.
_BACKLOG = 4096


def serve_local_store() -> dist.TCPStore:
    """A store on a port that the system picks, which this process serves to this host alone.

    The socket is made here: torch's own would listen on all interfaces, and its server would ask
    the name service about every connection, since it sees 127.0.0.1 as an address of IPv6 that
    /etc/hosts does not have.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
