"""A rank whose program ends, and one on another host that is slow to take what it has sent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from launch import free_port

# On two hosts. Ranks 0 and 2 are connected by init, and ranks 1 and 3.
_RANKS = 4

_PROGRAM = """
import os, signal, subprocess, sys
import torch
import pydist
from pydist.job.processes import status_of

rank = int(os.environ["RANK"])
pydist.init()
message = torch.zeros(1)
if rank == 2:
    with open("pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.new", "pid")
    with subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)
    pydist.recv(message, 1)
    assert message == 7.0
elif rank == 1:
    while not os.path.exists("pid") or status_of(int(open("pid").read())).state != "T":
        os.sched_yield()
    pydist.send(message + 7, 2)
pydist.shutdown()
"""


def test_the_first_message_to_a_process_that_is_stopped_arrives(tmp_path: Path) -> None:
    env = {**os.environ, "PYDIST_BACKEND": "native", "WORLD_SIZE": str(_RANKS)}
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), LOCAL_RANK="0")
    ranks = []
    with contextlib.ExitStack() as stack:
        for rank in range(_RANKS):
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                cwd=tmp_path,
                env={**env, "RANK": str(rank), "PYDIST_HOST_ID": f"host {rank // 2}"},
                stderr=subprocess.PIPE,
                text=True,
            )
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        said = [process.communicate(timeout=40)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * _RANKS, said
