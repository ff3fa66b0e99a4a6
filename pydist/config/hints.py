"""Whether a value is of an annotated type, and that type in words."""

from __future__ import annotations

import math
import types
import typing
from typing import Any, Literal, Union


def matches(value: object, hint: Any) -> bool:
    """Whether a value, as TOML and JSON give it, is of a type that an argument is annotated with.

    Exactly, but that a whole number will do where any number does: no text is taken for a number,
    and no bool either.

    Args:
        value: made of None, bools, numbers, text, lists and dicts.
        hint: made of their types, Literal and unions.
    """
    origin, within = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(matches(value, each) for each in within)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in within)
    if origin is list:
        return isinstance(value, list) and all(matches(each, within[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            matches(key, within[0]) and matches(each, within[1]) for key, each in value.items()
        )
    if hint is Any:
        return True
    if hint is float:
        return type(value) in (int, float)
    return value is None if hint is types.NoneType else type(value) is hint


def holds_nan(value: Any) -> bool:
    """Whether a value, as TOML and JSON give it, is nan, or has it somewhere within."""
    if isinstance(value, dict):
        return any(map(holds_nan, value.values()))
    if isinstance(value, list):
        return any(map(holds_nan, value))
    return isinstance(value, float) and math.isnan(value)


def as_in_a_file(value: Any, within: tuple[int, ...] = ()) -> Any:
    """A value as a file has it: tuples are lists there. Makes new lists and dicts.

    Args:
        value: any.
        within: the ids of what it is part of.

    Raises:
        ValueError: a list or dict contains itself.
    """
    if not isinstance(value, (list, tuple, dict)):
        return value
    if id(value) in within:
        raise ValueError("a list or dict in it contains itself")
    within = (*within, id(value))
    if isinstance(value, dict):
        return {key: as_in_a_file(each, within) for key, each in value.items()}
    return [as_in_a_file(each, within) for each in value]


def in_words(hint: Any) -> str:
    """The values that `matches`, for a message: "'bf16', 'fp16' or None"."""
    parts = _parts(hint)
    return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _parts(hint: Any) -> list[str]:
    origin, within = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return [part for each in within for part in _parts(each)]
    if origin is Literal:
        return [repr(each) for each in within]
    if origin is list:
        return [f"a list of {_SEVERAL.get(within[0], within[0].__name__)}"]
    if origin is dict:
        return ["a table"]
    return [_NAMES.get(hint, getattr(hint, "__name__", str(hint)))]


_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "None",
}
_SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}
