"""Which folders hold runs, and by what names the page tells them apart."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydist.errors import InvalidUsage
from pydist.monitoring.step_file import NAME


@dataclass(frozen=True)
class RunFolder:
    """A run on disk.

    Attributes:
        name: No other run of the page has it.
        path: Its folder, without links.
    """

    name: str
    path: Path


def find_runs(places: Sequence[str | os.PathLike[str]]) -> list[RunFolder]:
    """The runs in some folders and below them, each once, in the order of their paths.

    Links to folders are followed.

    Raises:
        InvalidUsage: a place is no folder, or none of them holds a run.
    """
    # By the real path, in the words of the place where it was found first.
    called: dict[Path, Path] = {}
    for place in places:
        if not Path(place).is_dir():
            raise InvalidUsage(f"{os.fspath(place)!r} is no folder; give folders of runs.")
        real = Path(place).resolve()
        for path in sorted(_below(real)):
            is_within = path.is_relative_to(real)
            as_said = Path(os.path.abspath(place), path.relative_to(real)) if is_within else path
            called.setdefault(path, as_said)
    if not called:
        where = ", ".join(repr(os.fspath(place)) for place in places)
        raise InvalidUsage(
            f"no {NAME} in {where}, nor in a folder below; `pydist.monitor(folder)` writes it."
        )
    names = _names(list(called.values()))
    return [RunFolder(name, path) for name, path in zip(names, called, strict=True)]


def _below(folder: Path) -> Iterator[Path]:
    """Follows links, also those to folders above: no folder is looked at twice."""
    seen: set[str] = set()
    for path, below, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(path)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        if NAME in files and os.path.isfile(os.path.join(path, NAME)):
            yield Path(real)


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell all of them apart, alike in length."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(paths):
            break
    return names
