"""`pydist run -H a:4,b:4`: torchrun on each of several hosts, started through ssh.

Nothing here makes ranks, or lets them meet: torchrun does. This module says who is on which host
(host_list.py), where all meet, and what the ranks' environment is; it forwards what they print
(host_connection.py), and ends all hosts when one ends badly. on_host.py runs on each host.

The order of the hosts is the order of the ranks: torchrun's static rendezvous numbers them so, with
any number of processes on each host.
"""

import argparse
import ipaddress
import os
import queue
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from pydist import __version__
from pydist.cli.host_connection import HostConnection, ssh_command
from pydist.cli.host_list import Host, is_this_host, parse_hostfile, parse_hosts, share_out
from pydist.cli.host_protocol import Task
from pydist.errors import InvalidUsage, Timeout, TransportError

__all__ = ["run_on_hosts"]

# The other side gives up after 30 s of silence.
_ALIVE_S = 2.0
# A host has to import torch, from a slow disk perhaps.
_GREETING_S = 120.0
# How long torchrun waits for the first host's store.
_MEETING_S = 60
# When ranks of one host have failed, those of others may end because of that, and say so.
_LAST_WORDS_S = 1.0
# How long ranks get to end after a signal: as long as torchrun gives them.
_SIGNAL_GRACE_S = 30.0
# A host that is hung up on ends within 5 s.
_END_S = 8.0

_FORWARDED = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")
_FORWARDED_PREFIXES = ("PYDIST_", "OMP_", "NCCL_", "GLOO_")
# What says which host this is would make one of them all.
_OF_THIS_HOST = ("PYDIST_HOST_ID", "NCCL_HOSTID")

_Event = HostConnection | int


def run_on_hosts(options: argparse.Namespace) -> int:
    """Runs a script on the processes of several hosts.

    Args:
        options: torchrun's and ours (host_flags.py), parsed.

    Returns:
        0 when all processes ended well; otherwise the status of the first host that failed: 1 when
        a rank has, 2 for bad usage, 255 when ssh has lost it. For a signal, 128 and its number.

    Raises:
        InvalidUsage: the hosts, or how many processes they get, make no sense.
        TransportError: a host can't be reached, or pydist does not start there.
        Timeout: a host does not answer.
    """
    hosts = _hosts(options)
    environment = _environment(options.exported)
    try:
        ssh_arguments = shlex.split(options.ssh_args)
    except ValueError as error:
        raise InvalidUsage(f"--ssh-args {options.ssh_args}: {error}") from error
    with _Signals() as signals:
        job = _Job(signals.events)
        try:
            for host in hosts:
                job.start(host, options.ssh_port, ssh_arguments)
            job.await_greetings()
            _require_same_versions(job.connections)
            _send_tasks(options, job.connections, environment)
            return job.supervise()
        except _ToldToEndError as told:
            return 128 + told.number
        finally:
            job.end()


def _hosts(options: argparse.Namespace) -> list[Host]:
    """The hosts that get processes, with how many; None where --gpus or -n decide."""
    if options.hosts is not None and options.hostfile is not None:
        raise InvalidUsage("-H and --hostfile both say which hosts there are: give one of them")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    else:
        hosts = parse_hostfile(Path(options.hostfile))
    per_host = options.nproc_per_node is not None or options.gpus is not None
    flag = "-n" if options.nproc_per_node is not None else "--gpus"
    if per_host and options.processes is not None:
        raise InvalidUsage(f"{flag} says how many processes each host gets: leave out -np")
    if options.nproc_per_node is not None and any(host.slots is not None for host in hosts):
        raise InvalidUsage("-n says how many processes each host gets: name the hosts alone, a,b")
    if per_host:
        return hosts
    slots = sum(host.slots or 1 for host in hosts)
    return share_out(hosts, slots if options.processes is None else options.processes)


