"""The list of a checkpoint's files with their checksums: the last file that is written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydist.errors import CheckpointError

MANIFEST = "manifest.json"
# The file that says where everything is in the others; torch's reader goes by its name.
METADATA = ".metadata"
FORMAT = "pydist checkpoint 2"
# Its checksum is that of the list of files alone.
_FORMAT_BEFORE = "pydist checkpoint 1"
# The checksum of all bytes before stands in the last lines.
_LAST_LINES = ',\n "sha256": "{}"\n}}\n'
# The fact that says which of several checkpoints was saved later.
SEQUENCE = "sequence"
# The fact that says after which step it was saved.
STEP = "step"
# The fact that says how the training was set up, by sections; see `pydist.Config`.
CONFIG = "config"
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
    """Lists the files of a checkpoint; `facts` are for people, but for those with names above."""
    listed = {name: [known.bytes, known.sha256] for name, known in sorted(files.items())}
    content = json.dumps({"format": FORMAT, **facts, "files": listed}, indent=1)
    content = content.removesuffix("\n}")
    with (folder / MANIFEST).open("w") as file:
        file.write(content + _LAST_LINES.format(_digest(content)))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """The files of a checkpoint, by name: all of them are in its folder.

    No other file is opened, so that verifying these verifies all that is read. `METADATA` is one.

    Raises:
        CheckpointError: There is no list, or it is damaged.
    """
    found = {}
    for name, known in _content_of(folder)["files"].items():
        is_sum = isinstance(known, list) and [type(each) for each in known] == [int, str]
        if not is_sum or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointError(f"{folder / MANIFEST} is damaged: it lists {name!r}: {known!r}")
        found[name] = FileSum(*known)
    if METADATA not in found:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: it does not list {METADATA}")
    return found


def is_damaged(folder: Path) -> bool:
    """Whether a checkpoint's list can't be read as it was written."""
    try:
        _content_of(folder)
    except CheckpointError:
        return True
    return False


def _content_of(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode()  # a text file's other ends of lines would be taken for \n
        content: Any = json.loads(text)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or can't be read: {error}") from error
    of = content.get("format") if isinstance(content, dict) else content
    if of not in (FORMAT, _FORMAT_BEFORE):
        raise CheckpointError(f"{path} is of format {of!r}; this pydist reads {FORMAT!r}")
    listed = content.get("files")
    if of == FORMAT:
        before, _, _ = text.rpartition(_LAST_LINES.partition("{")[0])
        is_whole = text == before + _LAST_LINES.format(_digest(before))
    else:
        is_whole = content.get("sha256") == _digest(json.dumps(listed, sort_keys=True))
    if not is_whole or not isinstance(listed, dict):
        raise CheckpointError(f"{path} is damaged: its checksum is not that of what it says")
    facts: dict[str, Any] = content
    return facts


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


def config_in(folder: Path) -> dict[str, Any]:
    """How the training was set up that saved a checkpoint; empty for those of earlier versions.

    Raises:
        CheckpointError: There is no list, or it is damaged.
    """
    config = _content_of(folder).get(CONFIG, {})
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / MANIFEST} is damaged: its config is {config!r}")
    return config


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
        found_there = path.lstat()
        if not stat.S_ISREG(found_there.st_mode):
            raise CheckpointError(f"{path} is no plain file, so no checkpoint was written there")
        size = found_there.st_size
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
