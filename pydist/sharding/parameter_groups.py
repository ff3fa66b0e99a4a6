"""Parameter groups, as torch's optimizers understand their first argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type
from pydist.parallel.ownership import fitting, ids_in_any
from pydist.parallel.wrapper import DataParallel
from pydist.sharding.step.element_wise import require_plain_options

# What a parameter group has beside the options of the optimizer's class.
_NOT_OPTIONS = {"params", "param_names"}


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, as the optimizer's class takes them."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


_WHAT_IT_TAKES = (
    "pydist.ShardedOptimizer takes a pydist.DataParallel model, parameters, pairs of names and "
    "parameters, or dictionaries of 'params' and options"
)


def listed(params: Any) -> list[Any]:
    """A group's "params", which may be a single one."""
    if isinstance(params, (set, frozenset)):
        raise InvalidUsage(
            "parameters are in a set, whose order differs between processes: pass a list"
        )
    return [params] if isinstance(params, Tensor) else list(params)


def groups_of(model_or_params: nn.Module | Iterable[Any]) -> list[dict[str, Any]]:
    """The groups that an optimizer is given.

    Raises:
        InvalidUsage: There are none, a model that is not wrapped, or what is no parameter.
    """
    if isinstance(model_or_params, nn.Module):
        if not isinstance(model_or_params, DataParallel):
            raise InvalidUsage(
                f"model_or_params is {a_type(model_or_params)}: wrap it in "
                "pydist.DataParallel first, or pass model.parameters() if something else averages "
                "its gradients"
            )
        named = list(model_or_params.named_parameters())
        return [{"params": named}]
    if isinstance(model_or_params, Tensor):
        raise InvalidUsage("model_or_params is a tensor; pass a list of parameters")
    if not isinstance(model_or_params, Iterable):
        raise InvalidUsage(f"model_or_params is {a_type(model_or_params)}; {_WHAT_IT_TAKES}")
    items = listed(model_or_params)
    if not items:
        raise InvalidUsage(
            "pydist.ShardedOptimizer got an empty list of parameters, perhaps of an iterator that "
            f"something has gone through before; {_WHAT_IT_TAKES}"
        )
    if not isinstance(items[0], dict):
        return [{"params": _checked(items, "model_or_params")}]
    return [checked_group(group, number) for number, group in enumerate(items)]


def named_like(model: DataParallel, params: list[Any]) -> list[Any]:
    """A group's "params", all of the model: those without names with the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [item if isinstance(item, tuple) else (names[id(item)], item) for item in params]


def checked_group(group: Any, number: int) -> dict[str, Any]:
    """A group with its parameters listed.

    Args:
        group: As a user gave it.
        number: Among the optimizer's, for errors.

    Raises:
        InvalidUsage: It is none.
    """
    if not isinstance(group, dict):
        raise InvalidUsage(
            f"parameter group {number} is {a_type(group)}, where the first is a "
            f"dictionary; {_WHAT_IT_TAKES}"
        )
    if "params" not in group:
        raise InvalidUsage(
            f"parameter group {number} has no 'params', but "
            f"{', '.join(map(repr, group)) or 'nothing'}: a group is a dictionary of 'params' and "
            "options, and names are spelled as in torch"
        )
    what = f"'params' of parameter group {number}"
    if not isinstance(group["params"], Iterable):
        raise InvalidUsage(
            f"{what} is {a_type(group['params'])}; it must be a parameter, or a list of "
            "parameters or of pairs of names and parameters"
        )
    return {**group, "params": _checked(listed(group["params"]), what)}


def _checked(items: list[Any], what: str) -> list[Any]:
    for position, item in enumerate(items):
        found = item[1] if isinstance(item, tuple) and len(item) == 2 else item
        if not isinstance(found, Tensor):
            raise InvalidUsage(f"item {position} of {what} is {a_type(found)}; {_WHAT_IT_TAKES}")
    return items


def _parameters_in(param_groups: Iterable[dict[str, Any]]) -> Iterator[Tensor]:
    for group in param_groups:
        for item in listed(group["params"]):
            yield item[1] if isinstance(item, tuple) else item


def model_of(
    model: nn.Module | Iterable[Any] | None,
    param_groups: list[dict[str, Any]],
    expected: DataParallel | None = None,
) -> DataParallel | None:
    """The wrapped model that the parameters are of.

    Frozen ones may be of several, as where adapters share a base: then those that train decide.

    Args:
        model: What an optimizer was given, if it may be the model itself.
        param_groups: Its groups.
        expected: The one to prefer of several that have the parameters; default: the newest.

    Raises:
        InvalidUsage: No one model has them all.
    """
    if isinstance(model, DataParallel):
        return model
    parameters = list(_parameters_in(param_groups))
    found = fitting(parameters)
    if not found and not ids_in_any().isdisjoint(map(id, parameters)):
        raise InvalidUsage(
            "pydist.ShardedOptimizer was given parameters of several models, or of a "
            "pydist.DataParallel model and of others: make one for each"
        )
    return expected if expected in found else next(iter(found), None)


def require_model(group: dict[str, Any], model: DataParallel | None) -> None:
    """Raises InvalidUsage where a group that is added is not of the optimizer's wrapped model.

    Args:
        group: With its parameters listed.
        model: The one that the others are of; None: of none.
    """
    found = model_of(None, [group], model)
    if found is model:
        return
    remedy = "make another pydist.ShardedOptimizer for the model"
    if model is not None:
        remedy = (
            "register them in the wrapped module first, as in model.module.append(layer), or use "
            "an optimizer of their own for them"
        )
    raise InvalidUsage(
        f"add_param_group() was given parameters of {'no' if found is None else 'another'} "
        f"pydist.DataParallel model, unlike those that the optimizer has: {remedy}"
    )


def require_sizes(param_groups: list[dict[str, Any]], sizes: list[int]) -> None:
    """Raises where a group or a parameter was removed: buckets know their groups by number.

    Args:
        param_groups: The optimizer's.
        sizes: How many parameters it was given in each.
    """
    counts = [len(group["params"]) for group in param_groups]
    if counts != sizes:
        raise InvalidUsage(
            "pydist.ShardedOptimizer's param_groups were changed by hand: it was given "
            f"{sum(sizes)} parameters in {len(sizes)} groups, and "
            f"step() finds {sum(counts)} in {len(counts)}. Add groups by add_param_group(); "
            "none can be removed: freeze its parameters instead, by requires_grad_(False) and "
            "parameter.grad = None"
        )


def prototype_of(
    optimizer_class: type[Optimizer],
    options: dict[str, Any],
    param_groups: list[dict[str, Any]],
) -> Optimizer:
    """The wrapped class over nothing: checks options, and has all of them.

    Args:
        optimizer_class: The class.
        options: That it is given.
        param_groups: Whose own options it gets.
    """
    empty = []
    for group in param_groups:
        tensors = [item[1] if isinstance(item, tuple) else item for item in listed(group["params"])]
        params = [
            torch.empty(0, dtype=t.dtype, device=t.device)
            for t in tensors[:1]
            if isinstance(t, Tensor)
        ]
        empty.append({**options_of(group), "params": params})
    prototype = optimizer_class(empty, **options)
    for group in prototype.param_groups:
        require_plain_options(group)
    return prototype
