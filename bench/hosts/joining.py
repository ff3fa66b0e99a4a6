"""How the ranks of this folder's benchmarks join their job."""

from __future__ import annotations

import os

import pydist
from pydist.benchmarks import machine

# Of each operation, and of joining.
TIMEOUT_S = 120.0


def join() -> str:
    """Joins the job on what PYDIST_BACKEND says; returns the backend. Every rank calls it."""
    # Hosts that namespaces play share the machine's cores, so the number in the job counts.
    machine.pin(int(os.environ["RANK"]))
    # The engine's threads run where the system puts them, as those of users do.
    with machine.unpinned():
        pydist.init(timeout=TIMEOUT_S)
    return pydist.backend()
