"""Which rank this process is, read from what its launcher left in the environment.

Launchers and what they set, in the order in which they are asked:

    torchrun, `pydist run`, by hand   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
    Open MPI's mpirun                 OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    Hydra (MPICH, Intel MPI)          PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    srun                              SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID
    other PMI launchers               PMI_RANK, PMI_SIZE

Hydra stands before srun because inside a Slurm allocation it starts its own proxies by srun; the
bare PMI variables stand after it because srun's PMI plugins set them too. A Slurm shell (salloc,
the batch script itself) carries SLURM_* variables but is no rank: only a job step counts.

The ranks meet at MASTER_ADDR and MASTER_PORT. mpirun and srun set neither: ranks of one host then
meet on the loopback device, those of a job step on the step's first host, at a port derived from
the job's id. MPICH gives no such id: there, the process that started this host's ranks stands for
it. Nothing here talks to anybody.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydist.errors import InvalidUsage

__all__ = ["Placement", "Rendezvous", "read_placement"]

# Below the ephemeral ports of Linux (32768 and up), above what services use.
_FIRST_PORT = 20_000
_PORT_COUNT = 12_000

# Slurm's own steps (extern, batch script, interactive shell) have ids near 2**32.
_FIRST_RESERVED_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a job meet."""

    address: str
    port: int
    # Keeps jobs apart that meet at the same place.
    job: str = ""


@dataclass(frozen=True)
class Placement:
    """This process's place in its job."""

    rank: int
    world_size: int
    # None where the launcher does not say.
    local_rank: int | None
    local_world_size: int | None
    # None in a world of one, which needs no server.
    rendezvous: Rendezvous | None
    # For messages: "torchrun", "mpirun (Open MPI)", ...
    launcher: str


@dataclass(frozen=True)
class _Launcher:
    name: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""


