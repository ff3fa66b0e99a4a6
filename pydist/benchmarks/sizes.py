"""Sizes of buffers: how they are written, and which of them a sweep visits."""

import math
import re

from pydist.errors import InvalidUsage

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(text: str) -> int:
    """Bytes of "8", "16K", "25M" or "1.5G": powers of 1024, as nccl-tests has them.

    Raises:
        InvalidUsage: it is nothing of the kind.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InvalidUsage(f"{text!r} is not a size: write bytes as 8, 16K, 25M or 1G.")
    return int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


def size_text(size_bytes: int) -> str:
    """The shortest exact way to write it for people: "25 MiB", "8 B"."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.4g} {unit}"
    return f"{size_bytes} B"


def sweep(first: int, last: int, factor: float | None, step: int | None) -> list[int]:
    """The sizes from `first` to `last`, both in bytes and included where they are reached.

    Args:
        factor: each size is the one before times this, more than 1; or
        step: each size is the one before plus this many bytes.

    Raises:
        InvalidUsage: there is no such size, or no end to them.
    """
    if first < 1:
        raise InvalidUsage(f"-b {first}: the smallest size is 1 byte.")
    if last < first:
        raise InvalidUsage(
            f"-b {first} -e {last}: no size is at least the first and at most the second."
        )
    if factor is not None and step is not None:
        raise InvalidUsage("-f (factor) and -i (increment) exclude each other; give one of them.")
    if factor is not None and not 1 < factor < math.inf:
        raise InvalidUsage(f"-f {factor:g}: the factor between sizes must be more than 1.")
    if step is not None and step < 1:
        raise InvalidUsage(f"-i {step}: the increment between sizes must be 1 byte or more.")
    sizes = [first]
    while True:
        following = sizes[-1] + step if step is not None else int(sizes[-1] * (factor or 2))
        following = max(following, sizes[-1] + 1)
        if following > last:
            return sizes
        sizes.append(following)
