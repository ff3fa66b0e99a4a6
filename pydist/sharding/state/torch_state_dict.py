"""A sharded state in the form of the state_dict of torch's optimizers: by number, not by name.

torch does not say of which class such a state is: `require_options_of` tells it by the options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type
from pydist.sharding.buckets import shaped
from pydist.sharding.parameter_groups import options_of
from pydist.sharding.state.ranges import (
    ParameterState,
    ShardedState,
    StateRange,
    from_whole,
    is_per_element,
)
from pydist.sharding.state.refused_saving import RanksPart

# What torch has given its classes since, and states of earlier versions lack.
_LATER_OPTIONS = {
    "foreach",
    "maximize",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}


def to_state_dict(local: ShardedState, part: RanksPart) -> dict[str, Any]:
    """What `from_state_dict` takes; see `ShardedOptimizer.state_dict`.

    Args:
        local: A part of the state, of the parameters in the order of their groups.
        part: Whose it is.
    """
    numbers = {name: number for number, name in enumerate(local.parameters)}
    return {
        "state": {
            numbers[name]: [(r.begin, r.end, r.values) for r in state.ranges]
            for name, state in local.parameters.items()
            if state.ranges
        },
        "param_groups": renamed(local.groups, numbers),
        "parameters": [
            (name, state.shape, state.dims, state.is_part)
            for name, state in local.parameters.items()
        ],
        "part": part,
    }


def to_unsharded(local: ShardedState) -> dict[str, Any]:
    """What a class of torch's has for whole parameters; shares memory with the state.

    Float32 copies of parameters in 16 bits are among the values: torch's classes pass them by.

    Args:
        local: All of a state, as the only rank has it.
    """
    numbers = {name: number for number, name in enumerate(local.parameters)}
    return {
        "state": {
            numbers[name]: {
                key: shaped(value, state.shape, state.dims)
                if is_per_element(value, state.count)
                else value
                for key, value in state.ranges[0].values.items()
            }
            for name, state in local.parameters.items()
            if state.ranges and state.ranges[0].values
        },
        "param_groups": renamed(local.groups, numbers),
    }


def renamed(groups: Iterable[Mapping[str, Any]], names: Any) -> list[dict[str, Any]]:
    """Parameter groups, with what `names` has for each of the parameters."""
    return [{**group, "params": [names[known] for known in group["params"]]} for group in groups]


def require_form(state_dict: Mapping[str, Any]) -> None:
    """Raises InvalidUsage where it is of no optimizer."""
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise InvalidUsage(
            f"the state of the optimizer has no {missing[0]!r}: pass the state_dict() of an "
            "unsharded one, or ZeroRedundancyOptimizer's after consolidate_state_dict()"
        )


def is_sharded(state_dict: Mapping[str, Any]) -> bool:
    """Whether it is of `to_state_dict`, rather than of a class of torch's.

    The mark decides, which is a `torch.Size` once it was pickled: hooks may add any other key.
    """
    return isinstance(state_dict.get("part"), RanksPart | torch.Size)


def from_state_dict(state_dict: dict[str, Any]) -> ShardedState:
    """The state that `to_state_dict` was given.

    Raises:
        InvalidUsage: What it says of the parameters was written over.
    """
    if not isinstance(state_dict.get("parameters"), list | tuple):
        raise InvalidUsage(
            "the state of a pydist.ShardedOptimizer has a list of its parameters' names and shapes "
            f"under 'parameters', and this one has {a_type(state_dict.get('parameters'))} there: a "
            "state-dict hook must have written over it, and has to take another key"
        )
    parameters = {
        name: ParameterState(
            tuple(shape),
            tuple(dims),
            [StateRange(*found) for found in state_dict["state"].get(number, [])],
            is_part,
        )
        for number, (name, shape, dims, is_part) in enumerate(state_dict["parameters"])
    }
    names = [name for name, *_ in state_dict["parameters"]]
    return ShardedState(parameters, renamed(state_dict["param_groups"], names))


def without_absent(
    state_dict: Mapping[str, Any], param_groups: Sequence[dict[str, Any]], present: Collection[int]
) -> Mapping[str, Any]:
    """A class of torch's has state of all its parameters: this is of those that the model has.

    Args:
        state_dict: Of the class, for all parameters of the groups; another is returned as it is.
        param_groups: Of the optimizer.
        present: The ids of what the model has of their parameters.
    """
    theirs = [group["params"] for group in state_dict["param_groups"]]
    if [len(numbers) for numbers in theirs] != [len(group["params"]) for group in param_groups]:
        return state_dict
    kept = [
        [n for n, p in zip(numbers, group["params"], strict=True) if id(p) in present]
        for numbers, group in zip(theirs, param_groups, strict=True)
    ]
    absent = {n for numbers in theirs for n in numbers} - {n for numbers in kept for n in numbers}
    return {
        **state_dict,
        "state": {n: values for n, values in state_dict["state"].items() if n not in absent},
        "param_groups": [
            {**group, "params": numbers}
            for group, numbers in zip(state_dict["param_groups"], kept, strict=True)
        ],
    }


def from_unsharded(
    state_dict: Mapping[str, Any], ordered: Sequence[tuple[str, Tensor]]
) -> ShardedState:
    """The state that a class of torch's has of whole parameters.

    Args:
        state_dict: Of the class.
        ordered: Names and parameters, in the order of the groups.

    Raises:
        InvalidUsage: It is of another number of parameters, or of other ones.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(numbers) != len(ordered):
        raise InvalidUsage(
            f"a state of {len(numbers)} parameters was loaded, where the optimizer has "
            f"{len(ordered)}"
        )
    names = {number: name for number, (name, _) in zip(numbers, ordered, strict=True)}
    shapes = {number: p.shape for number, (_, p) in zip(numbers, ordered, strict=True)}
    for number, values in state_dict["state"].items():
        if number not in names:
            raise InvalidUsage(
                f"the state has values for a parameter {number} that is in none of its groups: it "
                "is a part of a state; ZeroRedundancyOptimizer has the whole one after "
                "consolidate_state_dict()"
            )
        for key, value in values.items():
            is_number = not isinstance(value, Tensor) or value.numel() == 1
            if not is_number and value.shape != shapes[number]:
                raise InvalidUsage(
                    f"the state of parameter {names[number]} has {key} of shape "
                    f"{tuple(value.shape)}, where the parameter is {tuple(shapes[number])}"
                )
    parameters = {
        name: from_whole(parameter, state_dict["state"].get(number, {}))
        for number, (name, parameter) in zip(numbers, ordered, strict=True)
    }
    loaded = [
        {**options_of(group), "params": [names[number] for number in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return ShardedState(parameters, loaded)


def require_options_of(class_name: str, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Raises InvalidUsage where a group is of another class of optimizers.

    Args:
        class_name: Of the optimizer, for the error.
        optimizer: That is to take it over.
        group: Of a `state_dict()`.
    """
    ours = optimizer.defaults
    missing = ours.keys() - group.keys() - _LATER_OPTIONS
    # A class that wraps an optimizer may keep options in its groups alone.
    known = ours.keys() | optimizer.param_groups[0].keys() | _LATER_OPTIONS
    foreign = (group.keys() - known) & _torchs_options()
    decoupled = "decoupled_weight_decay"  # as Adam is, or AdamW
    differs = decoupled in ours and group.get(decoupled, ours[decoupled]) != ours[decoupled]
    if missing or foreign or differs:
        said = [f"it lacks {key}" for key in sorted(missing)]
        said += [f"it has {key}" for key in sorted(foreign)]
        said += [f"its {decoupled} is {group[decoupled]}"] if differs else []
        raise InvalidUsage(
            f"the state of the optimizer is of another class than {class_name}: {', '.join(said)}; "
            "load it into an optimizer of the class that it is of"
        )


@functools.cache
def _torchs_options() -> frozenset[str]:
    """What the classes of torch.optim may have in groups, whichever of them."""
    classes = (c for c in vars(torch.optim).values() if isinstance(c, type))
    return frozenset(
        key
        for kind in classes
        if issubclass(kind, Optimizer)
        for key in inspect.signature(kind).parameters
        if key not in ("params", "defaults")
    )
