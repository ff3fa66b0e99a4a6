"""Configurations in files: TOML and JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pydist.errors import InvalidUsage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which may say a name twice, where TOML and DeepSpeed may not."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice in one table: take one out")
    return found


def read_tables(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file says: JSON if its name ends so, otherwise TOML.

    Raises:
        InvalidUsage: it can't be read, or is something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        is_json = str(path).endswith(".json")
        found = json.loads(text, object_pairs_hook=_once_each) if is_json else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # both parsers raise ValueErrors
        raise InvalidUsage(f"the configuration {os.fspath(path)} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidUsage(f"the configuration {os.fspath(path)} must be an object of sections")
    return found
