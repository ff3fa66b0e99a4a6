"""Signs in the environment of processes that pydist can't tell the ranks of.

Note [Signs of other processes]
A process that takes itself for the only one, and is not, trains a model of its own and overwrites
the others' checkpoint. So variables that show a launcher which started several processes, or may
have, and which do not suffice to tell the ranks, are an error. That holds for PMIX_RANK, which
comes without a number of ranks, and for a local rank of an MPI's alone. torchrun's arguments take
their defaults from PET_* variables: where these say all that torchrun needs, and one process on
each node, the script without torchrun is that process; otherwise they are an error as well. What
shows only that more processes were planned for (a Slurm shell of several tasks, PET_NPROC_PER_NODE,
NNODES, a cluster for TensorFlow), or that there are more which may have nothing to do with each
other (an index of Kubernetes, Volcano or Google Cloud Batch), is told in a sentence, since one
process in such a place is common.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from pydist.errors import InvalidUsage


@dataclass(frozen=True)
class _Sign:
    """A variable that a launcher sets which may have started several processes."""

    variable: str
    # What tells the number of processes, or nothing.
    size: str = ""
    # What to do about this launcher; by default what serves for any.
    advice: str = ""
    # Whether 0 without a number of processes is what a process alone may have, too.
    counts_from_1: bool = False


_FOR_TORCHRUN = (
    "PET_* variables are arguments for torchrun, and suffice without it only for one process on "
    "each node (PET_NPROC_PER_NODE=1, PET_NNODES a number, PET_NODE_RANK, PET_MASTER_ADDR and "
    "PET_MASTER_PORT): start the script by `torchrun` or `pydist run`, which read them, on every "
    "node."
)

# What is asked once no launcher was understood. See Note [Signs of other processes].
_SIGNS = (
    _Sign("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    _Sign("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    _Sign("PALS_RANKID"),
    _Sign("ALPS_APP_PE"),
    _Sign("MPIRUN_RANK", "MPIRUN_NPROCS"),
    _Sign("MP_CHILD", "MP_PROCS"),
    _Sign("PMIX_RANK"),
    _Sign("PMI_ID", "PMI_SIZE"),
    _Sign("LWS_WORKER_INDEX", "LWS_GROUP_SIZE"),
    _Sign("OMPI_COMM_WORLD_LOCAL_RANK"),
    _Sign("MV2_COMM_WORLD_LOCAL_RANK"),
    _Sign("MPI_LOCALRANKID"),
    _Sign("PMI_LOCAL_RANK"),
    _Sign("HOROVOD_RANK", "HOROVOD_SIZE"),
    _Sign("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    _Sign("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
    _Sign("SM_HOSTS", "SM_HOSTS"),
    _Sign("LSF_PM_TASKID"),
    _Sign("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    _Sign("MLP_ROLE_INDEX", "MLP_WORKER_NUM", counts_from_1=True),
    _Sign("NODE_RANK", "NNODES", counts_from_1=True),
    _Sign("PET_NODE_RANK", "PET_NNODES", _FOR_TORCHRUN, counts_from_1=True),
    _Sign("PET_NNODES", "PET_NNODES", _FOR_TORCHRUN),
)

# What shows how many processes were planned for.
_PLANS = (
    *("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
    *("PET_NPROC_PER_NODE", "PET_RDZV_ENDPOINT"),
    *("NNODES", "AZUREML_NODE_COUNT", "DMLC_NUM_WORKER", "TF_CONFIG"),
)

_ALONE = "If this process is to train alone, set RANK=0 WORLD_SIZE=1."


def refuse_signs_of_others(env: Mapping[str, str]) -> None:
    """Raises InvalidUsage where a launcher may have started more processes; names the variable."""
    for sign in _SIGNS:
        if sign.variable not in env or _largest_size(env.get(sign.size, "")) == 1:
            continue
        if sign.counts_from_1 and env[sign.variable] == "0" and sign.size not in env:
            continue
        told = f"{sign.variable}={env[sign.variable]}"
        if sign.size not in ("", sign.variable):
            told += f", {sign.size}={env.get(sign.size, 'not set')}"
        advice = sign.advice or (
            "pydist can't tell the ranks from the variables of this launcher: set RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from them, or start the script by "
            "`pydist run`, torchrun, mpirun or srun."
        )
        raise InvalidUsage(
            f"{told} in the environment shows a launcher that may have started several processes, "
            f"of which each would train a model of its own. {advice} {_ALONE}"
        )


def _largest_size(value: str) -> int:
    """The number of processes by such a variable: "4", "1:4", a JSON list, or TensorFlow's cluster.

    0 where unknown.
    """
    with suppress(ValueError, AttributeError, TypeError):
        names = json.loads(value)
        if isinstance(names, dict):  # without a cluster it is one process
            cluster = names.get("cluster") or {}
            return max(1, sum(len(tasks) for tasks in cluster.values()))
        if isinstance(names, list):
            return len(names)
    with suppress(ValueError):
        return int(value.rpartition(":")[2])
    return 0


def doubt(env: Mapping[str, str]) -> str:
    """A sentence where several processes were planned for, and this one was started alone."""
    for planned in _PLANS:
        if planned in env and _largest_size(env[planned]) != 1:
            start = "srun" if planned.startswith("SLURM_") else "torchrun or `pydist run`"
            return (
                f"{planned}={env[planned]:.60} is set, but {start} has not started this process, "
                f"so it trains alone: start the script by {start} if several processes are meant, "
                "or set RANK=0 WORLD_SIZE=1 if this one is."
            )
    for index, size, manager in (
        ("JOB_COMPLETION_INDEX", "", "Kubernetes"),
        ("VC_TASK_INDEX", "", "Volcano"),
        ("BATCH_TASK_INDEX", "BATCH_TASK_COUNT", "Google Cloud Batch"),
    ):
        if index in env and _largest_size(env.get(size, "")) != 1:
            return (
                f"{index}={env[index]} is set by {manager}, which may have started more processes, "
                "but no rank, so this one trains alone: set RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT if they are to train together, or RANK=0 WORLD_SIZE=1 if not."
            )
    return ""
