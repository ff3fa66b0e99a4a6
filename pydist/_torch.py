"""Private names of torch that pydist uses, each with the reason. Tested against torch 2.11 to 2.14.

A new torch may rename any of them; this is where to look then.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout


def is_timeout_torchs_own() -> bool:
    """Whether nobody gave the group that torch is making a time-out, so that torch took its own.

    For the function that torch calls to make a group's backend. Where a program gives no time-out,
    torch passes its constant `default_pg_timeout` on (as some frameworks do by themselves); the
    backend gets a copy, which looks like 30 minutes that the program asked for. Only
    `_new_process_group_helper`, the function of torch's that calls the backend's, still holds the
    object itself.
    """
    maker = dist.distributed_c10d._new_process_group_helper.__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not maker:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_locals.get("timeout") is default_pg_timeout
