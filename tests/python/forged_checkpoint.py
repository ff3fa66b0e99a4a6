"""Checkpoints as other hands may leave them: with a list of files that fits all the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydist.checkpoint.manifest import FileSum, read_manifest, sum_of, write_manifest

_AFTER_FACTS = ("format", "files", "sha256")


def facts_of(folder: Path) -> dict[str, Any]:
    """What the list says beside the files."""
    content = json.loads((folder / "manifest.json").read_text())
    return {name: value for name, value in content.items() if name not in _AFTER_FACTS}


def sign(folder: Path, files: dict[str, FileSum] | None = None) -> None:
    """Makes the list fit what is in the folder, or what it is said to have."""
    if files is None:
        there = (path for path in folder.iterdir() if path.name != "manifest.json")
        files = {path.name: sum_of(path) for path in there}
    write_manifest(folder, files, facts_of(folder))


def write_as_before(folder: Path, *without: str) -> None:
    """Rewrites the list as the first format had it, without some facts."""
    listed = {name: [of.bytes, of.sha256] for name, of in read_manifest(folder).items()}
    facts = {name: value for name, value in facts_of(folder).items() if name not in without}
    digest = hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
    content = {"format": "pydist checkpoint 1", **facts, "files": listed, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(content, indent=1))
