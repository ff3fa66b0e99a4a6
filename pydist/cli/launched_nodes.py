"""`pydist run` that another launcher has started on each node: `srun pydist run -n 4 train.py`."""

import argparse
import os
import sys

from pydist.errors import InvalidUsage
from pydist.job.launchers import read_placement
from pydist.job.meeting.host_address import reachable_address

__all__ = ["take_nodes_of_launcher"]

# Where one of these is set, `pydist run` begins a job of its own.
_OWN_JOB = (
    # In a rank of torchrun's.
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    # In the shell of `srun --pty bash`: somebody types the command there, and on no other node.
    "SLURM_PTY_PORT",
)


def take_nodes_of_launcher(options: argparse.Namespace) -> None:
    """Makes this command a node of the job that its launcher has started.

    Each process of srun, of SkyPilot, or of mpirun, that runs this command is a node of one job,
    where each would otherwise begin a job of its own.

    Args:
        options: torchrun's, parsed; they say nothing of nodes or a meeting place.

    Raises:
        InvalidUsage: nobody knows an address of the first node.
    """
    if any(name in os.environ for name in _OWN_JOB):
        return
    try:
        placement = read_placement()
    except InvalidUsage:  # the launcher does not tell enough
        return
    if placement.rendezvous is None:
        return
    address = reachable_address(placement.rendezvous.address)
    options.nnodes, options.node_rank = str(placement.world_size), placement.rank
    options.master_addr, options.master_port = address, placement.rendezvous.port
    if placement.rank == 0:
        print(
            f"pydist run: node 0 of {placement.world_size}, as {placement.launcher} has started "
            f"them, waits for the others at {address}:{options.master_port}",
            file=sys.stderr,
            flush=True,
        )
