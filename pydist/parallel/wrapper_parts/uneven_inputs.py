"""Ranks with different numbers of batches: `join()`."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator

import torch

from pydist._torch import runs_uncompiled_throughout
from pydist.errors import InvalidUsage
from pydist.parallel.checks.replica_check import copy_from
from pydist.parallel.sync_batch_norm import refuse_under_join
from pydist.parallel.wrapper_parts.wrapper_state import WrapperState

# The wrapper that is in join(). There may be only one: ranks that wait for each other in two of
# them would wait in a circle.
_joining: weakref.ref[UnevenInputs] | None = None


def is_joining() -> bool:
    """Whether a wrapper is in `join()`, so that ranks without batches run no forward."""
    return _joining is not None


def is_in_join(wrapper: WrapperState) -> bool:
    """Whether a wrapper is the one that is in `join()`."""
    return _joining is not None and _joining() is wrapper


class UnevenInputs(WrapperState):
    """The part of `pydist.DataParallel` that lets ranks have different numbers of batches."""

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Lets ranks have different numbers of batches: whoever has no more joins the others.

        Around the training loop, on all ranks. A rank that leaves it goes on taking part in the
        others' steps, with gradients of zero, until all have left; then every rank has the model of
        the rank that ran the most forwards, also under `no_sync()`, the last one if several did.
        Buffers come from the last rank that has a batch, and in all steps after the first `join()`
        from the last rank, as in torch; before it, from rank 0. A rank's gradients are those of its
        own last step. It takes no part in the others' steps of the optimizer, whose
        state so misses them. Backwards under `no_sync()` are nobody else's concern.

        Args:
            divide_by_initial_world_size: Whether ranks without a batch count as zeros in the mean,
                so that each sample weighs the same in all steps of the epoch. If False, the mean
                is over the ranks that have a batch.
            enable: If False, nothing is done.
            throw_on_early_termination: Whether all ranks raise as soon as one has no more batches.

        Raises:
            InvalidUsage: The module holds a SyncBatchNorm, a `pydist.ShardedOptimizer` updates the
                model, or another wrapped model is in `join()`.
            Error: A rank had no more batches, and `throw_on_early_termination` is set.
        """
        if not enable:
            yield
            return
        self.require_working()
        self.require_joined()
        refuse_under_join(self.module)
        if self._sentinel.is_comparing:
            raise InvalidUsage(
                "join() leaves ranks without batches out of the forwards, in which all ranks "
                "compare their models (check_every=): leave one of them out"
            )
        if self._sharded_parameters:
            raise InvalidUsage(
                "join() leaves ranks without batches out of the optimizer's steps, and each rank's "
                "pydist.ShardedOptimizer updates a part of every parameter: give all ranks as many "
                "batches, those of weighted(0) if need be"
            )
        global _joining
        if _joining is not None:
            raise InvalidUsage(
                "another pydist.DataParallel is in join() already: ranks without batches would "
                "have to take part in the steps of both, in an order that they can't know"
            )
        is_mean = self._settings.reduction == "mean"
        if not divide_by_initial_world_size and self._has_comm_hook and is_mean:
            warnings.warn(
                "with a communication hook, torch's join() leaves what the hook returns as it is: "
                "a hook that divides by the number of ranks goes on counting those without a "
                "batch. Here its buckets are multiplied beforehand, so that the mean is over the "
                "ranks that have a batch, as divide_by_initial_world_size=False asks for",
                UserWarning,
                stacklevel=3,
            )
        _joining = weakref.ref(self)
        forwards_before = self._forwards
        self._reducer.set_joining(
            "zeros" if divide_by_initial_world_size else "absent", throw_on_early_termination
        )
        try:
            yield
            # The gradients of this rank's own last step, which rounds without a batch of this
            # rank's would take away. If gradients are views, such a round would also write into
            # them.
            are_views = self._settings.gradients_are_views
            kept = [
                (parameter, gradient.clone() if are_views else gradient)
                for _, parameter, _ in self._trained.known
                if (gradient := parameter.grad) is not None
            ]
            try:
                while self._reducer.join_round():
                    pass
            finally:
                for parameter, gradient in kept:
                    parameter.grad = gradient
        except BaseException:
            if not self.is_retired:
                self._reducer.leave_join()
            raise
        finally:
            _joining = None
            self._reducer.set_joining("", False)
        root = self._last_of_most(self._forwards - forwards_before)
        copy_from(self._communicator, root, self._local, with_buffers=self.forward_sync_buffers)

    def _last_of_most(self, forwards: int) -> int:
        """The rank that has run most forwards, the last one if several have. All ranks call it."""
        rank, size = self._communicator.rank, self._communicator.size
        last = torch.tensor([forwards * size + rank], device="cpu")
        self._communicator.all_reduce(last, last, "max", label="who left join() last")
        return int(last.item()) % size
