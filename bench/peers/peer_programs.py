"""Where the C programs are, and how a script of this folder ends."""

import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"
PROGRAM = "pydist-collectives"


def stop(message: str, status: int = 1) -> NoReturn:
    """One line on stderr, and the end."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)