def _environment(exported: Sequence[str]) -> dict[str, str]:
    """The variables that the ranks of all hosts get."""
    given = {
        name: value
        for name, value in os.environ.items()
        if (name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES))
        and name not in _OF_THIS_HOST
    }
    for each in exported:
        name, sign, value = each.partition("=")
        if not sign and name not in os.environ:
            raise InvalidUsage(f"-x {name}: no such variable is set here; set it, or say {name}=…")
        if not name or "\0" in each:
            raise InvalidUsage(f"-x {each}: give a name, or a name and a value, A=1")
        given[name] = value if sign else os.environ[name]
    # The secret by which ranks know each other: no command line shows it.
    given.setdefault("PYDIST_JOB_SECRET", secrets.token_hex(32))
    return given


def _send_tasks(
    options: argparse.Namespace,
    connections: Sequence[HostConnection],
    environment: dict[str, str],
) -> None:
    shared = dict(vars(options))
    for name in ("hosts", "hostfile", "processes", "exported", "ssh_port", "ssh_args"):
        del shared[name]
    shared["nnodes"] = str(len(connections))
    shared["master_addr"] = _meeting_address(options, connections)
    if shared["master_port"] is None:
        greeting = connections[0].greeting
        assert greeting is not None
        shared["master_port"] = greeting.free_port
    shared["rdzv_conf"] = shared["rdzv_conf"] or f"timeout={_MEETING_S}"
    for number, connection in enumerate(connections):
        slots = connection.host.slots
        count = options.nproc_per_node if slots is None else str(slots)
        own = {**shared, "node_rank": number, "nproc_per_node": count}
        connection.send(Task(own, environment, os.getcwd()))


def _meeting_address(options: argparse.Namespace, connections: Sequence[HostConnection]) -> str:
    """Where the other hosts reach the first one.

    By sshd's account: a host that was reached by ssh knows by which of its addresses; if the first
    host is this one, the next host knows from which address the launcher has come.
    """
    first, *others = connections
    given: str = options.master_addr
    if given != "127.0.0.1" or not others:
        return given
    with suppress(ValueError):
        if not ipaddress.ip_address(first.host.address).is_loopback:
            return first.host.address
    for connection, place in ((first, 2), *((other, 0) for other in others)):
        assert connection.greeting is not None
        words = connection.greeting.ssh_connection.split()
        if len(words) == 4:
            with suppress(ValueError):
                address = ipaddress.ip_address(words[place])
                # A link-local address means something only together with an interface.
                if not address.is_link_local:
                    return str(address)
    return first.host.address


def _require_same_versions(connections: Sequence[HostConnection]) -> None:
    here = (__version__, str(torch.__version__))
    for connection in connections:
        greeting = connection.greeting
        assert greeting is not None
        there = (greeting.pydist, greeting.torch)
        if there != here:
            raise TransportError(
                f"host {connection.host.name} has pydist {there[0]} with torch {there[1]}, this "
                f"one pydist {here[0]} with torch {here[1]}: install the same on all hosts."
            )


