"""A rank for which shared memory is full when it reserves some for the n-th time."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from scene import Scene

import pydist

_SOURCE = Path(__file__).with_name("full_memory.c")
# More than a start and an allocation take.
_MOST = 60


def obstacle() -> str:
    """Why it can't be played; empty if it can."""
    return "" if shutil.which("cc") else "no C compiler is installed (cc)"


@cache
def library() -> Path:
    """What has to be loaded ahead into the ranks: compiled here."""
    target = Path(tempfile.gettempdir()) / f"pydist-full-memory-{os.getpid()}.so"
    command = ["cc", "-shared", "-fPIC", "-O1", str(_SOURCE), "-o", str(target), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return target


def full_at_each_reservation(scene: Scene) -> None:
    """Joins again and again; each time the victim's next reservation fails."""
    scene.mark()
    shim = ctypes.CDLL(None)
    raised = 0
    for number in range(1, _MOST):
        if scene.is_victim:
            shim.fail_reservation(number)
        try:
            pydist.init(timeout=scene.timeout_s)
            held = pydist.symmetric_empty(1 << 16)
            total = pydist.all_reduce(torch.ones(1 << 16)).sum().item()
            assert total == scene.size * (1 << 16), total
            del held
        except pydist.TransportError as error:
            raised += 1
            if f"rank {scene.victim}" not in str(error):
                raise
        else:
            break
        finally:
            pydist.shutdown()
    # All failed together each time, or they would not have met again.
    assert raised > 3, raised
    if scene.is_victim:
        shim.fail_reservation(0)
    (scene.folder / f"raised-{scene.rank}").write_text(str(raised))
