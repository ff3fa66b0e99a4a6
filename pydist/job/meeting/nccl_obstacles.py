"""Whether NCCL can join the GPUs of all ranks of a job, judged from what all of them told.

NCCL refuses ranks of one host that share a GPU. It lets them where NCCL_HOSTID makes it take them
for ranks of different hosts, and from 2.30.3 on where all of them set NCCL_MULTI_RANK_GPU_ENABLE=1.
Both are for tests: kernels of ranks that wait for each other then take turns on one GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydist.gpu.nccl import version_of
from pydist.job.meeting.gpu_assignment import describe_gpus, gpus_of_ranks
from pydist.job.rank_names import name_ranks, who_said_what

__all__ = ["Obstacle", "why_no_nccl_here", "why_not_nccl"]

_FIRST_SHARING_NCCL = 23_003

_ELSEWHERE = "PYDIST_BACKEND=auto takes another backend"


class Obstacle(NamedTuple):
    """A reason why the ranks of a job can't use NCCL."""

    why: str
    # What a user who asked for NCCL can do.
    way_out: str
    # The name of the error that they get.
    error: str = "InvalidUsage"


def why_not_nccl(
    hellos: Sequence[Mapping[str, Any]], gpus: Sequence[int | None]
) -> Obstacle | None:
    """The reason why these ranks can't use NCCL; None if they can.

    Args:
        hellos: what each rank told (`describe_gpus`, and its `host`).
        gpus: the number of the GPU that each takes.

    Returns:
        None if NCCL can join them.
    """
    return _no_gpu(hellos, gpus) or _no_library(hellos) or _shared(hellos, gpus)


def why_no_nccl_here() -> str:
    """Why a world of this process alone can't use NCCL; an empty string if it can."""
    alone = {**describe_gpus(wants_nccl=True), "host": ""}
    obstacle = why_not_nccl([alone], gpus_of_ranks([alone]))
    return obstacle.why if obstacle is not None else ""


def _no_gpu(hellos: Sequence[Mapping[str, Any]], gpus: Sequence[int | None]) -> Obstacle | None:
    without = {rank: hellos[rank]["no_gpu"] for rank, gpu in enumerate(gpus) if gpu is None}
    if not without:
        return None
    by_reason: dict[str, list[int]] = {}
    for rank, reason in without.items():
        by_reason.setdefault(reason, []).append(rank)
    return Obstacle(
        "; ".join(
            f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} no GPU: {reason}"
            for reason, ranks in by_reason.items()
        ),
        f"Show every rank a GPU of its own (`pydist run --gpus -1`); {_ELSEWHERE}.",
    )


def _no_library(hellos: Sequence[Mapping[str, Any]]) -> Obstacle | None:
    problems = [
        f"rank {rank}: {hello['nccl_problem']}"
        for rank, hello in enumerate(hellos)
        if "nccl_problem" in hello
    ]
    if problems:
        return Obstacle(
            "; ".join(problems),
            f"CUDA builds of torch bring NCCL along; {_ELSEWHERE}.",
            "TransportError",
        )
    if len({hello["nccl"] for hello in hellos}) > 1:
        versions = who_said_what(f"NCCL {version_of(hello['nccl'])}" for hello in hellos)
        return Obstacle(
            f"the ranks have different versions: {versions}",
            f"Install the same everywhere; {_ELSEWHERE}.",
            "Mismatch",
        )
    return None


def _shared(hellos: Sequence[Mapping[str, Any]], gpus: Sequence[int | None]) -> Obstacle | None:
    said = []
    for ranks in _sharers(hellos, gpus):
        if not _may_share([hellos[rank] for rank in ranks]):
            number = gpus[ranks[0]]
            assert number is not None
            said.append(f"{name_ranks(ranks)} share GPU {number} ({_name(hellos, gpus, ranks)})")
    if not said:
        return None
    return Obstacle(
        "; ".join(said),
        "Give every rank a GPU of its own (`pydist run --gpus -1`, or CUDA_VISIBLE_DEVICES), start "
        "fewer ranks, or use PYDIST_BACKEND=native (gloo for several hosts), where tensors on a "
        "shared GPU travel through the host's memory. In tests NCCL lets ranks share a GPU that "
        "have different NCCL_HOSTIDs, or, from 2.30.3 on, NCCL_MULTI_RANK_GPU_ENABLE=1.",
    )


def _name(
    hellos: Sequence[Mapping[str, Any]], gpus: Sequence[int | None], ranks: Sequence[int]
) -> str:
    """The UUID of the GPU that ranks share; the address of one whose instances are shared out."""
    taken = [hellos[rank]["gpus"][gpus[rank]] for rank in ranks]
    of_first: dict[str, str] = taken[0]
    return of_first["uuid" if len({gpu["uuid"] for gpu in taken}) == 1 else "pci"]


def _sharers(hellos: Sequence[Mapping[str, Any]], gpus: Sequence[int | None]) -> list[list[int]]:
    """The groups of ranks, two and more, that take one GPU.

    Containers on one host have different names for it but see the same UUIDs; MIG instances of one
    GPU may have UUIDs of their own, but share its address.
    """
    groups: list[list[int]] = []
    known: dict[tuple[str, ...], list[int]] = {}
    for rank, (hello, number) in enumerate(zip(hellos, gpus, strict=True)):
        if number is None:
            continue
        gpu = hello["gpus"][number]
        keys: list[tuple[str, ...]] = [(gpu["uuid"],)]
        if gpu["pci"]:
            keys.append((hello["host"], gpu["pci"]))
        group = next((known[key] for key in keys if key in known), None)
        if group is None:
            group = []
            groups.append(group)
        group.append(rank)
        known.update(dict.fromkeys(keys, group))
    return [group for group in groups if len(group) > 1]


def _may_share(sharers: Sequence[Mapping[str, Any]]) -> bool:
    settings = [hello["sharing"] for hello in sharers]
    hosts = {setting["host"] for setting in settings if setting["host"]}
    if len(hosts) == len(settings):
        return True
    return all(
        setting["allowed"] and hello["nccl"] >= _FIRST_SHARING_NCCL
        for setting, hello in zip(settings, sharers, strict=True)
    )
