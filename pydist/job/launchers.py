"""Which rank this process is, read from what its launcher left in the environment.

Launchers and what they set, in the order in which they are asked:

    torchrun, `pydist run`, by hand   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
    Open MPI's mpirun                 OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MVAPICH2's mpirun                 MV2_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    Hydra (MPICH, Intel MPI)          PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    flux run                          FLUX_TASK_RANK, FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID
    jsrun                             JSM_NAMESPACE_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    srun                              SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID
    Cray's mpiexec (PALS)             PALS_RANKID, PMI_SIZE, PALS_LOCAL_RANKID, PMI_LOCAL_SIZE
    other PMI launchers               PMI_RANK, PMI_SIZE
    horovodrun                        HOROVOD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    SkyPilot, a process on each node  SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES
    Kubeflow, a process on each node  PET_NODE_RANK, PET_NNODES, PET_MASTER_ADDR, PET_MASTER_PORT

Hydra stands before srun because inside a Slurm allocation it starts its own proxies by srun; the
bare PMI variables stand after srun, flux and PALS because those set them too. SkyPilot and Kubeflow
stand last because a task of theirs may call any of the others. A Slurm shell (salloc, the batch
script itself) carries SLURM_* variables but is no rank: only a job step counts.

RANK=0 WORLD_SIZE=1 says that a process trains alone, whatever else is set. MASTER_ADDR and
MASTER_PORT name a place, and no rank: where nothing else is set, the process is alone.

The ranks meet at MASTER_ADDR and MASTER_PORT. Most launchers set neither: ranks of one host then
meet on the loopback device, those of a job step on the step's first host, those of SkyPilot on its
first node, at a port derived from the job's id. MPICH gives no such id: there, the process that
started this host's ranks stands for it. Nothing here talks to anybody; that a node's name may lead
nowhere is for `pydist.job.meeting.host_address`.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from pydist.errors import InvalidUsage
from pydist.job.processes import status_of
from pydist.job.signs_of_others import doubt, refuse_signs_of_others

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
    # A sentence for a user who may have meant several processes; empty if there is no doubt.
    doubt: str = ""


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher."""

    name: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    # The number of hosts, in the first of these variables that is set.
    host_count: tuple[str, ...] = ()
    # What all ranks of a job share and no other job of this user has: the first of these texts
    # whose variables are all set.
    job: tuple[str, ...] = ()


_TORCHRUNS_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TORCHRUN = _Launcher("torchrun's variables", *_TORCHRUNS_NAMES)
_OPEN_MPI = _Launcher(
    "mpirun (Open MPI)",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE {PMIX_NAMESPACE}", "ess_base_jobid {OMPI_MCA_ess_base_jobid}"),
)
_MVAPICH = _Launcher(
    "mpirun (MVAPICH2)",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    job=("PMI_JOBID {PMI_JOBID}",),
)
_HYDRA = _Launcher(
    "mpirun (MPICH or Intel MPI)",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    job=("I_MPI_HYDRA_UUID {I_MPI_HYDRA_UUID}", "PMI_JOBID {PMI_JOBID}"),
)
_FLUX = _Launcher(
    "flux run",
    "FLUX_TASK_RANK",
    "FLUX_JOB_SIZE",
    "FLUX_TASK_LOCAL_ID",
    host_count=("FLUX_JOB_NNODES",),
    job=("flux {FLUX_JOB_ID}",),
)
_JSRUN = _Launcher(
    "jsrun",
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
    job=("PMIX_NAMESPACE {PMIX_NAMESPACE}",),
)
_SRUN = _Launcher(
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    host_count=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    job=("slurm {SLURM_JOB_ID}.{SLURM_STEP_ID}",),
)
_PALS = _Launcher(
    "mpiexec (PALS)",
    "PALS_RANKID",
    "PMI_SIZE",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_SIZE",
    job=("PALS_APID {PALS_APID}", "PMI_JOBID {PMI_JOBID}"),
)
_PMI = _Launcher(
    "a PMI launcher",
    "PMI_RANK",
    "PMI_SIZE",
    job=("PMIX_NAMESPACE {PMIX_NAMESPACE}", "PMI_JOBID {PMI_JOBID}"),
)
_HOROVODRUN = _Launcher(
    "horovodrun",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    job=("horovod {HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}",),
)
_SKYPILOT = _Launcher(
    "SkyPilot",
    "SKYPILOT_NODE_RANK",
    "SKYPILOT_NUM_NODES",
    host_count=("SKYPILOT_NUM_NODES",),
    job=("skypilot {SKYPILOT_TASK_ID}",),
)
_KUBEFLOW = _Launcher(
    "PET_* variables, with a process on each node,",
    "PET_NODE_RANK",
    "PET_NNODES",
    host_count=("PET_NNODES",),
)

