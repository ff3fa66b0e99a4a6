"""Finds where ranks' states of one object differ, before one of them is kept for all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist.parallel.checks.replica_check import check_same
from pydist.sampling.batch_sampler import BatchSampler
from pydist.sampling.loader import PreparedLoader
from pydist.sampling.sampler import DistributedSampler

if TYPE_CHECKING:
    from pydist._native import Communicator
    from pydist.checkpoint.several_by_name import Part

# Whose seed is agreed when they are first iterated over: until then, rank 0's counts.
_AGREED_LATER = (BatchSampler, DistributedSampler, PreparedLoader)


def require_same_state(communicator: Communicator, part: Part, state: Any) -> None:
    """Compares what the ranks have as the state of an object. All ranks call it.

    Raises:
        Mismatch: It differs (on every rank, naming the place in it).
    """
    if isinstance(part.value, _AGREED_LATER) and isinstance(state, Mapping):
        state = {key: value for key, value in state.items() if key != "seed"}
    key = part.kind if part.key is None else part.key
    check_same(
        communicator,
        f"the state of {part.label}",
        list(_lines_of(state, key)),
        "a checkpoint keeps one of them for all ranks: let all ranks do the same (schedule by what "
        "all have, such as pydist.metrics.mean(loss), and save after as many batches), or keep "
        f"each rank's by pydist.save(stateful={{{key!r}: ...}}), which loads on as many ranks",
    )


def _lines_of(value: Any, path: str) -> Iterator[str]:
    """What a value is, a line for each number, text and tensor in it, each with its place.

    Equal values have equal lines: whether two places of a value hold one object is left out.
    """
    if isinstance(value, Mapping):
        yield f"{path} of {len(value)} entries"
        for key in sorted(value, key=repr):
            yield from _lines_of(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        yield f"{path} of {len(value)} items"
        for number, item in enumerate(value):
            yield from _lines_of(item, f"{path}[{number}]")
    elif isinstance(value, (set, frozenset)):
        yield f"{path} = {sorted(map(repr, value))}"
    elif isinstance(value, Tensor):
        yield f"{path} = {_described(value)}"
    else:
        yield f"{path} = {value!r}"


def _described(tensor: Tensor) -> str:
    if tensor.numel() == 1:
        return f"{tensor.item()!r} in a tensor of {tuple(tensor.shape)} {tensor.dtype}"
    plain = tensor.detach().cpu().contiguous().view(-1)
    digest = hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return f"{tuple(tensor.shape)} {tensor.dtype} with digest {digest}"
