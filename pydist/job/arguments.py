"""Checks of arguments that several public calls have in common, and words for what was given."""

from __future__ import annotations

import re
from typing import Any

from pydist.errors import InvalidUsage

# Names that are spoken with a vowel first: "int", "ndarray", initials such as "SGD"; but not
# "UniformSampler", "uint8", "UUID" or "OneCycleLR".
_VOWEL_FIRST = re.compile(r"[AEIaei]|[Oo](?!ne)|[Uu](?!ni|se|i|[A-Z])|[FHLMNRSX](?=[A-Z]|$)|nd")


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
        raise InvalidUsage(f"{name} is {value!r}, {a_type(value)}; it must be a bool")
    return bool(value)


def a_type(value: object) -> str:
    """The type of what was given, for an error: "an int", "a list"; None is "None"."""
    return "None" if value is None else with_article(type(value).__name__)


def with_article(name: str) -> str:
    """A type's name behind "a" or "an"."""
    return f"{'an' if _VOWEL_FIRST.match(name) else 'a'} {name}"
