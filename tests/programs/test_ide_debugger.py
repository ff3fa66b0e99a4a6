"""A debugger that attaches as IDEs do, to a script that starts its own ranks."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch import clean_environment
from time_limit import PATIENCE

pytest.importorskip("debugpy", reason="debugpy is not installed: `make build`")

PROGRAM = """
import sys
import torch
import pydist

pydist.init(processes=2)
total = pydist.all_reduce(torch.tensor([pydist.rank() + 1.0]), "sum").item()
print(f"rank {pydist.rank()}: {total:g} {sys.argv[1:]} {'debugpy' in sys.modules}\\n", end="")
"""
BREAK_AT = 7


class Client:
    """As much of the debug adapter protocol as it takes to stop once."""

    def __init__(self, port: int) -> None:
        self._socket = connected(port)
        self._stream = self._socket.makefile("rb")
        self._sent = 0

    def send(self, command: str, **arguments: Any) -> None:
        self._sent += 1
        request = {"seq": self._sent, "type": "request", "command": command}
        text = json.dumps(request | {"arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(text), text))

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The next event of a kind, or the response to a command."""
        while True:
            length = int(self._stream.readline().split(b":")[1])
            self._stream.readline()
            message: dict[str, Any] = json.loads(self._stream.read(length))
            if kind in (message.get("event"), message.get("command")):
                return message

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


def connected(port: int) -> socket.socket:
    """A connection, as soon as somebody listens: the test's own limit ends it otherwise."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 30 * PATIENCE)
        except ConnectionRefusedError:
            time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


# By default debugpy puts itself into the processes that a program starts, as IDEs have it.
def test_it_stops_in_rank_0_alone(tmp_path: Path) -> None:
    script, port = tmp_path / "program.py", free_port()
    script.write_text(PROGRAM)
    command = ["-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client", str(script)]
    with subprocess.Popen(
        [sys.executable, *command, "--lr", "0.1"],
        env=clean_environment({}),
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        client = Client(port)
        client.send("initialize", adapterID="test")
        client.wait_for("initialize")
        client.send("attach", connect={"host": "127.0.0.1", "port": port})
        client.wait_for("initialized")
        lines = [{"line": BREAK_AT}]
        client.send("setBreakpoints", source={"path": str(script)}, breakpoints=lines)
        client.wait_for("setBreakpoints")
        client.send("configurationDone")
        assert client.wait_for("stopped")["body"]["reason"] == "breakpoint"
        client.send("disconnect", terminateDebuggee=False)
        client.wait_for("disconnect")
        client.close()
        told, _ = first.communicate(timeout=60 * PATIENCE)
    assert first.returncode == 0
    assert sorted(filter(None, told.splitlines())) == [
        "rank 0: 3 ['--lr', '0.1'] True",
        "rank 1: 3 ['--lr', '0.1'] False",
    ]
