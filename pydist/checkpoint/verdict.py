"""What ranks tell each other about a checkpoint, so that all go on or all raise the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from pydist.errors import CheckpointError, InvalidUsage, Mismatch
from pydist.job.rank_names import name_ranks

if TYPE_CHECKING:
    from pydist._native import Communicator


def exchange(communicator: Communicator, call: str, mine: bytes) -> list[bytes]:
    """Some bytes of each rank, in rank order. All ranks call it.

    `call` is what the user called, for the errors of ranks that wait for those that did not.
    """
    if communicator.size == 1:
        return [mine]
    sizes = torch.empty(communicator.size, dtype=torch.int64)
    communicator.all_gather(torch.tensor([len(mine)]), sizes, label=call)
    longest = max(1, int(sizes.max()))
    padded = torch.zeros(longest, dtype=torch.uint8)
    if mine:
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    gathered = torch.empty(communicator.size * longest, dtype=torch.uint8)
    communicator.all_gather(padded, gathered, label=call)
    rows = gathered.view(communicator.size, longest)
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]


def agree(
    communicator: Communicator,
    call: str,
    doing: str,
    error: BaseException | None,
    facts: str = "",
) -> None:
    """Raises on every rank what went wrong on any. All ranks call it.

    Args:
        communicator: The ranks.
        call: What the user called.
        doing: What was tried, for the message.
        error: What went wrong here; None if nothing.
        facts: What must be the same on all ranks.

    Raises:
        InvalidUsage: The call itself was wrong, on some rank.
        CheckpointError: Something else went wrong on some rank.
        Mismatch: `facts` differ.
    """
    kind = "" if error is None else _kind(error)
    text = "" if error is None else _said(error)
    answers = [
        json.loads(answer)
        for answer in exchange(communicator, call, json.dumps([kind, text, facts]).encode())
    ]
    failed = [(rank, kind, text) for rank, (kind, text, _) in enumerate(answers) if kind]
    if failed:
        ranks_of: dict[str, list[int]] = {}
        for rank, _, told in failed:
            ranks_of.setdefault(told, []).append(rank)
        said = "; ".join(
            told if len(ranks) == communicator.size else f"{name_ranks(ranks)}: {told}"
            for told, ranks in ranks_of.items()
        )
        is_usage = all(kind == "InvalidUsage" for _, kind, _ in failed)
        raised = InvalidUsage if is_usage else CheckpointError
        raise raised(f"{doing} failed. {said}") from error
    other = next((r for r, answer in enumerate(answers) if answer[2] != answers[0][2]), None)
    if other is not None:
        raise Mismatch(
            f"{doing} was called otherwise on rank {other} than on rank 0: {answers[other][2]}, "
            f"where rank 0 has {answers[0][2]}; all ranks pass the same"
        )


def _kind(error: BaseException) -> str:
    return "InvalidUsage" if isinstance(error, InvalidUsage) else "CheckpointError"


def _said(error: BaseException) -> str:
    if isinstance(error, (InvalidUsage, CheckpointError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
