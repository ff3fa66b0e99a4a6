"""A file that is replaced as a whole: who reads it meanwhile never gets half of it."""

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Puts a text, as UTF-8, in the place of what is there. What UTF-8 can't have becomes "?".

    Raises:
        OSError: it can't be written; what was there still is.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise
