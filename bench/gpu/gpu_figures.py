"""What a benchmark of GPUs has found, as JSON: `make test-gpu` keeps it, and shows it in its table.

Pages and reports show of each figure what it is of and the text `shown`; what else it has are
numbers to compute with.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="a file, where it is kept as well")


class Kept:
    """What there is so far.

    Args:
        file: Where it is written, after each figure, since what comes next may hang; None: nowhere.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._figures: list[dict[str, Any]] = []

    def add(self, of: str, shown: str, **numbers: Any) -> str:
        """Keeps a figure; returns what is shown of it."""
        self._figures.append({"of": of, "shown": shown, **numbers})
        if self._file is not None:
            self._write(self._file)
        return shown

    def _write(self, file: Path) -> None:
        machine = {"torch": torch.__version__}
        if torch.cuda.is_available():
            machine["gpu"] = torch.cuda.get_device_name()
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")  # whole, or not at all
        new.write_text(json.dumps({"machine": machine, "figures": self._figures}, indent=1) + "\n")
        os.replace(new, file)
