"""`config.json`: what a run was started with, once for each time that it was started or went on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pydist import _native
from pydist._load import __version__
from pydist.config import in_force
from pydist.monitoring.step_file import as_text
from pydist.monitoring.trace_mark import mark_of, trace_of_rank
from pydist.monitoring.whole_file import write_whole

NAME = "config.json"

# By which the ranks of a job know each other: nobody else may read it.
_SECRET = "PYDIST_JOB_SECRET"


def describe(
    config: Mapping[str, Any], world_size: int, backend: str, hosts: list[str], first_step: int
) -> dict[str, Any]:
    """This start of a run.

    Args:
        config: What the program tells.
        world_size: How many ranks there are.
        backend: What carries their data.
        hosts: The host of each rank.
        first_step: The first step of this start.
    """
    declared = {name for name, *_ in _native.environment_variables()} - {_SECRET}
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "first_step": first_step,
        "versions": {
            "pydist": __version__,
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "world_size": world_size,
        "backend": backend,
        "hosts": list(dict.fromkeys(hosts)),
        "variables": {name: os.environ[name] for name in sorted(declared & set(os.environ))},
        "settings": in_force.to_save(),
        # Relative paths are those of the process, which the page's reader is not in.
        "timeline": _absolute(os.environ.get("PYDIST_TIMELINE")),
        "config": _readable(config),
    }


def _absolute(path: str | None) -> str | None:
    return os.path.abspath(path) if path else None


def _readable(value: Any) -> Any:
    """As JSON: what it has no form for, such as a dtype or a path, is its text."""
    if isinstance(value, Mapping):
        return {str(key): _readable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return as_text(value)
    # Without where in memory something lies, by which no two runs would be alike.
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def write(folder: Path, start: dict[str, Any]) -> None:
    """Adds a start to the file, which is replaced as a whole.

    Raises:
        OSError: it can't be written.
    """
    _write(folder, [*starts_in(folder), start])


def _write(folder: Path, starts: list[dict[str, Any]]) -> None:
    write_whole(folder / NAME, (json.dumps({"starts": starts}, indent=2) + "\n").encode())


def note_trace(folder: Path, timeline: Path) -> bool:
    """Notes by what the last start knows its trace again; False where there is nothing to note yet.

    Args:
        folder: Of the run.
        timeline: What PYDIST_TIMELINE says.

    Raises:
        OSError: the file can't be written.
    """
    mark = mark_of(trace_of_rank(timeline, 0))
    if mark is None:
        return False
    starts = starts_in(folder)
    if not starts:
        return True
    starts[-1]["trace"] = mark
    _write(folder, starts)
    return True


def starts_in(folder: Path) -> list[dict[str, Any]]:
    """The starts that the file of a run tells of; none where it is missing or unreadable."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    starts = found.get("starts") if isinstance(found, dict) else None
    return [each for each in starts if isinstance(each, dict)] if isinstance(starts, list) else []
