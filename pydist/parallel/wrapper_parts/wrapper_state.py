"""What all parts of a wrapper know: what it has, and whether it has joined, works or is retired."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pydist.errors import InvalidUsage

if TYPE_CHECKING:
    import torch

    from pydist import _native
    from pydist.parallel.backward_weights import BackwardWeights
    from pydist.parallel.buffers.buffer_sync import BufferSync
    from pydist.parallel.checks.divergence_check import Sentinel
    from pydist.parallel.checks.finite_check import FiniteCheck
    from pydist.parallel.like_torch.torch_buckets import TorchBuckets
    from pydist.parallel.rank_local import RankLocal
    from pydist.parallel.settings import Settings
    from pydist.parallel.trained_parameters import TrainedParameters


class WrapperState:
    """What the other parts of `pydist.DataParallel` have in common. Its constructor sets it."""

    module: nn.Module

    _settings: Settings
    _local: RankLocal
    _input_device: torch.device | None
    _trained: TrainedParameters
    _buffer_sync: BufferSync | None
    _sentinel: Sentinel
    _finite_check: FiniteCheck
    _weights: BackwardWeights
    # The optimizers that update shards, by their numbers from 1.
    _owners: list[weakref.ref[Any]]
    # For each parameter that an optimizer has, whether it trains now or not: the number of the
    # optimizer, and what stands for the gradient. It stays when the optimizer is gone, because
    # gradients go on being reduced into its shards.
    _sharded_parameters: dict[Tensor, tuple[int, Tensor]]
    _communicator: _native.Communicator
    # None: it has not joined the other ranks yet, or is retired.
    _working_reducer: _native.Reducer | None
    _why_retired: str
    # What becomes the reducer's `enabled`.
    _averages_when_joined: bool
    _torch_buckets: TorchBuckets | None  # with a communication hook
    _has_comm_hook: bool
    _torch_attributes: dict[str, Any]
    _forwards: int

    if TYPE_CHECKING:  # other parts have them

        @property
        def forward_sync_buffers(self) -> bool: ...

        def require_joined(self) -> None: ...

    @property
    def has_joined(self) -> bool:
        """Whether the wrapper has met the other ranks. A copy does so when it is to train."""
        return self._working_reducer is not None or self.is_retired

    @property
    def is_retired(self) -> bool:
        """Whether others have taken up parameters of this wrapper, which trains nothing since."""
        return bool(self._why_retired)

    @property
    def _reducer(self) -> _native.Reducer:
        self.require_working()
        if self._working_reducer is None:
            raise InvalidUsage(
                "this pydist.DataParallel is a copy that has not met the other ranks yet, so there "
                "is nothing to show: it joins them at its first forward that is to train"
            )
        return self._working_reducer

    def require_working(self) -> None:
        """Raises InvalidUsage where another wrapper has taken up a parameter of this one."""
        if self.is_retired:
            raise InvalidUsage(self._why_retired)
