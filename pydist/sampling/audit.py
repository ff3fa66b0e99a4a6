"""An audit of what an epoch delivered: how many samples, and a digest of which ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pydist import _native, collectives
from pydist.errors import InvalidUsage
from pydist.job import groups, membership

_DIGESTS = 2**128
# A digest travels as words with room for the sums of 2^31 ranks' words.
_WORD_BITS = 32
_WORDS = 4


@dataclass(frozen=True)
class Ledger:
    """What was delivered of one epoch, by one rank or by several.

    Two ledgers are equal where the same samples were delivered, each as often, in whatever order
    and by whichever ranks. The digest is the sum modulo 2^128 of a hash of each index: made against
    mistakes, not against adversaries. It does not depend on the seed or the epoch, so epochs that
    delivered every sample once have the same digest.

    Attributes:
        epoch: Of which.
        count: How many samples.
        digest: 128 bits that tell which.
    """

    epoch: int
    count: int = 0
    digest: int = 0

    @staticmethod
    def of(epoch: int, indices: Tensor) -> Ledger:
        """The ledger of given samples.

        Args:
            epoch: of which.
            indices: int64, on the CPU, of any shape.

        Example:
            >>> import pydist, torch
            >>> whole = pydist.Ledger.of(0, torch.arange(10))
            >>> parts = [pydist.Ledger.of(0, part) for part in torch.randperm(10).split(3)]
            >>> sum(parts[1:], start=parts[0]) == whole
            True
        """
        high, low = _native.multiset_digest(indices)
        return Ledger(epoch, indices.numel(), (high << 64) | low)

    def __add__(self, other: Ledger) -> Ledger:
        """What both have delivered.

        Raises:
            InvalidUsage: they are of different epochs.
        """
        if not isinstance(other, Ledger):
            return NotImplemented
        if self.epoch != other.epoch:
            raise InvalidUsage(
                f"a ledger of epoch {self.epoch} and one of epoch {other.epoch} have no sum."
            )
        return Ledger(self.epoch, self.count + other.count, (self.digest + other.digest) % _DIGESTS)

    def combined(self, group: groups.Group | None = None) -> Ledger:
        """What all ranks have delivered together. Every rank of the group calls it.

        Args:
            group: whose; by default all ranks of the job. A process that has not joined one is
                alone.

        Raises:
            InvalidUsage: the ranks' ledgers are of different epochs (on every rank).
        """
        if group is None and not membership.is_initialized():
            return self
        words = [(self.digest >> (_WORD_BITS * i)) % 2**_WORD_BITS for i in range(_WORDS)]
        sums = torch.tensor([self.count, *words])
        ends = torch.tensor([self.epoch, -self.epoch])
        collectives.all_reduce(sums, "sum", group=group)
        collectives.all_reduce(ends, "max", group=group)
        latest, earliest = int(ends[0]), -int(ends[1])
        if latest != earliest:
            raise InvalidUsage(
                f"the ranks' ledgers are of different epochs, {earliest} to {latest}: combine them "
                "where all ranks are done with the same epoch."
            )
        count, *totals = sums.tolist()
        digest = sum(total << (_WORD_BITS * i) for i, total in enumerate(totals))
        return Ledger(self.epoch, count, digest % _DIGESTS)
