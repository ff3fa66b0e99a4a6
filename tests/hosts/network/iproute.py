"""Runs `ip` and `tc`, and says what is missing where namespaces can't be made."""

from __future__ import annotations

import os
import shutil
import subprocess

# Each takes some milliseconds.
_LIMIT_S = 20.0


class HostsUnavailableError(RuntimeError):
    """This machine can't play several hosts; the message says what it needs for that."""


def require_tools() -> None:
    """Raises where it is clear beforehand that no namespace can be made.

    Raises:
        HostsUnavailableError: this process isn't root's, or a program is not installed.
    """
    if os.geteuid() != 0:
        raise HostsUnavailableError(
            "several hosts on one machine are network namespaces, which only root may make; this "
            f"process belongs to user {os.geteuid()}. Run it as root."
        )
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            raise HostsUnavailableError(
                f"several hosts on one machine need the program {program}, which is not found in "
                f"PATH. Install it: apt-get install {package}"
            )


def ip(*lines: str, namespace: str | None = None) -> None:
    """Runs one or several commands of `ip`, in a namespace if one is named.

    Raises:
        HostsUnavailableError: one of them fails; the later ones have not run.
    """
    where = [] if namespace is None else ["-netns", namespace]
    _run(["ip", *where, "-batch", "-"], "\n".join(lines) + "\n")


def tc(*lines: str, namespace: str) -> None:
    """Runs one or several commands of `tc` in a namespace.

    Raises:
        HostsUnavailableError: `tc` is not installed, or one of them fails.
    """
    if shutil.which("tc") is None:
        raise HostsUnavailableError(
            "to shape a link needs the program tc, which is not found in PATH. Install it: "
            "apt-get install iproute2"
        )
    _run(["tc", "-netns", namespace, "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: list[str], commands: str) -> None:
    try:
        done = subprocess.run(
            command,
            input=commands,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise HostsUnavailableError(
            f"`{' '.join(command)}` has not ended in {_LIMIT_S:g} s. It was told:\n{commands}"
        ) from None
    if done.returncode != 0:
        error, _, number = done.stderr.strip().partition("\nCommand failed -:")
        line = commands.splitlines()[int(number) - 1] if number.isdigit() else commands
        raise HostsUnavailableError(
            f"`{command[0]} {line}` failed: {error}. It needs CAP_SYS_ADMIN and CAP_NET_ADMIN (a "
            "container has to be privileged), and a kernel with network namespaces, veth, bridge "
            "and tun devices and the queues of tc."
        )
