"""What Lightning reduces: tensors, and the values that ranks log, whose names must be the same."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import pydist
from pydist.errors import Mismatch
from pydist.job import groups
from pydist.job.outcome import outcomes
from pydist.job.rank_names import culprits, first_that_differs, who_said_what

# torch's names of operators, and Lightning's, where pydist has another.
_OPERATORS = {"avg": "mean", "product": "prod"}


def reduce(tensor: Any, group: Any, reduce_op: Any) -> Any:
    """Reduces a tensor, in place, in one collective; returns what is no tensor as it is.

    The mean of integers is a new tensor, of torch's default type: Lightning divides sums by means
    of counts, and one that was cut off to an integer makes every result over uneven shares wrong.
    """
    if not isinstance(tensor, Tensor) or not dist.is_initialized():
        return tensor
    operator = str(reduce_op).rpartition(".")[2].lower()
    operator = _OPERATORS.get(operator, operator)
    if operator != "mean" or tensor.is_floating_point() or tensor.is_complex():
        return pydist.all_reduce(tensor, operator, group=group)
    total = pydist.all_reduce(tensor.to(torch.int64, copy=True), "sum", group=group)
    return total / dist.get_world_size(group)


class Logged(NamedTuple):
    """What `self.log` gets as `sync_dist_group`, so that `reduce` knows the logged value's name."""

    name: str
    group: Any


def log(model: Any, name: str, *args: Any, **kwargs: Any) -> None:
    """The model's own `log`, which passes the name on to `reduce`."""
    # Positions in Lightning's signature, behind the name; few pass a group, and fewer by position.
    position = 8
    if len(args) > position:
        args = (*args[:position], Logged(name, args[position]), *args[position + 1 :])
    else:
        kwargs["sync_dist_group"] = Logged(name, kwargs.get("sync_dist_group"))
    type(model).log(model, name, *args, **kwargs)


def reduce_logged(value: Tensor, logged: Logged, reduce_op: str, wrapper: Any) -> Tensor:
    """Reduces a number that all ranks have logged by the same name, in one collective.

    The digest of the name travels with the number. An all_reduce of numbers alone would mix what
    ranks have logged by different names.

    Raises:
        Mismatch: Ranks have logged different names (on every rank).
    """
    if not dist.is_initialized():
        return value
    digest = int.from_bytes(hashlib.sha256(logged.name.encode()).digest()[:8], "big", signed=True)
    bits = value.detach().reshape(1).to(torch.float64).view(torch.int64)
    own = torch.cat([bits.new_tensor([digest]), bits])
    if logged.group is None and isinstance(wrapper, pydist.DataParallel):
        communicator = wrapper._communicator
    else:
        communicator = groups.communicator_of(logged.group, "sync_dist_group")
    table = own.new_empty((communicator.size, 2))
    communicator.all_gather(own, table, label=f"self.log({logged.name!r})")
    if any(each != digest for each in table[:, 0].tolist()):
        everybody = outcomes(communicator, "self.log", None, {"name": logged.name})
        names = [repr(each.facts["name"]) for each in everybody]
        other = first_that_differs(names)
        assert other is not None
        raise Mismatch(
            f"self.log(..., sync_dist=True) logs {who_said_what(names)}: log the same names in the "
            "same order on all ranks, or without sync_dist what only some of them have.",
            **culprits(communicator, [0, other], "logged different names"),
        )
    numbers = table[:, 1].contiguous().view(torch.float64)
    result: Tensor = getattr(numbers, {"max": "amax", "min": "amin"}.get(reduce_op, reduce_op))()
    is_float = value.is_floating_point()
    return result.to(value.dtype if is_float else torch.get_default_dtype()).reshape(value.shape)
