"""The names in a state that torch's wrapper or ours has saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn


def without_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Takes `module.` off all names, unless it is the module that has them."""
    prefix = "module."
    if not state_dict or not all(name.startswith(prefix) for name in state_dict):
        return state_dict
    own = module.state_dict()
    if own and all(name.startswith(prefix) for name in own):
        stripped = all(name.removeprefix(prefix) in own for name in state_dict)
        if not stripped:
            return state_dict
    plain = OrderedDict((name.removeprefix(prefix), value) for name, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        plain._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name.removeprefix("module").removeprefix("."), value)
            for name, value in metadata.items()
            if name.startswith("module")
        )
    return plain
