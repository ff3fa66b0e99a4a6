"""The GPU of a rank: what a rank tells the others of its GPUs, and which one it takes.

The GPU of the i-th rank of a host is the i-th of those that the rank sees, and they are dealt out
again from the first where ranks outnumber them; a rank that sees one takes that one. A process that
has made another GPU than the first its current one, before it joined, has chosen for itself.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from pydist._torch import when_cuda_starts
from pydist.errors import InvalidUsage, TransportError
from pydist.gpu.nccl import find_nccl
from pydist.gpu.visible import names_absent_gpus, narrow_to_own_instance, why_none
from pydist.job.launchers import read_placement

__all__ = [
    "describe_gpus",
    "gpu_of_local_rank",
    "gpus_of_ranks",
    "identify_gpus",
    "make_current",
]


def describe_gpus(wants_nccl: bool) -> dict[str, Any]:
    """What a rank tells the others of its GPUs, as JSON takes it.

    Starts CUDA only where the job may use NCCL and this process sees a GPU.

    Args:
        wants_nccl: whether the job would use NCCL if it could.

    Returns:
        `local_rank`, by the launcher, or None; `for_cuda`, whether torch is built for it; `gpus`, a
        list with the `uuid` and `pci` address of each visible GPU, empty strings where nobody asked
        CUDA for them; `chosen`, the number of the one that this process has made current, or None;
        where there is none, `no_gpu` says why; `misses_gpu`, whether that can't be meant: CUDA does
        not start, or CUDA_VISIBLE_DEVICES names GPUs that are not there. If NCCL might serve:
        `nccl`, its version as a number, or `nccl_problem`; and `sharing`, what was set to let ranks
        share a GPU.
    """
    told: dict[str, Any] = {
        "local_rank": None,
        "for_cuda": torch.backends.cuda.is_built(),
        "gpus": [],
        "chosen": None,
        "misses_gpu": False,
    }
    if told["for_cuda"]:
        with suppress(InvalidUsage):
            placement = read_placement()
            # Without a launcher every process looks like a world of its own.
            told["local_rank"] = placement.local_rank if placement.world_size > 1 else None
        narrow_to_own_instance(told["local_rank"])
        told["gpus"] = [{"uuid": "", "pci": ""}] * torch.cuda.device_count()
    if told["gpus"] and wants_nccl:
        told["gpus"], problem = identify_gpus()
        if problem:
            return {**told, "no_gpu": problem, "misses_gpu": True}
        nccl = find_nccl()
        told.update({"nccl_problem": nccl.problem} if nccl.problem else {"nccl": nccl.code})
        told["sharing"] = {
            "host": os.environ.get("NCCL_HOSTID", ""),
            "allowed": os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0"),
        }
    if not told["gpus"]:
        told.update(no_gpu=why_none(), misses_gpu=names_absent_gpus())
    elif torch.cuda.is_initialized() and (current := torch.cuda.current_device()) != 0:
        told["chosen"] = current
    return told


def identify_gpus() -> tuple[list[dict[str, str]], str]:
    """UUID and address of each visible GPU, by CUDA, which it starts; or none, and why."""
    if not torch.backends.cuda.is_built() or torch.cuda.device_count() == 0:
        return [], why_none()
    try:
        return [_identity(index) for index in range(torch.cuda.device_count())], ""
    # A driver that is too old, a GPU that is in use exclusively; the second error is what fails of
    # the calls that wait for CUDA to start, and is of no kind.
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        return [], f"CUDA does not start: {error}"


def _identity(index: int) -> dict[str, str]:
    properties: Any = torch.cuda.get_device_properties(index)
    # MIG instances of one GPU have one address, and NCCL goes by the address.
    place = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    pci = "" if -1 in place else f"{place[0]:08x}:{place[1]:02x}:{place[2]:02x}"
    return {"uuid": f"GPU-{properties.uuid}", "pci": pci}


def gpu_of_local_rank(local_rank: int, count: int, chosen: int | None = None) -> int | None:
    """The number of the GPU that a rank takes of the `count` that it sees; None without any."""
    if count == 0:
        return None
    return local_rank % count if chosen is None else chosen


def gpus_of_ranks(hellos: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """The number of the GPU that each rank takes, of those that it sees itself."""
    taken = []
    on_host: dict[str, int] = {}
    for hello in hellos:
        place = on_host.setdefault(hello["host"], 0)
        on_host[hello["host"]] += 1
        local_rank = place if hello["local_rank"] is None else hello["local_rank"]
        taken.append(gpu_of_local_rank(local_rank, len(hello["gpus"]), hello["chosen"]))
    return taken


def make_current(gpu: int) -> None:
    """Makes a GPU this process's current one, no sooner than the process first uses CUDA.

    Setting it would start CUDA, which costs time, and memory of the GPU.

    Raises:
        TransportError: the GPU can't be used: it is full, or another process has it for itself.
    """
    if torch.cuda.is_initialized():
        try:
            torch.cuda.set_device(gpu)
        except RuntimeError as error:
            raise TransportError(f"this rank can't use its own GPU, cuda:{gpu}: {error}") from error
    else:
        when_cuda_starts(lambda: torch.cuda.set_device(gpu))