_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def read_placement(environment: Mapping[str, str] | None = None) -> Placement:
    """Reads rank, world size and meeting place from a launcher's variables.

    Args:
        environment: the variables; by default the process's own.

    Returns:
        The placement; a world of one where no launcher has set anything.

    Raises:
        InvalidUsage: some variables of a launcher are set and others missing (the message names
            them), a value is no number or out of range, the meeting place cannot be derived, or
            the variables are those of a launcher of several processes that is not understood.
    """
    given = os.environ if environment is None else environment
    env = {name: value for name, value in given.items() if value != ""}
    if "RANK" not in env and env.get("LOCAL_RANK") == "-1":
        del env["LOCAL_RANK"]  # "of no job", as many training scripts have it
    launcher = _launcher(env)
    if launcher is not None:
        return _read(launcher, env)
    found = [name for name in _TORCHRUNS_NAMES if name in env]
    if found == [_TORCHRUN.world_size] and env[_TORCHRUN.world_size] == "1":
        return Placement(0, 1, 0, 1, None, _TORCHRUN.name)
    if found:
        needed = (_TORCHRUN.rank, _TORCHRUN.world_size, *_MASTER)
        found += [name for name in _MASTER if name in env]
        raise _incomplete(found, [name for name in needed if name not in env])
    if _is_job_step(env) and env[_SRUN.world_size] == "1":
        return Placement(0, 1, 0, 1, None, "srun")
    refuse_signs_of_others(env)
    return Placement(0, 1, 0, 1, None, "no launcher", doubt(env))


def _launcher(env: dict[str, str]) -> _Launcher | None:
    """The launcher that started this process, if its variables tell rank and size."""
    if "SKYPILOT_NUM_NODES" not in env and "SKYPILOT_NODE_IPS" in env:
        env["SKYPILOT_NUM_NODES"] = str(len(env["SKYPILOT_NODE_IPS"].split()))
    if "SLURM_STEP_NUM_TASKS" not in env and "SLURM_NTASKS" in env:
        env["SLURM_STEP_NUM_TASKS"] = env["SLURM_NTASKS"]

    def sets(launcher: _Launcher) -> bool:
        return launcher.rank in env and launcher.world_size in env

    if sets(_TORCHRUN):
        return _TORCHRUN
    # A rank of theirs without a number of ranks is an error of its own.
    for launcher in (_OPEN_MPI, _MVAPICH):
        if launcher.rank in env:
            return launcher
    if _HYDRA.rank in env and _HYDRA.local_rank in env:
        return _HYDRA
    for launcher in (_FLUX, _JSRUN):
        if sets(launcher):
            return launcher
    if _is_job_step(env) and env[_SRUN.world_size] != "1":
        return _SRUN
    if sets(_PALS):
        return _PALS
    if _PMI.rank in env:
        return _PMI
    for launcher in (_HOROVODRUN, _SKYPILOT):
        if sets(launcher):
            return launcher
    if sets(_KUBEFLOW) and _is_process_of_node(env):
        env["MASTER_ADDR"] = env["PET_MASTER_ADDR"]
        env.setdefault("PET_MASTER_PORT", "29500")  # torchrun's default
        env["MASTER_PORT"] = str(_port_in(env, "PET_MASTER_PORT"))
        return _KUBEFLOW
    return None


def _is_process_of_node(env: Mapping[str, str]) -> bool:
    """Whether PET_* variables say all that torchrun needs, and one process on each node."""
    return (
        env.get("PET_NPROC_PER_NODE", "1") == "1"
        and env.get("PET_NNODES", "").isdecimal()
        and "PET_MASTER_ADDR" in env
    )


def _incomplete(found: list[str], missing: list[str]) -> InvalidUsage:
    return InvalidUsage(
        f"the environment describes half a job: {', '.join(found)} set, {', '.join(missing)} "
        "missing. Set the missing ones (`pydist run` and torchrun set them all), or unset all of "
        "them for a world of one."
    )


