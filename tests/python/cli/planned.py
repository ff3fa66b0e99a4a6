"""What `pydist plan` finds, for tests."""

import json
from typing import Any

import pytest

from pydist.cli import main


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command prints with --json."""
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
