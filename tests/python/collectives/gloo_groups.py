"""Communicators on torch's gloo, made by hand."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pydist import _native


def gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def make(timeout_s: float = 20.0, long_wait_s: float = 60.0) -> _native.Communicator:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    return _native.create_gloo(store, rank, size, "tested", timeout_s, gloo, long_wait=long_wait_s)