def _is_job_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process, rather than a shell of salloc or a batch script."""
    needed = ("SLURM_PROCID", "SLURM_STEP_ID", _SRUN.world_size)
    if not all(name in env for name in needed):
        return False
    return _integer(env, "SLURM_STEP_ID") < _FIRST_RESERVED_STEP


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = -1
    if value < 0:
        raise InvalidUsage(f"{name}='{env[name]}' is not valid; it must be a number, 0 or more.")
    return value


def _port_in(env: Mapping[str, str], name: str) -> int:
    port = _integer(env, name)
    if not 0 < port < 2**16:
        raise InvalidUsage(f"{name}={port} is not valid; use a port from 1 to 65535.")
    return port


def _read(launcher: _Launcher, env: Mapping[str, str]) -> Placement:
    if launcher.world_size not in env:
        raise _incomplete([launcher.rank], [launcher.world_size])
    rank, world_size = _integer(env, launcher.rank), _integer(env, launcher.world_size)
    _check_range(launcher.rank, rank, launcher.world_size, world_size)
    if world_size == 1:
        # The process is alone, whatever else a launcher of several processes has set.
        return Placement(0, 1, 0, 1, None, launcher.name)
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
    hosts = next((env[name] for name in launcher.host_count if name in env), None)
    one_host = local_world_size == world_size or hosts == "1"
    rendezvous = _rendezvous(launcher, env, one_host)
    return Placement(rank, world_size, local_rank, local_world_size, rendezvous, launcher.name)


def _check_range(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise InvalidUsage(
            f"{rank_name}={rank} and {size_name}={size} contradict each other: ranks count from 0 "
            f"to {size_name} - 1."
        )


def _rendezvous(launcher: _Launcher, env: Mapping[str, str], one_host: bool) -> Rendezvous:
    if all(name in env for name in _MASTER):
        return Rendezvous(env["MASTER_ADDR"], _port_in(env, "MASTER_PORT"))
    if launcher is _TORCHRUN:
        found = [name for name in (launcher.rank, launcher.world_size, *_MASTER) if name in env]
        raise _incomplete(found, [name for name in _MASTER if name not in env])
    job = _job(launcher, env)
    address = env.get("MASTER_ADDR")
    if address is None:
        address = "127.0.0.1" if one_host else _first_host_of(launcher, env)
    if address is None or (job is None and "MASTER_PORT" not in env):
        what = "address of rank 0" if address is None else "job's id"
        variable = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise InvalidUsage(
            f"{launcher.name} gives rank {env[launcher.rank]} of {env[launcher.world_size]}, but "
            f"the {what} can't be told from its variables. Set {variable} to where rank 0 "
            "can be reached, the same on all ranks "
            "(for example `mpirun -n 2 env MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python …`)."
        )
    port = _port_in(env, "MASTER_PORT") if "MASTER_PORT" in env else _port(job or "")
    return Rendezvous(address, port, job or "")


def _job(launcher: _Launcher, env: Mapping[str, str]) -> str | None:
    """Something that all ranks of this job share and that no other job of this user has."""
    for text in launcher.job:
        with suppress(KeyError):
            return text.format_map(env)
    return _hydra_proxy() if launcher is _HYDRA else None


def _hydra_proxy() -> str | None:
    """Process id and start time of the nearest ancestor that is one of Hydra's proxies."""
    pid = os.getpid()
    while pid > 1:
        try:
            status = status_of(pid)
        except OSError:
            return None
        if status.name.startswith("hydra_"):
            return f"hydra {pid} {status.started}"
        pid = status.parent
    return None


def _port(job: str) -> int:
    digest = hashlib.sha256(f"{os.getuid()} {job}".encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:8], "big") % _PORT_COUNT


def _first_host_of(launcher: _Launcher, env: Mapping[str, str]) -> str | None:
    """Where rank 0 is, as far as the launcher tells."""
    if launcher is _SRUN:
        hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST"))
        return first_host(hosts) if hosts else env.get("SLURM_LAUNCH_NODE_IPADDR")
    if launcher is _SKYPILOT:
        return next(iter(env.get("SKYPILOT_NODE_IPS", "").split()), None)
    return None


def first_host(hosts: str) -> str:
    """The first name of a Slurm host list: "node[03-07,12],gpu1" begins with "node03"."""
    name = ""
    while hosts and not hosts.startswith(","):
        bracket = re.match(r"\[([^],-]+)[^]]*\]", hosts)
        name += bracket.group(1) if bracket else hosts[0]
        hosts = hosts[bracket.end() if bracket else 1 :]
    return name
