"""Checkpoints that load on any number of ranks, on torch's distributed checkpoint format."""

from pydist.checkpoint.loading import Loaded, config_of, load, step_of
from pydist.checkpoint.parts_of_a_model import from_parts
from pydist.checkpoint.plain_torch import from_torch, to_torch
from pydist.checkpoint.replacement import latest
from pydist.checkpoint.saves_under_way import Saving
from pydist.checkpoint.saving import save

__all__ = [
    "Loaded",
    "Saving",
    "config_of",
    "from_parts",
    "from_torch",
    "latest",
    "load",
    "save",
    "step_of",
    "to_torch",
]
