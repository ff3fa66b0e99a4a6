"""Tells by its options whether a state is of another class: torch does not say of which."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from pydist.errors import InvalidUsage

# Options that torch has added to its classes, and that states of earlier versions lack.
_LATER_OPTIONS = {
    "foreach",
    "maximize",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}


def require_options_of(class_name: str, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Raises InvalidUsage where a group is of another class of optimizers.

    Args:
        class_name: Of the optimizer, for the error.
        optimizer: That is to take it over.
        group: Of a `state_dict()`.
    """
    ours = optimizer.defaults
    missing = ours.keys() - group.keys() - _LATER_OPTIONS
    # A class that wraps an optimizer may keep the options in the groups alone.
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
