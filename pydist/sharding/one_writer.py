"""Lets one rank write into the parameters for all: what `ShardedOptimizer.writing` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.parallel.wrapper import DataParallel
from pydist.sharding.own_writes import OwnWrites
from pydist.sharding.placement import ShardedLayout

# The rank, of the optimizer's group, that writes for all.
_WRITER = 0


class OneWriter:
    """Lets one rank write for all where all have one copy; where not, all write the same.

    Args:
        communicator: The ranks.
        wrapper: The model whose parameters they are, if it is wrapped.
        layout: The parameters.
        writes: What takes over what is written into the one copy; None: every rank has its own.
    """

    def __init__(
        self,
        communicator: _native.Communicator,
        wrapper: DataParallel | None,
        layout: ShardedLayout,
        writes: OwnWrites | None,
    ) -> None:
        self._communicator = communicator
        self._wrapper = wrapper
        self._layout = layout
        self._writes = writes
        self._is_writing = False

    @property
    def others_wait(self) -> bool:
        """Whether the other ranks wait at the end of `writing`, and hear there what raises here."""
        return self._is_writing and self._writes is not None

    def require_possible(self) -> None:
        """Raises InvalidUsage where `writing` can't begin."""
        if self._is_writing:
            raise InvalidUsage("optimizer.writing() is called inside optimizer.writing()")
        if self._wrapper is not None and self._wrapper._reducer.is_in_backward:
            raise InvalidUsage(
                "optimizer.writing() is called within backward, from a hook say, which still needs "
                "the parameters as they are: call it after backward()"
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """All ranks are in it together, once all parameters have arrived.

        Yields:
            Whether this rank is to write.
        """
        mine = True
        guarded: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._writes is not None:
            self._writes.settle()
            self._communicator.barrier(label="before one rank writes parameters")
            mine = self._communicator.rank == _WRITER
            guarded = self._writes.of_one_rank(_WRITER, self._apart())
        self._is_writing = True
        try:
            with torch.no_grad(), guarded:
                yield mine
        finally:
            self._is_writing = False

    def refuse(self, what: str) -> None:
        """Raises InvalidUsage where a call comes while one rank writes.

        Args:
            what: It, for the error.
        """
        if self._is_writing:
            raise InvalidUsage(
                f"{what} is called inside optimizer.writing(), where one rank writes parameters "
                "that all need: call it before or after that"
            )

    def _apart(self) -> list[tuple[str, Tensor]]:
        """Parameters, of the model or the optimizer, of which every rank has one of its own."""
        named = list(zip(self._layout.names, self._layout.parameters, strict=True))
        if self._wrapper is not None:
            named += self._wrapper.named_parameters()
        placed = {id(p) for bucket in self._layout.shared_buckets for p in bucket.parameters}
        return [(name, parameter) for name, parameter in named if id(parameter) not in placed]
