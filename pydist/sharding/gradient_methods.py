"""The methods of `pydist.ShardedOptimizer` about gradients: to clip, gather and forget them."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from pydist._torch import as_plain_tensors, runs_uncompiled_throughout
from pydist.parallel.wrapper import DataParallel
from pydist.sharding.clipping import clip_gradients
from pydist.sharding.gradient_norms import ReducedGradients
from pydist.sharding.placement import ShardedLayout


class GradientMethods(Optimizer):
    """The part of `pydist.ShardedOptimizer` about gradients.

    The constructor makes what is declared here.
    """

    _gradients: ReducedGradients
    _layout: ShardedLayout
    _wrapper: DataParallel | None

    @runs_uncompiled_throughout
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, as any optimizer does. Waits for nobody.

        Args:
            set_to_none: Whether to set them to None rather than to zero.
        """
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        with as_plain_tensors():
            for parameter in self._layout.parameters:
                parameter.grad = None

    @runs_uncompiled_throughout
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales all gradients so that their norm, as of one vector, is `max_norm` at most.

        All ranks call it. What `torch.nn.utils.clip_grad_norm_` does, and faster; the norm of
        16-bit gradients, and the factor, are taken in float32. Where ranks have
        parameters of their own, the norm is of the gradients of all ranks' together, and so are
        all of them scaled alike; torch's function raises `Mismatch` where it would scale the ranks'
        parts of one gradient differently.

        Args:
            max_norm: Of the whole gradient, over all ranks' shards.
            norm_type: The order of the norm; may be infinite.
            error_if_nonfinite: Whether to raise where the norm is not finite.

        Returns:
            The norm before scaling, the same on every rank.
        """
        if self._layout.some_have_own:
            return self._gradients.clip_with_own(max_norm, float(norm_type), error_if_nonfinite)
        return clip_gradients(
            self._layout.parameters, max_norm, float(norm_type), error_if_nonfinite, foreach=True
        )

    @runs_uncompiled_throughout
    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """The whole averaged gradient of a parameter. All ranks call it, for the same one.

        Args:
            parameter: One of the optimizer's.

        Returns:
            A tensor of its own; None if there is no gradient.

        Raises:
            Mismatch: It was accumulated under `no_sync()`, put by hand or set to zero since it was
                averaged, on some ranks (on every rank).
        """
        return self._gradients.gradient_of(parameter)

    def bytes_in_flight(self) -> int:
        """Bytes of the memory in which this rank's buckets fill and travel, in stage 2."""
        if self._wrapper is None:
            return 0
        berth_bytes: int = self._wrapper._reducer.berth_bytes(self._layout.number)
        return berth_bytes