class _ToldToEndError(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Signals:
    """Turns signals to the launcher into events, as long as it is entered."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    def __enter__(self) -> "_Signals":
        # Not those that this process was started to ignore, by nohup say.
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        self._before = {
            number: signal.signal(number, self._put)
            for number in numbers
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _put(self, number: int, _frame: FrameType | None) -> None:
        self.events.put(number)


class _Job:
    """What runs on all hosts."""

    def __init__(self, events: "queue.SimpleQueue[_Event]") -> None:
        self.connections: list[HostConnection] = []
        self._running: list[HostConnection] = []
        self._events = events

    def start(self, host: Host, port: int | None, ssh_arguments: Sequence[str]) -> None:
        """Starts a host; it greets once it is up."""
        if is_this_host(host):
            ssh: list[str] = []
        elif shutil.which("ssh") is None:
            raise InvalidUsage(
                f"host {host.name} is another one, and the program ssh is not found in PATH: "
                "install OpenSSH's client"
            )
        else:
            ssh = ssh_command(host, port, ssh_arguments)
        put = self._events.put
        connection = HostConnection(host, ssh, on_greeting=put, on_end=put)
        self.connections.append(connection)
        self._running.append(connection)

    def await_greetings(self) -> None:
        """Waits until pydist answers on all hosts."""
        end_s = time.monotonic() + _GREETING_S
        while missing := [each for each in self.connections if each.greeting is None]:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                names = ", ".join(each.host.name for each in missing)
                raise Timeout(
                    f"no answer within {_GREETING_S:g} s from {names}: does `ssh HOST "
                    f"{sys.executable} -c 'import pydist'` end in time?"
                )
            event = self._next_event(left_s)
            if isinstance(event, int):
                raise _ToldToEndError(event)
            if event is not None and event.status is not None:
                raise _not_started(event)

    def supervise(self) -> int:
        """Waits for the end of all hosts; ends all when one has failed, or by a signal."""
        first_status = signals = 0
        # What is to be done next, and when.
        plan: tuple[float, Callable[[], None]] | None = None
        while self._running:
            left_s = _ALIVE_S if plan is None else plan[0] - time.monotonic()
            if plan is not None and left_s <= 0:
                plan[1]()
                plan = (time.monotonic() + _END_S, self._kill)
                continue
            event = self._next_event(left_s)
            if isinstance(event, int):
                signals += 1
                first_status = first_status or 128 + event
                for connection in self._running:
                    connection.tell(f"end {signal.Signals(event).name}")
                # Who signals once more does not want to wait.
                grace_s = _SIGNAL_GRACE_S if signals == 1 else 0.0
                plan = (time.monotonic() + grace_s, self._hang_up)
            elif event is not None and event.status and first_status == 0:
                first_status = _status_for_shell(event.status)
                self._say_failure(event)
                plan = (time.monotonic() + _LAST_WORDS_S, self._hang_up)
        return first_status

    def end(self) -> None:
        """Ends what still runs."""
        for connection in self.connections:
            connection.hang_up()
        end_s = time.monotonic() + _END_S
        while self._running:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or isinstance(self._next_event(left_s), int):
                self._kill()
                return

    def _next_event(self, timeout_s: float) -> _Event | None:
        """The next thing that happens, or None soon. The hosts hear that the launcher lives."""
        for connection in self._running:
            connection.tell("")
        try:
            event = self._events.get(timeout=max(0.0, min(timeout_s, _ALIVE_S)))
        except queue.Empty:
            return None
        if not isinstance(event, int) and event.status is not None and event in self._running:
            self._running.remove(event)
        return event

    def _hang_up(self) -> None:
        for connection in self._running:
            connection.hang_up()

    def _kill(self) -> None:
        for connection in self._running:
            connection.kill()

    def _say_failure(self, connection: HostConnection) -> None:
        others = [each.host.name for each in self._running]
        status = connection.status or 0
        if status == 255:
            how = "ssh has lost it, or torchrun was killed there (status 255)"
        elif status < 0 or status > 128:
            number = -status if status < 0 else status - 128
            how = f"torchrun was ended there by signal {number}"
        else:
            how = f"torchrun ended there with status {status}"
        rest = f"; ends the ranks of {', '.join(others)}" if others else ""
        print(f"pydist run: host {connection.host.name}: {how}{rest}", file=sys.stderr, flush=True)


def _status_for_shell(status: int) -> int:
    return 128 - status if status < 0 else status


def _not_started(connection: HostConnection) -> TransportError:
    name, status = connection.host.name, connection.status
    said = connection.why_no_greeting or "nothing was said"
    if status == 255:
        return TransportError(
            f"ssh does not get to host {name} (status 255): {said} — `ssh {name} true` has to work "
            "without a question (a key, and a host key that is known)."
        )
    return TransportError(
        f"pydist did not start on host {name} (status {status}): {said} — the same Python, "
        f"{sys.executable}, with pydist and torch has to be there."
    )
