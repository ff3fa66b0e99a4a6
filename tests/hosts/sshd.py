"""Real ssh between the hosts of a test: an sshd on each, keys of the test's own.

    with made_ssh(hosts, tmp_path) as ssh:
        hosts[0].run(["ssh", *ssh.arguments, "host1", "hostname"])

`hostN` is host N by ssh's configuration alone: the name can't be resolved. `stranger` is the last
host by a key that its sshd does not know, `unknown` the same with a host key that nobody knows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from namespaces import Hosts
from time_limit import PATIENCE

_START_S = 20.0

_SERVER = """
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication yes
PidFile none
"""
_CLIENT = """
Host {name}
  HostName {address}
  Port {port}
  IdentityFile {folder}/{key}
  UserKnownHostsFile {folder}/{known}
  IdentitiesOnly yes
"""
_PORT = 2222


@dataclass(frozen=True)
class Ssh:
    """How to reach the hosts."""

    arguments: tuple[str, ...]
    servers: tuple[subprocess.Popen[bytes], ...]


def why_no_ssh() -> str:
    """Why there is no ssh between hosts here; empty if there is."""
    missing = [name for name in ("ssh", "ssh-keygen", "sshd") if _program(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install openssh-server openssh-client"
    return ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def made_ssh(hosts: Hosts, folder: Path) -> Iterator[Ssh]:
    """Runs sshd on all hosts until the end of a `with`."""
    for key in ("host_key", "user_key", "other_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key],
            check=True,
            timeout=20,
        )
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks itself up, as its service makes it
    public = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known").write_text(f"* {public}\n")
    configuration = ""
    servers = []
    try:
        for host in hosts:
            place = {"address": host.address, "port": _PORT, "folder": folder}
            path = folder / f"sshd_config{host.index}"
            path.write_text(_SERVER.format(**place))
            log = (folder / f"sshd{host.index}.log").open("wb")
            with log:
                servers.append(
                    host.popen(
                        [str(_program("sshd")), "-D", "-e", "-f", str(path)],
                        stdout=log,
                        stderr=log,
                    )
                )
            names = [(f"host{host.index}", "user_key", "known")]
            if host.index == len(hosts) - 1:
                names += [("stranger", "other_key", "known"), ("unknown", "user_key", "nobody")]
            for name, key, known in names:
                configuration += _CLIENT.format(name=name, key=key, known=known, **place)
        (folder / "ssh_config").write_text(configuration)
        ssh = Ssh(("-F", str(folder / "ssh_config")), tuple(servers))
        for host in hosts:
            _await_server(hosts, ssh, host.index)
        yield ssh
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _await_server(hosts: Hosts, ssh: Ssh, number: int) -> None:
    deadline = time.monotonic() + _START_S * PATIENCE
    command = ["ssh", *ssh.arguments, "-o", "BatchMode=yes", f"host{number}", "true"]
    while (done := hosts[number].run(command)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.1)
