"""Sees to it that all ranks start from the same module."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.errors import Mismatch
from pydist.job.rank_names import culprits
from pydist.parallel.rank_local import RankLocal
from pydist.parallel.trained_parameters import ids_of_sparse

if TYPE_CHECKING:
    from pydist._native import Communicator


def facts_of(module: RankLocal) -> list[str]:
    """What must be the same on all ranks, a line for each parameter and buffer."""
    lines = []
    sparse = ids_of_sparse(module.module)
    for name, parameter in module.shared_parameters():
        kind = "parameter" if parameter.requires_grad else "frozen parameter"
        kind_of_gradient = ", sparse gradient" if id(parameter) in sparse else ""
        lines.append(f"{kind} {name}: {_layout(parameter)}{kind_of_gradient}")
    for name, buffer in module.shared_buffers():
        lines.append(f"buffer {name}: {_layout(buffer)}")
    return lines


def _layout(tensor: Tensor) -> str:
    layout = f"{tuple(tensor.shape)} {tensor.dtype}"
    return layout if tensor.is_contiguous() else f"{layout} with strides {tensor.stride()}"


def check_same(
    communicator: Communicator,
    what: str,
    facts: list[str],
    remedy: str = "build the same module with the same arguments on every rank before training it",
) -> None:
    """Compares some facts with the other ranks'. All ranks call it together.

    Args:
        communicator: The ranks.
        what: What the facts are about, for the error.
        facts: Sentences without a verb; the same on every rank.
        remedy: What to do where they are not.

    Raises:
        Mismatch: They differ (on every rank, naming the first difference).
    """
    text = json.dumps(facts).encode()
    # Digests first: a large model's names are long, and in all but the faulty case the same.
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    heads = _gather(communicator, torch.tensor([digest, len(text)]))
    if all(torch.equal(head, heads[0]) for head in heads):
        return
    padded = text.ljust(int(max(head[1] for head in heads)))
    texts = _gather(communicator, torch.frombuffer(bytearray(padded), dtype=torch.uint8))
    everybody = [json.loads(bytes(gathered.tolist())) for gathered in texts]
    other = next(rank for rank, lines in enumerate(everybody) if lines != everybody[0])
    raise Mismatch(
        f"{what} differs between ranks 0 and {other}: {_difference(everybody, other)}; {remedy}",
        **culprits(communicator, [0, other], "ranks differ"),
    )


def _difference(facts: list[list[str]], other: int) -> str:
    first, second = facts[0], facts[other]
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours}, where rank {other} has {theirs}"
    longer, shorter = (0, other) if len(first) > len(second) else (other, 0)
    extra = facts[longer][len(facts[shorter])]
    return f"rank {longer} has {extra}, which rank {shorter} lacks"


def _gather(communicator: Communicator, tensor: Tensor) -> list[Tensor]:
    gathered = tensor.new_empty(communicator.size * tensor.numel())
    communicator.all_gather(tensor, gathered, False)
    return list(gathered.view(communicator.size, -1))


def copy_from(
    communicator: Communicator,
    root: int,
    module: RankLocal,
    *,
    with_parameters: bool = True,
    with_buffers: bool = True,
) -> None:
    """Gives every rank one rank's parameters and buffers. All ranks call it together."""
    named: list[tuple[str, Tensor]] = []
    if with_parameters:
        named += module.shared_parameters()
    if with_buffers:
        named += module.shared_buffers()
    for _, tensor in named:
        # Byte by byte, because not every backend can carry every dtype.
        memory = tensor.detach().contiguous()
        communicator.broadcast(memory.view(-1).view(torch.uint8), root, False)
        if communicator.rank != root:
            with torch.no_grad():
                tensor.copy_(memory)
