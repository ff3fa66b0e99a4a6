"""A process of a benchmark, which ranks.py starts as a program of its own.

It connects to the conductor, says which rank it is, and does what it is told until it is told to
stop or the conductor is gone.
"""

import argparse
import gc
import os
import signal
from multiprocessing.connection import Client, Connection

import pydist
from pydist.benchmarks import machine
from pydist.benchmarks.processes.arms import (
    Arm,
    GlooArm,
    MpiArm,
    PydistArm,
    RooflineArm,
    SharedArm,
    SymmetricArm,
)
from pydist.benchmarks.processes.link_arm import LinkArm
from pydist.benchmarks.processes.rank_commands import Failed, Stop, obey

_KINDS: dict[str, type[PydistArm] | type[GlooArm] | type[LinkArm]] = {
    "pydist": PydistArm,
    "symmetric": SymmetricArm,
    "shared": SharedArm,
    "roofline": RooflineArm,
    "link": LinkArm,
    "gloo": GlooArm,
}


def make_arms(names: list[str]) -> dict[str, Arm]:
    """The arms that live in torch, on the job that this process has joined. Every rank calls it.

    Args:
        names: of arms; "again" is another one of the first's kind.
    """
    kinds = {name: _KINDS[names[0] if name == "again" else name] for name in names}
    return {name: kind(pydist.rank(), pydist.world_size()) for name, kind in kinds.items()}


def prepare(local_rank: int, *, pin: bool) -> None:
    """Keeps out of the measurements what is not measured; once all arms have been made.

    The threads that they have started may run anywhere, as they may for users: only the thread that
    computes has a core of its own.
    """
    # A collection looks at everything that torch has made: tens of milliseconds.
    gc.disable()
    if pin:
        machine.pin(local_rank)


def _serve(connection: Connection, arms: dict[str, Arm]) -> None:
    while True:
        try:
            command = connection.recv()
        except (EOFError, OSError):
            return  # the conductor is gone
        if isinstance(command, Stop):
            return
        connection.send(obey(command, arms))


def main() -> None:
    """The life of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--arms", default="", help="of torch, with commas between them")
    parser.add_argument("--mpi", nargs=2, metavar=("NAME", "SITE_PACKAGES"))
    parser.add_argument("--no-pin", action="store_true")
    options = parser.parse_args()
    # The conductor, which shares the terminal, decides what Ctrl-C means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Client(options.address) as connection:
        arms: dict[str, Arm] = {}
        try:
            if options.mpi:
                name, site_packages = options.mpi
                arms[name] = mpi = MpiArm(site_packages)
                rank, local_rank, size = mpi.rank, mpi.rank, mpi.size
            else:
                rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
                size = int(os.environ["WORLD_SIZE"])
                pydist.init()
                arms = make_arms(options.arms.split(","))
            prepare(local_rank, pin=not options.no_pin)
        except Exception as error:
            connection.send((-1, 0, Failed(str(error).split("\n")[0], is_unsupported=False)))
            return
        connection.send((rank, size, None))
        _serve(connection, arms)


if __name__ == "__main__":
    main()
