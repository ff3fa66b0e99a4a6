"""Notices who writes into parameters of which all ranks have one copy (`PYDIST_DEBUG=1`)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.sharded_parameters import Bucket, Segment


class ParameterAudit:
    """Checksums of this rank's segments, between two steps and before the first."""

    def __init__(self) -> None:
        self._sums: dict[Segment, int] = {}

    def note(self, buckets: Sequence[Bucket]) -> None:
        """Remembers what there is, as a step has left it. Each rank looks at its own shard."""
        self._sums |= {s: _checksum(s.values) for bucket in buckets for s in bucket.segments}

    def forget(self) -> None:
        """Somebody writes with good reason."""
        self._sums = {}

    def check(self, buckets: Sequence[Bucket], communicator: _native.Communicator) -> None:
        """Compares with what was noted. All ranks call it.

        Raises:
            InvalidUsage: Something was written, or given other memory on some ranks (on every
                rank, naming the same parameter).
        """
        members = [member for bucket in buckets for member in bucket.members]
        written = {
            segment.member.index
            for bucket in buckets
            for segment in bucket.segments
            if self._sums.get(segment, None) not in (None, _checksum(segment.values))
        }
        strays = {member.index for bucket in buckets for member in bucket.strays()}
        seen = torch.tensor([[m.index in written, m.index in strays] for m in members]).int()
        communicator.all_reduce(seen, seen, "sum", False)
        for member, (writers, replacers) in zip(members, seen.tolist(), strict=True):
            if writers or 0 < replacers < communicator.size:
                done = "written" if writers else f"given other memory on {replacers} rank(s)"
                raise InvalidUsage(
                    f"parameter {member.name} was {done} between two steps of "
                    "pydist.ShardedOptimizer, or before the first, and with share_parameters=True "
                    "all ranks read the same memory: write only through "
                    "pydist.DataParallel.load_state_dict(), on all ranks, or leave "
                    "share_parameters out"
                )


def _checksum(values: Tensor) -> int:
    flat = torch.view_as_real(values).view(-1) if values.is_complex() else values
    return zlib.crc32(cast(Any, flat.view(torch.uint8).numpy()))
