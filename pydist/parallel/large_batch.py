"""The habits of large-batch training: how the learning rate follows the batch size."""

import math
from typing import Literal

import torch.distributed as dist

from pydist.errors import InvalidUsage
from pydist.job import membership


def effective_batch_size(per_rank_batch: int, accumulation: int = 1) -> int:
    """The number of samples behind one optimizer step of the whole job.

    Args:
        per_rank_batch: samples that one rank puts through one backward.
        accumulation: backwards that one step adds up.

    Returns:
        `per_rank_batch` times `accumulation` times the world size; a process that has not joined a
        job counts as a world of one.

    Raises:
        InvalidUsage: an argument is less than 1.

    Example:
        >>> import pydist
        >>> pydist.init()
        >>> pydist.effective_batch_size(32, accumulation=4) // pydist.world_size()
        128
    """
    if per_rank_batch < 1 or accumulation < 1:
        raise InvalidUsage(
            f"per_rank_batch={per_rank_batch} and accumulation={accumulation} must be 1 or more."
        )
    return per_rank_batch * accumulation * _world_size()


def _world_size() -> int:
    if membership.is_initialized():
        return membership.world_size()
    return dist.get_world_size() if dist.is_initialized() else 1


def scale_lr(
    lr: float,
    *,
    base_batch: int,
    batch: int | None = None,
    rule: Literal["linear", "sqrt"] = "linear",
) -> float:
    """The learning rate for a batch of another size than the one it was tuned for.

    Args:
        lr: the learning rate that suits `base_batch`.
        base_batch: the samples a step that `lr` was tuned for.
        batch: the samples a step now (`effective_batch_size` counts them); by default
            `base_batch` on every rank.
        rule: "linear" multiplies by batch / base_batch, "sqrt" by its square root.

    Returns:
        The scaled learning rate. Goyal et al. warm up to it over the first 5 epochs, starting from
        `lr`; without a warm-up the linear rule tends to diverge.

    Raises:
        InvalidUsage: a size or the rate is not positive, or the rule is unknown.

    Sources:
        linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
        arXiv 1706.02677 (held for SGD with momentum up to a batch of about 8192 on ImageNet).
        sqrt: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks",
        arXiv 1404.5997, section 5: it keeps the variance of the update.

    Example:
        >>> import pydist
        >>> pydist.scale_lr(0.1, base_batch=256, batch=1024)
        0.4
        >>> pydist.scale_lr(3e-4, base_batch=64, batch=256, rule="sqrt")
        0.0006
    """
    if batch is None:
        batch = base_batch * _world_size()
    if not lr > 0 or base_batch < 1 or batch < 1:
        raise InvalidUsage(
            f"lr={lr}, base_batch={base_batch} and batch={batch} must all be more than 0."
        )
    if rule == "linear":
        return lr * (batch / base_batch)
    if rule == "sqrt":
        return lr * math.sqrt(batch / base_batch)
    raise InvalidUsage(f"rule='{rule}' is not valid; use one of: linear, sqrt.")
