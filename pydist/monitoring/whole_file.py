"""A file that is replaced as a whole: who reads it meanwhile never gets half of it."""

import os
from contextlib import suppress
from pathlib import Path


def part_of(path: Path) -> Path:
    """The temporary neighbour that becomes the file: only within a folder is renaming atomic."""
    return path.with_name(f".pydist-{os.getpid()}.part")


def write_whole(path: Path, content: bytes) -> None:
    """Puts `content` in the place of what is there; a link stays one.

    Raises:
        OSError: it can't be written; what was there still is.
    """
    target = Path(os.path.realpath(path))
    part = part_of(target)
    try:
        part.write_bytes(content)
        part.replace(target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
