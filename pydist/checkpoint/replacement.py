"""How a checkpoint comes to its place: whatever happens, the old or the new one is there, whole.

It is written into `.NAME.partial` beside its place and, once all of it is on the disk, renamed. A
folder can't be renamed onto another, so one that is there is first renamed to `.NAME.previous`; who
finds a place empty looks there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from pydist.checkpoint.manifest import MANIFEST, is_damaged, sequence_of
from pydist.errors import CheckpointError, InvalidUsage

_STEP = re.compile(r"step-(\d+)")


def absolute(path: str | os.PathLike[str]) -> Path:
    """A path that a user gave, from the root."""
    try:
        return Path(os.path.abspath(path))
    except (TypeError, ValueError) as error:
        raise InvalidUsage(f"path={path!r} is not valid: {error}") from error


def real(path: str | os.PathLike[str]) -> Path:
    """The path without links, by which a place is known."""
    return Path(os.path.realpath(absolute(path)))


def step_folder(path: Path, step: int) -> Path:
    """The folder of a step's checkpoint below `path`."""
    return path / f"step-{step:06d}"


def partial_of(place: Path) -> Path:
    """The folder in which a checkpoint is written until it is whole."""
    return place.with_name(f".{place.name}.partial")


def _previous_of(place: Path) -> Path:
    return place.with_name(f".{place.name}.previous")


def require_no_checkpoint(path: Path) -> None:
    """Raises InvalidUsage where checkpoints of steps would lie within another one."""
    if is_checkpoint(path) or is_checkpoint(_previous_of(path)):
        raise InvalidUsage(
            f"{path} is a checkpoint itself, and what is within it goes when it is replaced: pass "
            "another path together with step="
        )


def begin(place: Path) -> Path:
    """Makes the folder to write into, once what an interrupted save has left is gone."""
    if place.exists() and not is_checkpoint(place) and not _is_empty(place):
        raise CheckpointError(
            f"{place} exists and is no checkpoint: pass another path, or step= to write one within"
        )
    partial, previous = partial_of(place), _previous_of(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    if previous.exists():
        if is_checkpoint(place):
            shutil.rmtree(previous)
        else:
            if place.exists():  # empty: what is at `previous` is the checkpoint
                place.rmdir()
            previous.rename(place)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    return partial


def publish(place: Path) -> None:
    """Puts what was written at its place."""
    partial, previous = partial_of(place), _previous_of(place)
    sync_folder(partial)
    is_there = place.exists()
    if is_there:
        place.rename(previous)
    partial.rename(place)
    sync_folder(place.parent)
    if is_there:
        shutil.rmtree(previous)


def forget_older(path: Path, keep: int, newest: int) -> None:
    """Removes all checkpoints of steps but the `keep` saved last, and halves of others.

    Args:
        path: Where they are.
        keep: How many stay.
        newest: The step that was saved just now, which is one of them.
    """
    for left in path.glob(".step-*.partial"):
        shutil.rmtree(left)
    steps = _steps(path)
    others = sorted((step for step in steps if step != newest), key=_order_in(steps))
    for step in others[: max(0, len(others) - (keep - 1))]:
        # Out of sight first: a folder that is half removed must not look like a checkpoint.
        doomed = partial_of(step_folder(path, step))
        steps[step].rename(doomed)
        shutil.rmtree(doomed)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of a step that was saved last. Talks to nobody.

    That need not be of the largest step: one may go back to an earlier step, and on from there.

    Args:
        path: What `pydist.save` was given together with `step=`.

    Returns:
        Its folder; None if there is none.
    """
    steps = _steps(Path(path))
    if not steps:
        return None
    largest = steps[max(steps)]
    # Where its list is damaged, what that says of the order may be, too. Who loads it is told.
    return largest if is_damaged(largest) else steps[max(steps, key=_order_in(steps))]


def next_sequence(place: Path) -> int | None:
    """The number that marks a step's checkpoint as the latest of its folder; None for others."""
    if not _STEP.fullmatch(place.name):
        return None
    return 1 + max(map(sequence_of, _steps(place.parent).values()), default=0)


def find(path: Path) -> Path:
    """The folder of the checkpoint that is meant: at `path`, or the one saved last of those within.

    Raises:
        CheckpointError: There is none.
    """
    for folder in (path, _previous_of(path), latest(path)):
        if folder is not None and is_checkpoint(folder):
            return folder
    raise CheckpointError(f"there is no checkpoint at {path}, nor one of a step within it")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder was completely written."""
    return (folder / MANIFEST).is_file()


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())


def _order_in(steps: dict[int, Path]) -> Callable[[int], tuple[int, int]]:
    """The order in which steps were saved."""
    return lambda step: (sequence_of(steps[step]), step)


def _steps(path: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    if not path.is_dir():
        return found
    for folder in path.iterdir():
        name = folder.name.removeprefix(".").removesuffix(".previous")
        match = _STEP.fullmatch(name)
        is_previous = name != folder.name
        if match and is_checkpoint(folder) and not (is_previous and int(match[1]) in found):
            found[int(match[1])] = folder
    return {
        step: path / name if is_checkpoint(path / (name := step_folder(path, step).name)) else at
        for step, at in found.items()
    }


def sync_folder(folder: Path) -> None:
    """Brings names in a folder to the disk, as fsync does contents."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
