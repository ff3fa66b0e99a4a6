"""Checks of arguments that several public calls have in common."""

from __future__ import annotations

from typing import Any

from pydist.errors import InvalidUsage

__all__ = ["flag"]


def flag(name: str, value: Any) -> bool:
    """An argument that says yes or no: a bool, or 0, 1 or None, which programs pass as well.

    Raises:
        InvalidUsage: It is something else. Text would mean yes, whatever it says.
    """
    try:
        is_flag = value is None or value in (0, 1)
    except (RuntimeError, ValueError):  # of arrays and tensors, which are asked for one value
        is_flag = False
    if not is_flag:
        raise InvalidUsage(f"{name} is {value!r}, a {type(value).__name__}; it must be a bool")
    return bool(value)