_TORCHRUN = _Launcher(
    "torchrun's variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
)
_OPEN_MPI = _Launcher(
    "mpirun (Open MPI)",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = _Launcher(
    "mpirun (MPICH or Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
)
_PMI = _Launcher("a PMI launcher", "PMI_RANK", "PMI_SIZE")

_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def read_placement(environment: Mapping[str, str] | None = None) -> Placement:
    """Reads rank, world size and meeting place from a launcher's variables.

    Args:
        environment: the variables; by default the process's own.

    Returns:
        The placement; a world of one where no launcher has set anything.

    Raises:
        InvalidUsage: some variables of a launcher are set and others missing (the message names
            them), a value is no number or out of range, or the meeting place cannot be derived.
    """
    env = {name: value for name, value in (environment or os.environ).items() if value != ""}
    if "RANK" in env and "WORLD_SIZE" in env:
        return _read(_TORCHRUN, env)
    if _OPEN_MPI.rank in env:
        return _read(_OPEN_MPI, env)
    if _HYDRA.rank in env and _HYDRA.local_rank in env:
        return _read(_HYDRA, env)
    step = _slurm_step(env)
    if step is not None:
        return _read(step, env)
    if _PMI.rank in env:
        return _read(_PMI, env)
    ours = (_TORCHRUN.rank, _TORCHRUN.world_size, _TORCHRUN.local_rank, _TORCHRUN.local_world_size)
    names = (*ours, *_MASTER)
    found = [name for name in names if name in env]
    if found:
        needed = (_TORCHRUN.rank, _TORCHRUN.world_size, *_MASTER)
        raise _incomplete(found, [name for name in needed if name not in env])
    return Placement(0, 1, 0, 1, None, "no launcher")


def _incomplete(found: list[str], missing: list[str]) -> InvalidUsage:
    return InvalidUsage(
        f"the environment describes half a job: {', '.join(found)} set, {', '.join(missing)} "
        "missing. Set the missing ones (`pydist run` and torchrun set them all), or unset all of "
        "them for a world of one."
    )


def _slurm_step(env: Mapping[str, str]) -> _Launcher | None:
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if size not in env or _integer(env, "SLURM_STEP_ID") >= _FIRST_RESERVED_STEP:
        return None
    return _Launcher("srun", "SLURM_PROCID", size, "SLURM_LOCALID") if env[size] != "1" else None


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = -1
    if value < 0:
        raise InvalidUsage(f"{name}='{env[name]}' is not valid; it must be a number, 0 or more.")
    return value


def _read(launcher: _Launcher, env: Mapping[str, str]) -> Placement:
    if launcher.world_size not in env:
        raise _incomplete([launcher.rank], [launcher.world_size])
    rank, world_size = _integer(env, launcher.rank), _integer(env, launcher.world_size)
    _check_range(launcher.rank, rank, launcher.world_size, world_size)
    local_rank = _integer(env, launcher.local_rank) if launcher.local_rank in env else None
    local_world_size = None
    if launcher.local_world_size in env:
        local_world_size = _integer(env, launcher.local_world_size)
        if local_rank is not None:
            _check_range(
                launcher.local_rank, local_rank, launcher.local_world_size, local_world_size
            )
        if local_world_size > world_size:
            raise InvalidUsage(
                f"{launcher.local_world_size}={local_world_size} is more than "
                f"{launcher.world_size}={world_size}: one host can't hold more ranks than the job."
            )
    if world_size == 1:
        return Placement(0, 1, 0, 1, None, launcher.name)
    rendezvous = _rendezvous(launcher, env, local_world_size == world_size)
    return Placement(rank, world_size, local_rank, local_world_size, rendezvous, launcher.name)


def _check_range(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise InvalidUsage(
            f"{rank_name}={rank} and {size_name}={size} contradict each other: ranks count from 0 "
            f"to {size_name} - 1."
        )


def _rendezvous(launcher: _Launcher, env: Mapping[str, str], one_host: bool) -> Rendezvous:
    if all(name in env for name in _MASTER):
        port = _integer(env, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise InvalidUsage(f"MASTER_PORT={port} is not valid; use a port from 1 to 65535.")
        return Rendezvous(env["MASTER_ADDR"], port)
    if launcher is _TORCHRUN:
        found = [name for name in (launcher.rank, launcher.world_size, *_MASTER) if name in env]
        raise _incomplete(found, [name for name in _MASTER if name not in env])
    job = _job(env)
    if launcher.name == "srun":
        one_host = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1"
    address = env.get("MASTER_ADDR")
    if address is None:
        address = "127.0.0.1" if one_host else _first_slurm_host(launcher, env)
    if address is None or (job is None and "MASTER_PORT" not in env):
        what = "address of rank 0" if address is None else "job's id"
        variable = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise InvalidUsage(
            f"{launcher.name} gives rank {env[launcher.rank]} of {env[launcher.world_size]}, but "
            f"the {what} can't be told from its variables. Set {variable} to where rank 0 "
            "can be reached, the same on all ranks "
            "(for example `mpirun -n 2 env MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python …`)."
        )
    port = _integer(env, "MASTER_PORT") if "MASTER_PORT" in env else _port(job or "")
    return Rendezvous(address, port, job or "")


def _job(env: Mapping[str, str]) -> str | None:
    """Something that all ranks of this job share and that no other job of this user has."""
    if "SLURM_STEP_ID" in env and "SLURM_JOB_ID" in env:
        return f"slurm {env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "I_MPI_HYDRA_UUID", "PMI_JOBID"):
        if name in env:
            return f"{name} {env[name]}"
    return _hydra_proxy() if _HYDRA.local_rank in env else None


def _hydra_proxy() -> str | None:
    """Process id and start time of the nearest ancestor that is one of Hydra's proxies."""
    pid = os.getpid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The name stands in parentheses and may hold any character, ")" too.
        name, _, rest = stat.partition("(")[2].rpartition(")")
        fields = rest.split()
        if name.startswith("hydra_"):
            return f"hydra {pid} {fields[19]}"
        pid = int(fields[1])
    return None


def _port(job: str) -> int:
    digest = hashlib.sha256(f"{os.getuid()} {job}".encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:8], "big") % _PORT_COUNT


def _first_slurm_host(launcher: _Launcher, env: Mapping[str, str]) -> str | None:
    if launcher.name != "srun":
        return None
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST"))
    return first_host(hosts) if hosts else env.get("SLURM_LAUNCH_NODE_IPADDR")


def first_host(hosts: str) -> str:
    """The first name of a Slurm host list: "node[03-07,12],gpu1" begins with "node03"."""
    name = ""
    while hosts and not hosts.startswith(","):
        bracket = re.match(r"\[([^],-]+)[^]]*\]", hosts)
        name += bracket.group(1) if bracket else hosts[0]
        hosts = hosts[bracket.end() if bracket else 1 :]
    return name
