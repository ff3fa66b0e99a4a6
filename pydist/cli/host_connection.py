"""A host of `pydist run -H`: what runs there (on_host.py), by ssh or directly, and what it says."""

import os
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, TextIO

from pydist.cli.host_list import Host
from pydist.cli.host_protocol import RANK_PREFIX, Greeting, Task

__all__ = ["HostConnection", "ssh_command"]

# Of options that contradict each other ssh takes the first, so the user's come before these.
_OPTIONS = (
    # It asks nobody for a password.
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    # A host that is lost is noticed within 20 s.
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
# Without the folder that the shell begins in, where a file may have the name of a module.
_PROGRAM = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "from pydist.cli.on_host import main; sys.exit(main())"
)
_OUTPUT_LIMIT_S = 5.0

# Two threads of each host write.
_writing = threading.Lock()


def ssh_command(host: Host, port: int | None, arguments: Sequence[str]) -> list[str]:
    """How to run something on another host: what follows is one word for the shell there.

    Args:
        host: its name is what ssh is given.
        port: of sshd; None for what ssh's configuration says.
        arguments: more of ssh's flags.
    """
    at = [] if port is None else ["-p", str(port)]
    return ["ssh", "-T", *arguments, *at, *_OPTIONS, "--", host.name]


class HostConnection:
    """What runs on one host. Its end, and its greeting, are told by callbacks, in other threads."""

    def __init__(
        self,
        host: Host,
        ssh: Sequence[str],
        on_greeting: "Callable[[HostConnection], None]",
        on_end: "Callable[[HostConnection], None]",
    ) -> None:
        """Starts it.

        Args:
            host: where.
            ssh: `ssh_command`; nothing on this host.
            on_greeting: called once `greeting` is there.
            on_end: called once `status` is there and all output has been forwarded.

        Raises:
            OSError: ssh can't be started.
        """
        self.host = host
        self._is_remote = bool(ssh)
        self.greeting: Greeting | None = None
        self.status: int | None = None
        self._on_greeting, self._on_end = on_greeting, on_end
        # Standard error until the greeting: ssh says there why it can't connect.
        self._early_errors: deque[str] | None = deque(maxlen=50)
        python = [sys.executable, "-c", _PROGRAM]
        self._process = subprocess.Popen(
            [*ssh, _remote(python)] if ssh else python,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the launcher alone, which tells the hosts.
            start_new_session=True,
        )
        self._readers = [
            self._thread(self._forward, self._process.stdout, sys.stdout),
            self._thread(self._forward, self._process.stderr, sys.stderr),
        ]
        self._thread(self._wait)

    def send(self, task: Task) -> None:
        """Tells the host what to run."""
        self.tell(task.written())

    def tell(self, line: str) -> None:
        """Sends a line, unless the host has ended; an empty one says that the launcher is there."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def hang_up(self) -> None:
        """Has everything on the host end within seconds."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Ends ssh, or what runs on this host: for a host that does not answer."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)

    @property
    def why_no_greeting(self) -> str:
        """What was said instead of one, in a line."""
        said = [line.strip() for line in self._early_errors or () if line.strip()]
        # The last line of a traceback, and of what ssh says, tells most.
        return said[-1] if said and "Traceback" in said[0] else " ".join(said)

    def _thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(
            target=target, args=arguments, name=f"pydist-{self.host.name}", daemon=True
        )
        thread.start()
        return thread

    def _forward(self, stream: IO[bytes], out: TextIO) -> None:
        with stream:
            for raw in stream:
                self._take(raw.decode(errors="replace").rstrip("\r\n"), out)

    def _take(self, line: str, out: TextIO) -> None:
        if self.greeting is None and out is sys.stdout and (greeting := Greeting.read(line)):
            self._greet(greeting)
        elif (early := self._early_errors) is not None and out is sys.stderr:
            early.append(line)
        else:
            self._print(line, out)

    def _greet(self, greeting: Greeting) -> None:
        if not self._is_remote:
            # What this process has there is how somebody has come here.
            greeting = replace(greeting, ssh_connection="")
        self.greeting = greeting
        early, self._early_errors = self._early_errors, None
        for each in early or ():
            self._print(each, sys.stderr)
        self._on_greeting(self)

    def _print(self, line: str, out: TextIO) -> None:
        if not RANK_PREFIX.match(line):
            line = f"[{self.host.name}]: {line}"
        # Whoever reads may be gone; the job goes on, as under torchrun.
        with _writing, suppress(OSError, ValueError):
            print(line, file=out, flush=True)

    def _wait(self) -> None:
        status = self._process.wait()
        for reader in self._readers:
            # What a rank has left behind may hold the output open.
            reader.join(_OUTPUT_LIMIT_S)
        self.status = status
        self._on_end(self)


def _remote(command: Sequence[str]) -> str:
    """A command for the shell of another host."""
    path = os.environ.get("PYTHONPATH", "")
    folders = [os.path.abspath(folder) for folder in path.split(os.pathsep) if folder]
    # It finds pydist by this, perhaps; the rest of the environment comes on standard input.
    given = ["env", f"PYTHONPATH={os.pathsep.join(folders)}"] if folders else []
    return "exec " + shlex.join([*given, *command])
