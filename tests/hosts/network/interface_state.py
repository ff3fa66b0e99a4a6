"""Waits until an interface carries packets, which takes the kernel a moment after it is brought up.

A packet that is sent before is lost, and TCP sends the first of a connection again after a second.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import time

from namespace_names import path_of
from network_namespace import inside

# From <linux/sockios.h> and <linux/if.h>.
_SIOCGIFFLAGS = 0x8913
_IFF_RUNNING = 0x40

_LIMIT_S = 10.0


def wait_until_running(namespace: str, interface: str) -> None:
    """Waits until both ends of an interface's cable are up and the kernel has noticed.

    Raises:
        TimeoutError: it isn't after ten seconds.
    """
    deadline = time.monotonic() + _LIMIT_S
    with inside(path_of(namespace)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", interface.encode(), 0)
        while True:
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
            if struct.unpack("16sH14x", answer)[1] & _IFF_RUNNING:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{interface} of {namespace} carries nothing {_LIMIT_S:g} s after it was "
                    "brought up"
                )
            # The kernel tells nobody but listeners to netlink.
            time.sleep(0.001)
