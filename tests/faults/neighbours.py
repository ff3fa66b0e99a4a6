"""A hostile process of the same machine, which speaks to every socket of the ranks that it knows.

It is another user's where this process is root's, which can become one; otherwise the same user's.
Ranks tell it their sockets, so that it finds no other job's.
"""

import contextlib
import multiprocessing
import os
import random
import socket
import time
from array import array
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from scene import Scene

import pydist

_NOBODY = 65534
_LIFE_S = 90.0
# How long the ranks go on under attack.
_ACT_S = 1.5
# Between two connections to a port of TCP. The servers there are gloo's and torch's, which a flood
# of connections holds up as long as it lasts: gloo's thread ends only when nothing has come for
# 10 ms.
_TCP_PAUSE_S = 0.03


def _own_sockets() -> list[str]:
    """Names of this process's Unix sockets, and the TCP ports that it listens on."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{number}").removeprefix("socket:[").rstrip("]"))
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[6] in own and fields[7].startswith("@"):
            found.append(f"unix {fields[7][1:]}")
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                found.append(f"tcp {int(fields[1].rpartition(':')[2], 16)}")
    return found


def go_on_among_strangers(scene: Scene) -> None:
    """Collectives, new groups and a second start, while a stranger sends to all sockets."""
    port = os.environ["MASTER_PORT"]
    scene.mark()
    for _ in range(2):
        pydist.init(timeout=scene.timeout_s)
        path = scene.folder / f"sockets-{scene.rank}"
        path.write_text("\n".join([*_own_sockets(), f"tcp {port}"]))
        path.chmod(0o644)
        begin = time.monotonic()
        goes_on = torch.ones(1)
        while goes_on.item():
            total = pydist.all_reduce(torch.full((1000,), 1.0 + scene.rank))
            assert total[0].item() == scene.size * (scene.size + 1) / 2
            group = pydist.new_group(range(scene.size))
            assert pydist.all_reduce(torch.ones(1), group=group).item() == scene.size
            # All stop together.
            goes_on = torch.tensor([float(time.monotonic() - begin < _ACT_S)])
            pydist.all_reduce(goes_on, "min")
        pydist.shutdown()


@contextlib.contextmanager
def stranger(folder: Path) -> Iterator[None]:
    """Lets one do harm while the ranks act. Raises where it has reached no socket."""
    folder.chmod(0o755)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_harm, args=(str(folder), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield
        ours.send("end")
        sent = ours.recv() if ours.poll(10) else {}
    finally:
        process.kill()
        process.join()
        known = {line.split()[0] for path in folder.glob("sockets-*") for line in _lines(path)}
    assert known, "the ranks have told of no socket"
    assert all(sent.get(kind, 0) > 10 for kind in known), sent


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _harm(folder: str, connection: Connection) -> None:
    "loads what another user may not read".encode("idna")
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    dice = random.Random(7)
    sent = {"unix": 0, "tcp": 0}
    held: list[socket.socket] = []
    due_s: dict[str, float] = {}  # by port
    deadline = time.monotonic() + _LIFE_S
    while not connection.poll(0.001) and time.monotonic() < deadline:
        for path in Path(folder).glob("sockets-*"):
            with contextlib.suppress(OSError):
                for line in _lines(path):
                    kind, _, name = line.partition(" ")
                    if kind == "tcp":
                        if time.monotonic() < due_s.get(name, 0):
                            continue
                        due_s[name] = time.monotonic() + _TCP_PAUSE_S
                    send = _to_unix if kind == "unix" else _to_tcp
                    with contextlib.suppress(OSError):
                        send(name, dice, held)
                        sent[kind] += 1
    connection.send(sent)


def _garbage(dice: random.Random) -> bytes:
    likely = [b"0123456789abcdef0123456789abcdef key ", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b""]
    return dice.choice(likely) + dice.randbytes(dice.randrange(300))


def _to_unix(name: str, dice: random.Random, _held: list[socket.socket]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
        own.setblocking(False)
        own.connect(f"\0{name}")
        ancillary = []
        if dice.random() < 0.5:
            descriptors = array("i", [own.fileno()] * dice.randrange(1, 5))
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        own.sendmsg([_garbage(dice) or b"x"], ancillary)


def _to_tcp(port: str, dice: random.Random, held: list[socket.socket]) -> None:
    own = socket.create_connection(("127.0.0.1", int(port)), 0.2)
    own.setblocking(False)
    own.send(_garbage(dice) or b"x")
    # Some are closed, some stay open and silent.
    held.append(own)
    if len(held) > 20:
        held.pop(dice.randrange(len(held))).close()
