"""Files that a benchmark leaves: refused before anything is measured, or written whole."""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from pydist.errors import Error, InvalidUsage
from pydist.monitoring import whole_file


def _is_stream(path: Path) -> bool:
    """Whether it is there and no regular file: /dev/stdout, /dev/null, a pipe."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def require_writable(path: Path) -> None:
    """Sees to it that a file can be written, by trying; an earlier one stays as it is.

    Args:
        path: a file, there or not; its folder must exist. Streams (/dev/stdout) will do.

    Raises:
        InvalidUsage: it can't be written; the message says why.
    """
    if os.path.isdir(path):
        raise InvalidUsage(f"{path} can't be written: it is a folder; name a file.")
    if _is_stream(path):
        if not os.access(path, os.W_OK):
            raise InvalidUsage(f"{path} can't be written: permission denied.")
        return
    # Through links, so that they stay what they are.
    target = Path(os.path.realpath(path))
    part = whole_file.part_of(target)
    try:
        part.touch()
        part.unlink()
        # Which tells of a name that is too long, say.
        with contextlib.suppress(FileNotFoundError):
            target.stat()
    except OSError as error:
        reason = error.strerror or str(error)
        if not target.parent.is_dir():
            reason = f"there is no folder {path.parent}"
        raise InvalidUsage(f"{path} can't be written: {reason}.") from None


def write_text_whole(path: Path, text: str) -> None:
    """Writes a text in UTF-8, as `write_whole` does."""
    write_whole(path, text.encode())


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that whoever looks sees the old one or all of the new one.

    Args:
        path: a file, there or not; its folder must exist.
        content: what it holds then.

    Raises:
        Error: it can't be written; an earlier file is as it was.
    """
    try:
        if _is_stream(path):
            with path.open("wb") as stream:
                stream.write(content)
            return
        whole_file.write_whole(path, content)
    except OSError as error:
        raise Error(f"{path} can't be written: {error.strerror or error}.") from None


def json_text(report: dict[str, Any]) -> str:
    """A report as JSON that every reader takes: NaN and infinity are refused, for JSON has none."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"
