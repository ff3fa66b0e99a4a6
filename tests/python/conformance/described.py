"""What a backend says of itself, as the tables of docs/backends.md have it."""

from __future__ import annotations

import os

import gpu_ranks
import torch

import pydist
from conformance.references import COMPLEX, FLOAT8, FLOATS, INTEGERS, OPS
from conformance.suite import KINDS, REDUCING_KINDS

_FAMILIES = {
    "floating point": FLOATS,
    "complex": COMPLEX,
    "integers": INTEGERS,
    "bool": (torch.bool,),
    "float8": FLOAT8,
}
_LONGEST_TAG = 2**63 - 1


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _takes_own_message(rank: int, tag: int) -> str:
    """Why a message to oneself is refused; "" where it arrives."""
    try:
        work = pydist.send(torch.ones(1), rank, tag=tag, async_op=True)
    except pydist.InvalidUsage as error:
        return str(error)
    assert pydist.recv(torch.empty(1), rank, tag=tag) == rank
    work.wait()
    return ""


def _highest_tag(rank: int) -> str:
    """Found by asking, bit by bit from the highest. Tags are looked at before peers are."""
    highest = 0
    for bit in reversed(range(63)):
        candidate = highest | 1 << bit
        if "tags from" not in _takes_own_message(rank, candidate):
            highest = candidate
    return "2^63 - 1" if highest == _LONGEST_TAG else str(highest)


def reductions() -> list[str]:
    """Runs on every rank: which op is defined for which family of dtypes."""
    pydist.init()
    communicator = pydist.job.groups.communicator_of()
    lines = []
    for op in OPS:
        cells = [op]
        for dtypes in _FAMILIES.values():
            answers = {
                not communicator.why_unsupported(kind, op, dtype)
                for dtype in dtypes
                for kind in REDUCING_KINDS
            }
            cells.append("/".join(_yes(answer) for answer in sorted(answers)))
            for kind in (*KINDS, "send", "recv", "barrier"):
                if kind not in REDUCING_KINDS:
                    assert not any(communicator.why_unsupported(kind, op, d) for d in dtypes)
        lines.append(f"| {' | '.join(cells)} |")
    head = f"| op | {' | '.join(_FAMILIES)} |"
    return [head, "|---" * (len(_FAMILIES) + 1) + "|", *lines]


def differences() -> dict[str, str]:
    """Runs on every rank: what backends differ in."""
    if os.environ["PYDIST_BACKEND"] == "nccl":
        gpu_ranks.install()
    pydist.init()
    communicator = pydist.job.groups.communicator_of()
    said = communicator.capabilities()
    memory = pydist.symmetric_empty(8).fill_(1.0)
    assert pydist.all_reduce(memory).tolist() == [float(pydist.world_size())] * 8
    return {
        "devices": ", ".join(said["devices"]),
        "symmetric memory": _yes(said["symmetric_memory"]),
        "receive from any source": _yes(said["any_source"]),
        "blocks of different sizes": _yes(said["ragged"]),
        "wire types other than the tensor's": ", ".join(said["wire_dtypes"]) or "none",
        "equal bits on all ranks": _yes(said["equal_on_all_ranks"]),
        "equal bits from run to run": _yes(said["equal_from_run_to_run"]),
        "equal bits for all chunkings": _yes(said["equal_for_all_chunkings"]),
        "messages to oneself": _yes(not _takes_own_message(pydist.rank(), 0)),
        "highest tag": _highest_tag(pydist.rank()),
    }
