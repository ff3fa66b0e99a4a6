"""What a benchmark of GPUs has found, as JSON: `make test-gpu` keeps it, and shows it in its table.

Pages and reports show of each figure what it is of and the text `shown`; what else it has are
numbers to compute with.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Figure = dict[str, Any]


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="a file, where it is kept as well")


def figure(of: str, shown: str, **numbers: Any) -> Figure:
    return {"of": of, "shown": shown, **numbers}


def keep(file: Path | None, figures: Sequence[Figure]) -> None:
    """Writes what there is so far, if a file was asked for: what comes next may hang."""
    if file is None:
        return
    machine = {"torch": torch.__version__}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")  # whole, or not at all
    new.write_text(json.dumps({"machine": machine, "figures": list(figures)}, indent=1) + "\n")
    os.replace(new, file)
