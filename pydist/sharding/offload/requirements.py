"""What `offload=` takes, and the sentences for what it does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.sharding.buckets import SHORT
from pydist.sharding.step.fused_step import FUSED_CLASSES


def require_offload(
    offload: Any,
    delayed: Any,
    optimizer_class: type[Optimizer],
    *,
    is_one_copy: bool,
) -> None:
    """Raises InvalidUsage where the arguments of an optimizer ask for what can't be.

    Args:
        offload: As given.
        delayed: As given.
        optimizer_class: The wrapped class.
        is_one_copy: Whether all ranks map one copy of the parameters.
    """
    if offload not in (None, "cpu"):
        raise InvalidUsage(f"offload is {offload!r}; it must be None or 'cpu'")
    if not isinstance(delayed, bool):
        raise InvalidUsage(f"delayed is {delayed!r}; it must be a bool")
    if offload is None:
        if delayed:
            raise InvalidUsage(
                "delayed=True lets the host step beside the next forward and backward, which takes "
                "offload='cpu'"
            )
        return
    if optimizer_class not in FUSED_CLASSES:
        names = ", ".join(f"torch.optim.{each.__name__}" for each in FUSED_CLASSES)
        raise InvalidUsage(
            f"offload='cpu' steps by pydist's kernels for the host, which know {names}, and not "
            f"{optimizer_class.__module__}.{optimizer_class.__qualname__}: use one of those, or "
            "leave offload out"
        )
    if is_one_copy:
        raise InvalidUsage(
            "offload='cpu' is for parameters on GPUs, and share_parameters=True for those on the "
            "CPU: leave one of them out"
        )


def requirement(
    offload: Literal["cpu"] | None, with_masters: bool
) -> Callable[[str, Tensor], None] | None:
    """What every parameter, by name, has to meet; None: nothing."""
    if offload is None:
        return None
    return functools.partial(require_offloadable, with_masters=with_masters)


def require_offloadable(name: str, parameter: Tensor, with_masters: bool) -> None:
    """Raises InvalidUsage where the state of a parameter can't be stepped on the host.

    Args:
        name: Of the parameter.
        parameter: Itself.
        with_masters: Whether parameters in 16 bits have float32 copies.
    """
    if parameter.device.type != "cuda":
        raise InvalidUsage(
            f"parameter {name} is on {parameter.device}, and offload='cpu' keeps the state of "
            "parameters on GPUs on the host, where that of this one is already: leave offload out, "
            "or move the model to the GPU first"
        )
    require_offloadable_dtype(name, parameter.dtype, with_masters)


def require_offloadable_dtype(name: str, dtype: torch.dtype, with_masters: bool) -> None:
    """Raises InvalidUsage where the host's kernels don't take parameters of a dtype."""
    if dtype in SHORT and not with_masters:
        raise InvalidUsage(
            f"parameter {name} is {dtype}, and the host steps float32 copies of such, "
            "which master_weights=False leaves out: leave master_weights or offload out"
        )
    if dtype not in (*SHORT, torch.float32, torch.float64):
        raise InvalidUsage(
            f"parameter {name} is {dtype}, and offload='cpu' takes float16, bfloat16, "
            "float32 and float64: give it an optimizer of its own"
        )
