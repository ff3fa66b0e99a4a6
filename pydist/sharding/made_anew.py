"""A sharded optimizer in the place of one of torch's that a program has made."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from pydist._torch import share_optimizer_hooks, without_optimizer_hooks
from pydist.errors import InvalidUsage
from pydist.sharding.optimizer import ShardedOptimizer
from pydist.sharding.parameter_groups import model_of


def sharded_like(optimizer: Optimizer, caller: str, otherwise: str, **settings: Any) -> Any:
    """A `ShardedOptimizer` of an optimizer's class, groups, options, state and hooks.

    All ranks call it. Hooks get the new optimizer from then on.

    Args:
        optimizer: Over parameters of a `pydist.DataParallel` model, or of a part of it.
        caller: Who makes it, for errors: "a sharded strategy".
        otherwise: What can be done instead, for errors: "choose strategy='pydist'".
        **settings: Of `ShardedOptimizer`.

    Raises:
        InvalidUsage: The optimizer can't be made anew, since it doesn't keep what it was given, or
            can't be sharded; or it has parameters of no such model.
    """
    kind = type(optimizer)
    # Behind the parameters, which come first.
    taken = list(inspect.signature(kind).parameters.values())[1:]
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [each.name for each in taken if each.kind not in various]
    forgotten = [name for name in names if name not in optimizer.defaults]
    if forgotten:
        raise InvalidUsage(
            f"{caller} can't make a {kind.__name__} anew, which doesn't tell in its `defaults` "
            f"what it was given as {', '.join(forgotten)}: make "
            f"pydist.ShardedOptimizer(parameters, {kind.__name__}, ...) once the model is wrapped, "
            f"or {otherwise}."
        )
    groups = [_with_names(group) for group in optimizer.param_groups]
    if model_of(None, groups) is None:
        raise InvalidUsage(
            f"the {kind.__name__} has parameters of no model that is set up, so nobody averages "
            "their gradients: set the model up first, by pydist.DataParallel or "
            "fabric.setup(model, optimizer), and register what is trained as a part of it."
        )
    defaults = {name: optimizer.defaults[name] for name in names}
    made = ShardedOptimizer(groups, kind, **settings, **defaults)
    if optimizer.state:
        with without_optimizer_hooks(optimizer):  # they are for the program's own checkpoints
            made.load_state_dict(optimizer.state_dict())
    share_optimizer_hooks(made, optimizer)
    return made


def _with_names(group: dict[str, Any]) -> dict[str, Any]:
    group = dict(group)
    names = group.pop("param_names", None)
    if names is not None:
        group["params"] = list(zip(names, group["params"], strict=True))
    return group
