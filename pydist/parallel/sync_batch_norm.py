"""`pydist.SyncBatchNorm`: batch normalisation by the statistics of all ranks' samples.

Note [Statistics of uneven batches]
Every rank sends how many values it has per channel, their mean, and the sum of their squared
deviations from it (M2). Sets of values join by

    n = sum n_r,    mean = sum n_r mean_r / n,    M2 = sum M2_r + sum n_r (mean_r - mean)^2

(Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances,
1979). This is exact whatever the n_r, also where some are zero, and has none of the cancellation
of "mean of squares minus square of mean". All ranks join the same numbers in the same order, so
their results, and with them the running statistics, are the same bit by bit.

Note [Gradients]
With x^ the normalised input, n values per channel on all ranks, and the sums over all of them,

    dx = weight / std * (dy - sum(dy) / n - x^ sum(dy x^) / n)

is the gradient of the *sum* of all ranks' losses: every rank's loss depends on every rank's input.
The gradients of weight and bias are those of this rank's own loss. The mean over the ranks, which
is what data-parallel training takes, makes both the gradient of the mean of the losses. If all
ranks have the same number of samples and take the mean over them, that is the loss of one process
on the whole batch. Otherwise scale each rank's loss first, as without batch normalisation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from pydist._torch import BatchNormBase, children_of, runs_uncompiled_throughout
from pydist.errors import InvalidUsage
from pydist.job import current, groups, membership

if TYPE_CHECKING:
    from pydist._native import Communicator

# The communicator on which each layer talks, and the group that it stands for.
_in_use: WeakKeyDictionary[SyncBatchNorm, tuple[object, Communicator]] = WeakKeyDictionary()
# Whether a communicator's GPU tensors stay on the GPU.
_on_nccl: WeakKeyDictionary[Communicator, bool] = WeakKeyDictionary()
# The communicator and the group of the wrapper around each layer, from which the layer's own
# communicator is split. Wrapped models may be trained in threads, so their layers must not share a
# communicator.
_of_wrapper: WeakKeyDictionary[SyncBatchNorm, tuple[object, Communicator]] = WeakKeyDictionary()


class SyncBatchNorm(BatchNormBase):
    """Batch normalisation over the samples of all ranks, as if they were one batch.

    In training mode forward and backward are collective: all ranks of the group call them, for the
    same layers in the same order. They may have different numbers of samples, also none, as long
    as they have the same number of batches. A rank without samples still runs its (empty) batch
    forward and backward. In evaluation mode no rank talks to another.

    Outputs, gradients and running statistics equal those of `torch.nn.BatchNorm*d` on the ranks'
    batches put together, to rounding, and running statistics are the same on all ranks bit by bit.
    16-bit inputs are accumulated in float32. Gradients of weight and bias are this rank's own:
    `pydist.DataParallel` averages them (Note [Gradients] in this file).

    `state_dict` is that of `torch.nn.BatchNorm*d`. Alone in its group, the layer computes exactly
    what they do. Otherwise its backward can't be differentiated again. A layer with a
    `process_group` can be deep-copied, which keeps the group, but not pickled.

    Joins the job from the environment by itself (`pydist.init()`), at the first forward in
    training mode. All layers of one group share one communicator of their own, so they never get
    in the way of collectives of yours. Statistics travel on the GPU by NCCL, and the host waits for
    nothing, where the group is on NCCL and the input on the GPU; that is then so on all ranks.
    Otherwise they travel through the host's memory. A rank with one value per channel, or none,
    waits to see how many there are on all ranks.

    Args:
        num_features: The number of channels C.
        eps: Added to the variance.
        momentum: The weight of a new batch in the running statistics; None for the mean over all
            batches.
        affine: Whether there are a weight and a bias to learn.
        track_running_stats: Whether to keep running statistics. Without them, the statistics of
            the batch serve in evaluation mode too, those of this rank alone.
        process_group: The ranks whose samples are one batch: a process group of
            torch.distributed, or one of `pydist.new_group`; default: all. Give each rank a group
            that it is in.
        device: Of parameters and running statistics.
        dtype: Of parameters and running statistics.
        bias: Whether an affine layer has a bias.

    Shape:
        Input and output: (N, C) or (N, C, ...), N being this rank's own. Floating point. The
        output has the input's dtype and memory format.

    Raises:
        InvalidUsage: In the first forward in training mode: this rank is not in `process_group`.
        ValueError: In forward: the input has less than two dimensions or another number of
            channels, or all ranks together have a single value per channel (then on all of them).

    Example:
        >>> layer = SyncBatchNorm(3)
        >>> layer(torch.ones(4, 3)).shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: groups.Group | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalises `input`; in training mode, every rank of the group calls it.

        Args:
            input: This rank's samples, (N, C) or (N, C, ...).

        Returns:
            A tensor of the same shape, dtype and memory format.
        """
        return self._synchronized(input) if self.training else super().forward(input)

    @runs_uncompiled_throughout
    def _synchronized(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        communicator = self._communicator()
        if communicator.size == 1:
            return super().forward(input)
        with torch.no_grad():
            mean, variance, count = _statistics(input, communicator)
            # More than one value of this rank's own is more than one in all, so nobody looks.
            has_values = input.numel() > self.num_features or int(count) > 0
            if input.numel() <= self.num_features and int(count) == 1:
                raise ValueError(
                    "Expected more than 1 value per channel when training, got input size "
                    f"{input.size()} on rank {communicator.rank}, and 1 value per channel on all "
                    f"{communicator.size} ranks together"
                )
            unbiased = variance * (count / (count - 1).clamp(min=1))
            # Together, since they are sent to a device.
            sent = _sent_to(input.device, torch.stack([mean, variance, unbiased]))
            mean, variance, unbiased = sent.unbind()
            if self.track_running_stats:
                self._track(mean, unbiased, has_values)
            wide = _accumulation_dtype(input.dtype)
            mean, variance = mean.to(wide), variance.to(wide)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, count, self.eps, communicator
        )
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels, input has size {tuple(input.shape)}"
            )

    def _communicator(self) -> Communicator:
        # At the first forward and not at construction: one rank may build or load a model alone,
        # but a forward in training mode is collective anyway.
        group = self.process_group
        if group is None:
            membership.init()
        key = _key_of(group)
        known = _in_use.get(self)
        if known is None or known[0] is not key:
            known = _of_wrapper.pop(self, None)
            parent = known[1] if known is not None and known[0] is key else group
            known = _in_use[self] = (key, groups.layer_communicator(parent))
        return known[1]

    def _track(self, mean: Tensor, unbiased: Tensor, has_values: bool) -> None:
        weight = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if weight is None:
                weight = 1.0 / float(self.num_batches_tracked)
        if not has_values or self.running_mean is None or self.running_var is None:
            return
        weight = 0.0 if weight is None else weight
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - weight).add_(value.to(running.device, running.dtype), alpha=weight)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: groups.Group | None = None
    ) -> nn.Module:
        """Replaces the batch normalisations within a module by synchronised ones.

        Each new layer takes over what the old one had: the same parameters and buffers, mode,
        hooks, `qconfig`. A layer that occurs twice is still one layer. Talks to no other rank.

        Args:
            module: A module with `torch.nn.BatchNorm1d`, `2d`, `3d` or `torch.nn.SyncBatchNorm`
                in it, or one of these itself.
            process_group: The ranks whose samples are one batch; default: the group that a
                synchronised layer has already, otherwise all.

        Returns:
            `module`, changed in place; a new layer if `module` itself is a batch normalisation.

        Raises:
            InvalidUsage: A layer has no shape yet, computes its forward in a way of its own, or is
                parametrized. The module is left as it was.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
            >>> model = SyncBatchNorm.convert_sync_batchnorm(model)
            >>> type(model[1])
            <class 'pydist.parallel.sync_batch_norm.SyncBatchNorm'>
        """
        for name, layer in _batch_norms(module):
            _check_convertible(name, layer)
        if isinstance(module, BatchNormBase):
            return cls._from(module, process_group)
        converted: dict[nn.Module, nn.Module] = {}
        for part in list(module.modules()):
            for name, child in list(children_of(part).items()):
                if isinstance(child, BatchNormBase):
                    if child not in converted:
                        converted[child] = cls._from(child, process_group)
                    part.add_module(name, converted[child])
        return module

    @classmethod
    def _from(cls, layer: BatchNormBase, process_group: groups.Group | None) -> SyncBatchNorm:
        converted = cls.__new__(cls)
        # Its tables and not copies of them: handles that remove hooks go on working.
        converted.__dict__.update(layer.__dict__)
        if process_group is None:
            process_group = getattr(layer, "process_group", None)
        converted.process_group = process_group
        return converted

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        # The group belongs to the job and not to the layer, so copies of the layer share it.
        memo[id(self.process_group)] = self.process_group
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


class _Normalize(torch.autograd.Function):
    """Normalises by statistics of all ranks, which depend on the input: see Note [Gradients]."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        communicator: Communicator,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.count, ctx.eps, ctx.communicator = count, eps, communicator
        return F.batch_norm(
            input, mean, variance, _as(weight, mean.dtype), _as(bias, mean.dtype), eps=eps
        )

    @staticmethod
    @once_differentiable
    @runs_uncompiled_throughout
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        dtype = input.dtype
        # Before the sums: CUDA's kernel takes those of contiguous 16-bit tensors in 16 bits.
        input, grad_output = input.to(mean.dtype), grad_output.to(mean.dtype)
        inverse_std = (variance + ctx.eps).rsqrt()
        sum_dy, sum_dy_x = torch.zeros_like(mean), torch.zeros_like(mean)
        if input.numel() > 0:
            # The gradients of bias and weight in evaluation's backward are just these two sums, in
            # one pass. CUDA's kernel needs a weight, and the statistics a second time; the CPU's
            # ignores them.
            _, sum_dy_x, sum_dy = torch.ops.aten.native_batch_norm_backward(
                grad_output, input, torch.ones_like(mean), mean, variance, mean, inverse_std,
                False, ctx.eps, [False, True, True],
            )  # fmt: skip
        grad_input = grad_weight = grad_bias = None
        # Autograd converts these two to the dtype of the parameters.
        if ctx.needs_input_grad[1]:
            grad_weight = sum_dy_x
        if ctx.needs_input_grad[2]:
            grad_bias = sum_dy
        if ctx.needs_input_grad[0]:
            # Ranks without samples take part as well: the others wait for them.
            message = torch.cat([sum_dy, sum_dy_x]).to(ctx.count.device, torch.float64)
            ctx.communicator.all_reduce(message, message, label="SyncBatchNorm backward")
            sent = _sent_to(mean.device, message / ctx.count.clamp(min=1))
            mean_dy, mean_dy_x = sent.to(mean.dtype).chunk(2)
            scale = inverse_std if weight is None else inverse_std * weight
            # The terms without dy are a normalisation too: x^ with another weight and bias.
            rest = F.batch_norm(
                input, mean, variance, -scale * mean_dy_x, -scale * mean_dy, eps=ctx.eps
            )
            scale = scale.view(1, -1, *[1] * (input.dim() - 2))
            grad_input = rest.addcmul_(grad_output, scale).to(dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _statistics(input: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel over all ranks, and the count: in float64, where they
    have travelled."""
    channels = input.size(1)
    count = input.numel() // max(channels, 1)
    place = input.device if input.is_cuda and _is_on_nccl(communicator) else torch.device("cpu")
    # Float64 holds any count; the message is small.
    message = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=place)
    if input.numel() > 0:
        # The kernel of torch's own training forward, two passes over the input. It accumulates in
        # the dtype of the running statistics, which is all that these are for.
        dtype = _accumulation_dtype(input.dtype)
        running = torch.zeros(2, channels, dtype=dtype, device=input.device)
        both = torch.batch_norm_update_stats(input, running[0], running[1], 0.0)
        mean, variance = torch.stack(both).to(place, torch.float64)
        message[:1].fill_(count)
        message[1:].copy_(torch.cat([mean, variance * count]))
    gathered = message.new_empty(communicator.size * message.numel())
    communicator.all_gather(message, gathered, label="SyncBatchNorm forward")
    # See Note [Statistics of uneven batches].
    counts, means, squares = gathered.view(communicator.size, -1).split([1, channels, channels], 1)
    total = counts.sum()
    divisor = total.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    squares_of_all = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return mean, squares_of_all / divisor, total


def _is_on_nccl(communicator: Communicator) -> bool:
    known = _on_nccl.get(communicator)
    if known is None:
        known = _on_nccl[communicator] = communicator.capabilities()["backend"] == "nccl"
    return known


def _sent_to(device: torch.device, values: Tensor) -> Tensor:
    """Values on a device; those of the host without waiting until it has read them."""
    if values.device == device:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _batch_norms(module: nn.Module) -> Iterator[tuple[str, BatchNormBase]]:
    for name, part in module.named_modules():
        if isinstance(part, BatchNormBase):
            yield name or "the module itself", part


def _check_convertible(name: str, layer: BatchNormBase) -> None:
    kind = type(layer).__name__
    if isinstance(layer, LazyModuleMixin):
        raise InvalidUsage(
            f"{name} ({kind}) has no shape yet: run one forward before converting the module"
        )
    known = (BatchNormBase.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    if type(layer).forward not in known or "forward" in layer.__dict__:
        raise InvalidUsage(
            f"{name} ({kind}) has a forward of its own, which pydist.SyncBatchNorm would replace: "
            "convert the module without it, or let it derive from pydist.SyncBatchNorm"
        )
    if is_parametrized(layer):
        raise InvalidUsage(
            f"{name} ({kind}) is parametrized: convert the module first, then parametrize it"
        )


def _key_of(group: groups.Group | None) -> object:
    return current.job.world if group is None else group


def talk_apart(module: nn.Module, group: groups.Group | None, communicator: Communicator) -> None:
    """Lets the layers within a wrapped module talk apart from those of all other models.

    Talks to no other rank: the layers make a group of their own at their first forward.

    Args:
        module: What has been wrapped.
        group: The wrapper's group; layers that were given another one keep to that.
        communicator: The wrapper's own communicator over this group.
    """
    key = _key_of(group)
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm) and _key_of(layer.process_group) is key:
            _of_wrapper[layer] = (key, communicator)
            _in_use.pop(layer, None)


def refuse_under_join(module: nn.Module) -> None:
    """Refuses modules that can't train while other ranks have run out of batches.

    A forward in training mode waits for all ranks of the group, so a rank that has no more batches
    would leave the others waiting. (A rank whose batch is empty does take part.)

    Args:
        module: What is to be trained on uneven inputs.

    Raises:
        InvalidUsage: A `SyncBatchNorm`, pydist's or torch's, is in it; the message names the first.
    """
    for name, layer in _batch_norms(module):
        if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
            home = "pydist" if isinstance(layer, SyncBatchNorm) else "torch.nn"
            raise InvalidUsage(
                f"{name} is a {home}.SyncBatchNorm, whose forward waits for all ranks, so it can't "
                "be trained under join(): give every rank the same number of batches (empty ones "
                "will do with pydist.SyncBatchNorm), or use torch.nn.BatchNorm"
            )
