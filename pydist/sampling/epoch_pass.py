"""One pass over an epoch: what was handed out, and how much of it has arrived where it is used.

Between the two lie a loader's workers, who fetch samples long before anybody trains on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from operator import length_hint
from typing import cast

import torch
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.sampling.audit import Ledger
from pydist.sampling.order import Order
from pydist.sampling.rank_shares import Share

# Indices that are computed at once: enough that what a block costs is nothing for each of them, few
# enough that they stay in the cache, and that an epoch begins within microseconds.
_BLOCK = 2048


@dataclass(eq=False)
class EpochPass:
    """What an iterator of a sampler knows. Not thread-safe.

    Args:
        order: which sample stands where.
        seed: for it.
        epoch: for it.
        share: this rank's part.
        batch: samples of a step, where a step is what the optimizer does; 0 where unknown.
        is_counted: whether somebody says by `count_step` what has arrived. Otherwise it counts as
            arrived when it is handed out.
        on_end: called once, when all of the share has arrived.
    """

    order: Order
    seed: int
    epoch: int
    share: Share
    _: KW_ONLY
    batch: int
    is_counted: bool
    on_end: Callable[[EpochPass], None] | None

    def __post_init__(self) -> None:
        self._steps = 0
        # Blocks that have not arrived as a whole; what stands in those that have.
        self._blocks: deque[Tensor] = deque()
        self._settled = Ledger(self.epoch)
        # How many samples were handed out; and the iterator that holds the last one of those that
        # were handed out one by one.
        self._handed = 0
        self._in_hand: Iterator[int] | None = None

    @property
    def handed(self) -> int:
        """Samples handed out."""
        return self._handed - (0 if self._in_hand is None else length_hint(self._in_hand))

    @property
    def steps(self) -> int:
        """Steps that have arrived, of a pass that `is_counted`."""
        return self._steps

    @property
    def arrived(self) -> int:
        """Samples that have arrived."""
        return self.share.samples_before(self._steps) if self.is_counted else self.handed

    def single_indices(self) -> Iterator[int]:
        """All indices, of a share whose steps are of one sample for each rank."""
        # Python runs once for each block: the chain and the lists' own iterators do the rest.
        return chain.from_iterable(self._blocks_of_singles())

    def _blocks_of_singles(self) -> Iterator[Iterator[int]]:
        steps = self.share.steps
        for first in range(0, steps, _BLOCK):
            indices = self._compute(first, min(first + _BLOCK, steps)).tolist()
            # The very last one stands alone: asking for it ends the epoch.
            last = [indices.pop()] if first + _BLOCK >= steps else []
            yield self._hand_out(indices)
            if last:
                yield self._hand_out(last, is_last=True)
        self._end_unless_counted()

    def _hand_out(self, indices: list[int], is_last: bool = False) -> Iterator[int]:
        self._in_hand = iter(indices)
        self._handed += len(indices)
        if is_last:
            self._end_unless_counted()
        return self._in_hand

    def batches(self, *, as_tensors: bool) -> Iterator[list[int]] | Iterator[Tensor]:
        """The indices of each step of this rank."""
        return cast("Iterator[list[int]] | Iterator[Tensor]", self._batches(as_tensors))

    def _batches(self, as_tensors: bool) -> Iterator[list[int] | Tensor]:
        share, steps = self.share, self.share.steps
        size = max(1, share.samples_before(1))
        a_block = max(1, _BLOCK // size) if share.is_even else 1
        for first in range(0, steps, a_block):
            block = self._compute(first, min(first + a_block, steps))
            batches: Sequence[list[int] | Tensor]
            if as_tensors:
                batches = block.split(size)
            else:
                indices = block.tolist()
                batches = [indices[at : at + size] for at in range(0, len(indices), size)]
            last = batches[-1] if first + a_block >= steps else None
            for batch in batches:
                self._handed += len(batch)
                if batch is last:
                    self._end_unless_counted()
                yield batch
        self._end_unless_counted()

    def _compute(self, first: int, stop: int) -> Tensor:
        """The indices of the steps from `first` to before `stop`."""
        parts = []
        for positions in self.share.positions(first, stop):
            part = self.order.indices(positions, seed=self.seed, epoch=self.epoch)
            if part.shape != (len(positions),) or part.dtype != torch.int64:
                raise InvalidUsage(
                    f"the order '{self.order.name}' was asked for the indices at {positions}, and "
                    f"gave a tensor of {part.dtype} and shape {tuple(part.shape)}; it must be of "
                    f"torch.int64 and shape {(len(positions),)}."
                )
            parts.append(part)
        block = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._settle()
        self._blocks.append(block)
        return block

    def count_step(self) -> None:
        """Says that one more step has arrived."""
        self._steps += 1
        if self._blocks and self.arrived - self._settled.count >= len(self._blocks[0]):
            self._settle()
        if self._steps == self.share.steps:
            self.end()

    def end(self) -> None:
        """Says that nothing more will arrive, since there is nothing more."""
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self)

    def _end_unless_counted(self) -> None:
        if not self.is_counted:
            self.end()

    def _settle(self) -> None:
        arrived = self.arrived
        while self._blocks and self._settled.count + len(self._blocks[0]) <= arrived:
            self._settled += Ledger.of(self.epoch, self._blocks.popleft())

    def ledger(self) -> Ledger:
        """What has arrived."""
        self._settle()
        rest = self.arrived - self._settled.count
        if rest == 0:
            return self._settled
        return self._settled + Ledger.of(self.epoch, self._blocks[0][:rest])
