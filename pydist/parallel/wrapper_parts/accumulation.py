"""Which backwards average, which only accumulate, and for how much each of them counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from pydist._torch import runs_uncompiled_throughout
from pydist.parallel.wrapper_parts.wrapper_state import WrapperState


class Accumulation(WrapperState):
    """The part of `pydist.DataParallel` that tells backwards whether and how to average."""

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Accumulates gradients without averaging them, in backwards of forwards that run inside.

        It is the forward that counts, as in torch's wrapper, wherever its backward runs; a backward
        from several averages if any of them was outside. The next one that averages takes in what
        has been accumulated, also of parameters that it does not reach itself; so does
        `sync_gradients()`. All ranks do the same. An optimizer that is to use gradients of this
        rank alone, or that were averaged by other means, steps inside.

        Args:
            enabled: If False, nothing changes: `with model.no_sync(enabled=step % 4 != 3)`.
        """
        before = self.require_backward_grad_sync
        self._set_averages(before and not enabled)
        try:
            yield
        finally:
            self._set_averages(before)

    def expect_any_order(self) -> None:
        """A schedule chooses the order of backwards: one under `no_sync()` may overtake another.

        Otherwise that is warned of, once, because torch's wrapper would average the wrong one.
        """
        self.require_joined()
        if self._working_reducer is not None:
            self._working_reducer.expect_any_order()

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def weighted(self, weight: float | Tensor) -> Iterator[None]:
        """Lets every backward that runs inside count for `weight` in the mean.

        The mean over tokens of the whole job, where each rank's loss is the mean over its own::

            with model.weighted(mask.sum()):
                loss.backward()

        Together with `no_sync()`, the mean is over all backwards that a step accumulates: each has
        its weight, whichever rank and micro-batch it belongs to. So don't divide the loss by their
        number as well. The weights are summed in float64,
        and every gradient is rounded once, after the sum over the ranks; what one rank accumulates
        is rounded as it is added, as always. With `reduction="sum"`, gradients are
        multiplied by their weights and added. A communication hook gets gradients that were
        multiplied so that their mean (or sum) over the ranks is the weighted one.

        Every rank gives a weight to each of the backwards of a step, or none does.

        Args:
            weight: Not negative; 0 for a batch that counts for nothing, even where its loss is NaN.
                One that a GPU computes stays there where gradients travel by NCCL and the kernels
                of pydist, without a communication hook: the host does not wait for it. Elsewhere
                it does.

        Raises:
            InvalidUsage: The weight is negative or not finite; or an earlier one was, which had
                stayed on a GPU, and has left gradients of NaN on every rank; a forward raises it,
                too.
            Error: At the end of backward, if only some of the step's backwards had a weight.
        """
        self.require_joined()
        reducer = self._reducer
        before, reducer.weight = reducer.weight, self._weights.taken(weight, reducer)
        try:
            yield
        finally:
            reducer.weight = before

    @property
    def weight_of_backward(self) -> float | Tensor | None:
        """What a backward that begins now counts for, by `weighted()`; None outside of that.

        A tensor of one element where it stays on a GPU.
        """
        reducer = self._working_reducer
        return None if reducer is None else reducer.weight

    @runs_uncompiled_throughout
    def sync_gradients(self) -> None:
        """Averages gradients outside of backward: those that were not yet. All ranks call it.

        That is what was accumulated under `no_sync()`, and what was put into `parameter.grad` by
        hand, from `torch.autograd.grad` say, which accumulates nothing and so averages nothing.
        A backward averages what was put by hand before it, too, with its own, for the weight of
        the first backward that the step accumulates. What `holding_average()` holds is concluded
        first.

        Raises:
            InvalidUsage: A gradient that accumulates on top of an averaged one was changed or
                replaced in between (with sums, weights or a `pydist.ShardedOptimizer`), or one that
                accumulates with weights was replaced (backward raises both as well); or it was
                summed, and then changed in place.
        """
        self.require_joined()
        self._reducer.synchronize(self._finite_check.before_sync)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards of the forwards that follow average: what `no_sync()` switches off.

        Torch's name; may be set.
        """
        self.require_working()
        reducer = self._working_reducer
        return self._averages_when_joined if reducer is None else reducer.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.require_working()
        self._set_averages(value)

    def _set_averages(self, value: bool) -> None:
        self._averages_when_joined = value
        if self._working_reducer is not None:
            self._working_reducer.enabled = value
