"""Refuses a sharded optimizer's state to what would take a part of it for the whole.

torch's distributed checkpoint asks any optimizer for its `state_dict()`, in which all ranks call
what they have by the same names, and keeps one rank's of each; `pydist.save(extra=)` keeps rank
0's.
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import torch

from pydist.errors import InvalidUsage

_KEEP_ONE_RANKS = ("torch.distributed.checkpoint", "pydist.checkpoint")


def refuse_checkpoints() -> None:
    """Raises InvalidUsage where what keeps one rank's part for all is among the callers."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        keeper = None
        if "checkpoint" in name:
            keeper = next((k for k in _KEEP_ONE_RANKS if f"{name}.".startswith(f"{k}.")), None)
        if keeper is not None:
            raise InvalidUsage(
                f"{keeper} would keep one rank's part of the state of a pydist.ShardedOptimizer "
                "for all of it: use pydist.save(optimizer=) and pydist.load(optimizer=), which "
                "write and read torch.distributed.checkpoint's format"
            )
        frame = frame.f_back


class RanksPart:
    """Marks a `state_dict()` as one rank's part, so that nothing of torch's takes it for the whole.

    Pickled, by `torch.save` say, it becomes a plain pair of the rank and the number of ranks. Rank
    0 warns then: it can't know whether the others keep their parts, and `if rank == 0:` is what
    people write around `torch.save`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_checkpoints()
        if self.rank == 0 and self.size > 1:
            warnings.warn(
                f"this state_dict() of a pydist.ShardedOptimizer is rank 0's part of {self.size}, "
                "of no use without the others: pydist.save(optimizer=), called on all ranks, keeps "
                "the whole state; if every rank saves its own part, in a file of its own, ignore "
                "this",
                UserWarning,
                stacklevel=2,
            )
        # What torch.load(weights_only=True) knows.
        return torch.Size, ((self.rank, self.size),)

    def __deepcopy__(self, memo: dict[int, Any]) -> RanksPart:
        return self

    def __repr__(self) -> str:
        return f"RanksPart(rank={self.rank}, size={self.size})"
