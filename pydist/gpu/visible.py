"""Which GPUs CUDA shows to this process, without starting CUDA.

CUDA numbers what `CUDA_VISIBLE_DEVICES` lists, in that order, from 0; without the variable it
numbers all GPUs of the host. An entry is a number, the UUID of a GPU ("GPU-3f2a...", which may be
cut short), or that of a MIG instance ("MIG-..."). What follows an entry that names nothing does not
count, and a list that names something twice counts as empty. Of MIG instances CUDA shows a process
the first alone, so each rank needs a list of its own (`narrow_to_own_instance`).
"""

import os
import re

import torch

VARIABLE = "CUDA_VISIBLE_DEVICES"

_ENTRY = re.compile(r"\d+|(GPU|MIG)-\S+")


def listed_gpus() -> tuple[str, ...] | None:
    """The entries of CUDA_VISIBLE_DEVICES that CUDA takes; None if the variable is not set."""
    value = os.environ.get(VARIABLE)
    if value is None:
        return None
    entries: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not _ENTRY.fullmatch(entry):
            break
        if entry in entries:
            return ()
        entries.append(entry)
    return tuple(entries)


def are_instances(entries: tuple[str, ...]) -> bool:
    """Whether they are MIG instances."""
    return bool(entries) and all(entry.startswith("MIG-") for entry in entries)


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that processes started from here could use, as CUDA_VISIBLE_DEVICES names them."""
    if not torch.backends.cuda.is_built():
        return ()
    listed, count = listed_gpus(), torch.cuda.device_count()
    if listed is None:
        return tuple(map(str, range(count)))
    # Of instances it counts one, whether or not the others exist.
    return listed if are_instances(listed) and count else listed[:count]


def why_none() -> str:
    """Why no GPU is visible, for a message that goes on from "rank 1 has no GPU: "."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    value = os.environ.get(VARIABLE)
    if value is None:
        return "CUDA finds none on this host (does nvidia-smi?)"
    if value.strip() in ("", "-1"):
        return f"{VARIABLE}='{value}' hides them all"
    entries = [entry.strip() for entry in value.split(",")]
    twice = [entry for entry in entries if entries.count(entry) > 1]
    if twice:
        return f"{VARIABLE}='{value}' names {twice[0]} twice, so CUDA shows none"
    return f"{VARIABLE}='{value}' names none that CUDA finds on this host"


def names_absent_gpus() -> bool:
    """Whether, of those that CUDA_VISIBLE_DEVICES names, CUDA shows none.

    Values that name nothing, such as an empty one, "-1", or Slurm's "NoDevFiles", hide GPUs on
    purpose.
    """
    first = os.environ.get(VARIABLE, "").split(",")[0].strip()
    is_named = _ENTRY.fullmatch(first) is not None
    return torch.backends.cuda.is_built() and is_named and torch.cuda.device_count() == 0


def narrow_to_own_instance(local_rank: int | None) -> None:
    """Leaves this rank its own of the MIG instances listed, before it starts CUDA."""
    listed = listed_gpus()
    if local_rank is None or listed is None or len(listed) < 2 or not are_instances(listed):
        return
    if not torch.cuda.is_initialized():
        os.environ[VARIABLE] = listed[local_rank % len(listed)]
