"""The buckets that torch's DistributedDataParallel would have, for communication hooks.

Some hooks treat a bucket as one thing: they scale it by its norm, take its largest elements, or
factor it into matrices. What such a hook does to a gradient depends on what else is in its bucket,
so a hook that was written for torch gets torch's.

Source: `_ddp_init_helper` and `Reducer::rebuild_buckets` of torch 2.11 to 2.14.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from pydist.parallel.bucket_planner import PlannedParameter, plan_buckets

__all__ = ["TorchBuckets"]

# Of the first bucket, and of those that follow.
_CAPS_BYTES = (1 << 20, 25 << 20)


class TorchBuckets:
    """Plans the buckets of one model.

    Args:
        caps_bytes: The sizes at which buckets are closed, as the program has asked for them; empty:
            torch's own.
        cuts_first: Whether the first plan has buckets of these sizes, too; otherwise it has one for
            each dtype.
        keeps_first: Whether the first plan stays, as in torch where parameters may be unused.
    """

    def __init__(self, caps_bytes: tuple[int, ...], *, cuts_first: bool, keeps_first: bool) -> None:
        self._caps_bytes = caps_bytes or _CAPS_BYTES
        self._cuts_first = cuts_first
        self._keeps_first = keeps_first
        self._has_planned = False

    def plan(self, parameters: Sequence[PlannedParameter]) -> list[list[int]]:
        """The plan for the first backward, and in later calls for those that follow.

        Args:
            parameters: In the order in which backward is expected to complete them.
        """
        # Torch does not part those that some rank does without from the others.
        alike = [replace(parameter, is_regular=True) for parameter in parameters]
        if self._has_planned and not self._keeps_first:
            return plan_buckets(alike, self._caps_bytes)
        self._has_planned = True
        alike.sort(key=lambda parameter: parameter.index)
        caps_bytes = self._caps_bytes if self._cuts_first else (sys.maxsize,)
        return sorted(plan_buckets(alike, caps_bytes), key=min, reverse=True)
