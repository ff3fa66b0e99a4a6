"""What the launcher of `pydist run -H` and what it has started on a host say to each other.

A line each, on standard input and output:

1. the host prints a `Greeting` once torch and pydist are loaded there;
2. the launcher sends a `Task`; so the job's secret, which is in it, stands on no command line;
3. the launcher sends an empty line every few seconds, to show that it lives, and `end SIGINT`, say,
   when it was told to end by that signal.

All else that the host prints is for people.
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["RANK_PREFIX", "Greeting", "Task"]

_GREETING = "pydist-on-host "

# The beginning of a line that a rank has printed. torchrun's reports have "[0]:" alone on a line.
RANK_PREFIX = re.compile(r"\[\d+\]: ")


@dataclass(frozen=True)
class Greeting:
    """What a host tells of itself."""

    pydist: str
    torch: str
    # That nobody listens on; the first host serves the meeting there.
    free_port: int
    # sshd's SSH_CONNECTION: address and port of the launcher, then of this host; or empty.
    ssh_connection: str

    def written(self) -> str:
        """As a line."""
        return _GREETING + json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> "Greeting | None":
        """From a line; None if it is none."""
        if not line.startswith(_GREETING):
            return None
        return cls(**json.loads(line.removeprefix(_GREETING)))


@dataclass(frozen=True)
class Task:
    """What a host is to run."""

    # torchrun's options, parsed.
    options: dict[str, Any]
    environment: dict[str, str]
    folder: str

    def written(self) -> str:
        """As a line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> "Task":
        """From a line."""
        return cls(**json.loads(line))
