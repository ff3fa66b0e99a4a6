"""`pydist run` that another launcher has started on each node: `srun pydist run -n 4 train.py`."""

import argparse
import os
from contextlib import suppress

from pydist.errors import InvalidUsage
from pydist.job.launchers import read_placement
from pydist.job.meeting.host_address import reachable_address

__all__ = ["take_nodes_of_launcher"]

# What torchrun gives its ranks. A rank that calls `pydist run` begins a job of its own.
_TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def take_nodes_of_launcher(options: argparse.Namespace) -> None:
    """Makes this command a node of the job that its launcher has started.

    Each process of srun, of SkyPilot, or of mpirun, that runs this command is a node of one job,
    where each would otherwise begin a job of its own.

    Args:
        options: torchrun's, parsed; they say nothing of nodes or a meeting place.

    Raises:
        InvalidUsage: nobody knows an address of the first node.
    """
    if any(name in os.environ for name in (*_TORCHRUNS, "TORCHELASTIC_RUN_ID")):
        return
    with suppress(InvalidUsage):  # a launcher that does not tell enough
        placement = read_placement()
        if placement.rendezvous is None:
            return
        options.nnodes, options.node_rank = str(placement.world_size), placement.rank
        options.master_port = placement.rendezvous.port
        options.master_addr = placement.rendezvous.address
    options.master_addr = reachable_address(options.master_addr)
