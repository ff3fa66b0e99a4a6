"""What Lightning reduces: tensors, and the values that ranks log, whose names must be the same."""

from __future__ import annotations

import hashlib
import math
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


# Behind the name, in the order of Lightning's signature: few pass more than a value by position.
_POSITIONS = (
    *("value", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph"),
    *("sync_dist", "sync_dist_group", "add_dataloader_idx", "batch_size"),
)
# What changes no maximum and no minimum; a sum, and the sum of a mean, are not changed by 0.
_NEUTRAL = {"max": -math.inf, "min": math.inf}


class _Call:
    """The arguments of one `self.log(name, ...)`, each wherever the program has given it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = list(args), kwargs

    def get(self, name: str, default: Any = None) -> Any:
        place = _POSITIONS.index(name)
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def put(self, name: str, value: Any) -> None:
        place = _POSITIONS.index(name)
        if place < len(self.args):
            self.args[place] = value
        else:
            self.kwargs[name] = value

    def count_nothing(self) -> None:
        """Lets the value take no part in what all ranks have at the end of the epoch."""
        self.put("batch_size", 0)
        value, kind = self.get("value"), self.get("reduce_fx", "mean")
        kind = kind.lower() if isinstance(kind, str) else getattr(kind, "__name__", "")
        # At each step Lightning takes the mean of the ranks, whatever the samples.
        if self.get("on_step") and kind not in ("sum", "max", "min"):
            return
        neutral = _NEUTRAL.get(kind, 0.0)
        if isinstance(value, Tensor):
            dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
            self.put("value", torch.full_like(value, neutral, dtype=dtype))
        elif isinstance(value, int | float):
            self.put("value", neutral)


def _strategy_of(model: Any) -> Any:
    """The strategy that the model runs on, if it is one of pydist's.

    Asked for anew each time: copies of a model have our `log`, and may run on another strategy.
    """
    try:
        strategy = model.trainer.strategy
    except RuntimeError:  # the model has no trainer
        return None
    return strategy if hasattr(strategy, "stands_in") else None


def log(model: Any, name: str, *args: Any, **kwargs: Any) -> None:
    """The model's own `log`, which passes the name on to `reduce`."""
    call = _Call(args, kwargs)
    if (strategy := _strategy_of(model)) is not None:
        call.put("sync_dist_group", Logged(name, call.get("sync_dist_group")))
        # Without `sync_dist` a rank's mean is of its own samples alone, and of none it is 0 / 0.
        if call.get("sync_dist") and strategy.stands_in():
            call.count_nothing()
    type(model).log(model, name, *call.args, **call.kwargs)


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
