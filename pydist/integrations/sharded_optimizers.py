"""Sharded optimizers in place of those that a framework has made, and their state as it saves it.

Checkpoints of frameworks hold the whole state in the form of torch's optimizers, so that they go
between sharded and unsharded trainings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR

import pydist
from pydist._torch import (
    has_state_dict_post_hooks,
    run_state_dict_post_hooks,
    run_state_dict_pre_hooks,
)
from pydist.errors import InvalidUsage
from pydist.sharding.made_anew import sharded_like
from pydist.sharding.state.ranges import (
    MASTER,
    ParameterState,
    ShardedState,
    StateRange,
    cut_out,
)
from pydist.sharding.state.torch_state_dict import to_unsharded


def shard(
    optimizers: Iterable[Any],
    schedulers: Iterable[Any],
    *,
    caller: str,
    otherwise: str,
    **settings: Any,
) -> list[Any]:
    """Sharded optimizers in place of torch's, whose schedulers go on with the new ones.

    All ranks call it, once the model is wrapped.

    Args:
        optimizers: Of torch's; what is sharded already, or has no parameters, stays as it is.
        schedulers: Of theirs.
        caller: Who shards them, for errors: "a sharded strategy".
        otherwise: What can be done instead, for errors: "choose strategy='pydist'".
        **settings: Of `pydist.ShardedOptimizer`.

    Raises:
        InvalidUsage: An optimizer can't be made anew, can't be sharded, or has parameters that are
            not of the wrapped model.
    """
    optimizers = list(optimizers)
    made = [_sharded(optimizer, caller, otherwise, settings) for optimizer in optimizers]
    instead = {id(old): new for old, new in zip(optimizers, made, strict=True)}
    for scheduler in schedulers:
        _follow(scheduler, instead)
    for old, new in zip(optimizers, made, strict=True):
        if new is not old and any("initial_lr" in group for group in new.param_groups):
            # A schedule that changes nothing. torch lets the first scheduler of an optimizer count
            # its steps, and the others warn where nobody does.
            ConstantLR(new, factor=1.0)
    return made


def _sharded(optimizer: Any, caller: str, otherwise: str, settings: dict[str, Any]) -> Any:
    if isinstance(optimizer, pydist.ShardedOptimizer):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise InvalidUsage(
            f"{caller} got a {type(optimizer).__name__}, which is no torch.optim.Optimizer: give "
            f"it one of torch's classes, or {otherwise}."
        )
    if not optimizer.param_groups:
        return optimizer
    return sharded_like(optimizer, caller, otherwise, **settings)


def _follow(scheduler: Any, instead: dict[int, Any]) -> None:
    """Gives a scheduler, and those that it is made of, the optimizer that is there instead."""
    for name, value in list(vars(scheduler).items()):
        if id(value) in instead:
            setattr(scheduler, name, instead[id(value)])
            continue
        for part in value if isinstance(value, (list, tuple)) else [value]:
            if id(getattr(part, "optimizer", None)) in instead:
                _follow(part, instead)


def whole_state(optimizer: Any) -> dict[str, Any] | None:
    """What torch's class would have for whole parameters. All ranks call it.

    One parameter after the other, so that at no time more than one of them is on its way. Hooks of
    the optimizer run on all ranks, as with optimizers that are not sharded. Those that run behind
    `state_dict()` get the whole state, so all ranks gather it where any rank has such a hook.

    Args:
        optimizer: Of any class, without a framework's wrapper around it.

    Returns:
        Of a `pydist.ShardedOptimizer`, the state on the CPU on rank 0, and where all ranks gather
        it; an empty dictionary elsewhere. None of another class, whose `state_dict` is whole.

    Raises:
        InvalidUsage: Ranks have parameters of their own.
    """
    if not isinstance(optimizer, pydist.ShardedOptimizer):
        return None
    if dist.get_world_size() == 1:
        return optimizer.state_dict()
    run_state_dict_pre_hooks(optimizer)
    optimizer.finish()
    local = optimizer.sharded_state()
    own = [name for name, part in local.parameters.items() if part.is_own]
    if own:
        raise InvalidUsage(
            f"parameter {own[0]} is each rank's own, which one state for all ranks can't hold: "
            "save with pydist.save, or don't shard the optimizer."
        )
    ranks = dist.get_world_size()
    hooked: list[Any] = [None] * ranks
    dist.all_gather_object(hooked, has_state_dict_post_hooks(optimizer))
    is_reader = dist.get_rank() == 0 or any(hooked)
    parameters: dict[str, ParameterState] = {}
    for name, part in local.parameters.items():
        parts: list[Any] | None = [None] * ranks if is_reader else None
        if any(hooked):
            dist.all_gather_object(parts, _copied(part))
        else:
            dist.gather_object(_copied(part), parts)
        if parts is not None:
            parameters[name] = _whole(name, parts)
    if not is_reader:
        return {}
    whole = to_unsharded(ShardedState(parameters, local.groups))
    return run_state_dict_post_hooks(optimizer, whole)


def _copied(part: ParameterState) -> ParameterState:
    # Copies, because a pickled view takes all of the memory along that it is a view of.
    ranges = [
        StateRange(
            piece.begin,
            piece.end,
            {
                key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                for key, value in piece.values.items()
            },
        )
        for piece in part.ranges
    ]
    return ParameterState(part.shape, part.dims, ranges, part.is_part)


def _whole(name: str, parts: list[ParameterState]) -> ParameterState:
    merged = ShardedState.merged(ShardedState({name: part}, []) for part in parts)
    state = merged.parameters[name]
    values = cut_out(name, state, state.dims, 0, state.count) or {}
    if set(values) == {MASTER}:
        # torch's classes take any state for that of a parameter that was updated before.
        values = {}
    ranges = [StateRange(0, state.count, values)]
    return ParameterState(state.shape, state.dims, ranges)
