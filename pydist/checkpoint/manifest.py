"""The list of a checkpoint's files with their checksums: the last file that is written."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydist.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "pydist checkpoint 1"
# The fact that says which of several checkpoints was saved later.
SEQUENCE = "sequence"
# The fact that says after which step it was saved.
STEP = "step"
_BLOCK_BYTES = 1 << 20
_SEQUENCE = re.compile(rf'"{SEQUENCE}": (\d+)'.encode())
_FOLDER_OF_STEP = re.compile(r"\.?step-(\d+)(?:\.previous)?")


@dataclass(frozen=True)
class FileSum:
    """What a file must be."""

    bytes: int
    sha256: str


def sum_of(path: Path) -> FileSum:
    """Reads a file."""
    digest = hashlib.sha256()
    count = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            count += len(block)
    return FileSum(count, digest.hexdigest())


def write_manifest(folder: Path, files: dict[str, FileSum], facts: dict[str, Any]) -> None:
    """Lists the files of a checkpoint; `facts` are for people, but for `SEQUENCE` and `STEP`."""
    listed = {name: [known.bytes, known.sha256] for name, known in sorted(files.items())}
    content = {"format": FORMAT, **facts, "files": listed, "sha256": _digest(listed)}
    with (folder / MANIFEST).open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """The files of a checkpoint.

    Raises:
        CheckpointError: There is no list, or it is damaged.
    """
    return {name: FileSum(*known) for name, known in _content_of(folder)["files"].items()}


def _content_of(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or can't be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise CheckpointError(f"{path} is of format {found!r}; this pydist reads {FORMAT!r}")
    listed = content.get("files")
    if not isinstance(listed, dict) or _digest(listed) != content.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its checksum is not that of its list")
    return content


def saved_after(folder: Path) -> int | None:
    """The step after which a checkpoint was saved; None if it was saved without one.

    Earlier versions tell it by the folder's name alone.

    Raises:
        CheckpointError: There is no list, or it is damaged.
    """
    step = _content_of(folder).get(STEP)
    if step is None and (found := _FOLDER_OF_STEP.fullmatch(folder.name)):
        step = int(found[1])
    if step is not None and not isinstance(step, int):
        raise CheckpointError(f"{folder / MANIFEST} is damaged: its step is {step!r}")
    return step


def sequence_of(folder: Path) -> int:
    """The number that a checkpoint got when it was saved; 0 if none, as by earlier versions.

    Also of a damaged list, where that can be: who loads the checkpoint is told of the damage.
    """
    try:
        with (folder / MANIFEST).open("rb") as file:
            # Facts come before files.
            match = _SEQUENCE.search(file.read(4096))
    except OSError:
        return 0
    return 0 if match is None else int(match[1])


def verify(folder: Path, name: str, known: FileSum) -> None:
    """Compares a file with what was written.

    Raises:
        CheckpointError: It differs, naming the file.
    """
    path = folder / name
    try:
        size = path.stat().st_size
        if size != known.bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes, where {known.bytes} were written"
            )
        found = sum_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if found != known:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {found.sha256[:16]}..., where "
            f"{known.sha256[:16]}... was written; load an earlier checkpoint"
        )


def _digest(listed: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
