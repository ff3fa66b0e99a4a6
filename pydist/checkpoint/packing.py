"""Objects as bytes that torch loads without running code."""

from __future__ import annotations

import io
import re
from typing import Any

import torch

from pydist.errors import InvalidUsage


def pack(what: str, value: Any) -> bytes:
    """An object as bytes that torch loads without running code.

    Raises:
        InvalidUsage: It holds something else than numbers, text, tensors and containers of them.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        unpack(stream.getvalue())
    except Exception as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it holds a {found[1]}" if found else str(error).splitlines()[0]
        raise InvalidUsage(
            f"{what} can't be saved: {why}, and a checkpoint holds numbers of Python's, text, "
            "tensors, and lists, tuples and dictionaries of them"
        ) from error
    return stream.getvalue()


def unpack(packed: bytes) -> Any:
    """What `pack` was given."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
