"""Objects as bytes that torch loads without running code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from pydist.errors import InvalidUsage
from pydist.job.arguments import with_article


def pack(what: str, value: Any) -> bytes:
    """An object as bytes that torch loads without running code.

    Numbers of numpy's, which a schedule of `np.cos` makes of a learning rate, become Python's of
    the same value.

    Raises:
        InvalidUsage: It holds something else than numbers, text, tensors and containers of them.
    """
    try:
        try:
            return _packed(value)
        except pickle.UnpicklingError:
            return _packed(_with_plain_numbers(value))
    except Exception as error:
        raise InvalidUsage(
            f"{what} can't be saved: {_culprit(value, '', error)}, and a checkpoint holds numbers, "
            "text, tensors, and lists, tuples and dictionaries of them"
        ) from error


def _culprit(value: Any, place: str, error: Exception) -> str:
    """The smallest part of a value that can't be saved: what it is, where, and what it says."""
    items: Iterable[tuple[Any, Any]] = ()
    if type(value) is dict:
        items = value.items()
    elif type(value) in (list, tuple):
        items = enumerate(value)
    for key, item in items:
        try:
            _packed(_with_plain_numbers(item))
        except Exception as inner:
            return _culprit(item, f"{place}[{key!r}]", inner)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    kind = with_article(name.removeprefix("builtins."))
    said = "" if isinstance(error, pickle.UnpicklingError) else f": {str(error).splitlines()[0]}"
    return f"it holds {kind} at {place}{said}" if place else f"it is {kind}{said}"


def unpack(packed: bytes) -> Any:
    """What `pack` was given."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    packed = stream.getvalue()
    unpack(packed)
    return packed


def _with_plain_numbers(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        pairs = ((_with_plain_numbers(k), _with_plain_numbers(v)) for k, v in value.items())
        return dict(pairs)
    if type(value) in (list, tuple):
        return type(value)(_with_plain_numbers(each) for each in value)
    return value
