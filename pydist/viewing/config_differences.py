"""In what the configurations of runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of each start and of no interest beside another's.
_LEFT_OUT = {"started", "first_step", "timeline", "trace"}
MISSING = "—"


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        name: Dotted, such as "config.lr".
        values: Of each run, as text.
        differs: Whether they are not all alike.
    """

    name: str
    values: tuple[str, ...]
    differs: bool


def compare(descriptions: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Every setting of any run, those that differ first.

    Args:
        descriptions: Of each run, what its last start was made with; empty where that is unknown.
    """
    flat = [
        _flattened({name: v for name, v in each.items() if name not in _LEFT_OUT})
        for each in descriptions
    ]
    settings = []
    for name in dict.fromkeys(name for each in flat for name in each):
        values = tuple(each.get(name, MISSING) for each in flat)
        settings.append(Setting(name, values, len(set(values)) > 1))
    return sorted(settings, key=lambda setting: not setting.differs)


def _flattened(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, each in value.items():
            found |= _flattened(each, f"{name}.{key}" if name else str(key))
        return found
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return {name: ", ".join(value)}
    return {name: value if isinstance(value, str) else json.dumps(value)}
