"""Notices that torch's stage of a pipeline calls a wrapper."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_MODULE = "torch.distributed.pipelining.stage"
_OURS = "pydist.pipelining.stage"
# Between the stage's method and the wrapper's forward are torch's calls of a module, and its hooks.
_MOST_FRAMES = 8


def warn_of_torchs_stage() -> None:
    """Warns where the forward that calls this is run by torch's own stage."""
    if _MODULE not in sys.modules:
        return
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == _MODULE:
            stage = type(frame.f_locals.get("self"))
            if not any(base.__module__ == _OURS for base in stage.__mro__):
                warnings.warn(
                    f"{stage.__name__} of torch runs a pydist.DataParallel: gradients are averaged "
                    "at every micro-batch, and with zero-bubble schedules not at all. Use "
                    "pydist.pipelining.PipelineStage, or its build_stage for a part that the "
                    "tracer has cut: they take the same arguments, and average once a step.",
                    stacklevel=2,
                )
            return
        frame = frame.f_back
