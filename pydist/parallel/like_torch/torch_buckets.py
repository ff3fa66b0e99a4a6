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

# Of the first bucket, and of those that follow.
_CAPS_BYTES = (1 << 20, 25 << 20)


class TorchBuckets:
    """Plans the buckets of one model.

    Args:
        caps_bytes: The sizes at which buckets are closed, as the program has asked for them; empty:
            torch's own.
        cuts_first: Whether the first plan has buckets of these sizes, too; otherwise it has one for
            each dtype.
        may_be_unused: Whether parameters may be unused (`find_unused_parameters=True`): then the
            first plan stays, unless the graph is static.
    """

    def __init__(
        self, caps_bytes: tuple[int, ...], *, cuts_first: bool, may_be_unused: bool
    ) -> None:
        self._caps_bytes = caps_bytes or _CAPS_BYTES
        self._cuts_first = cuts_first
        self._may_be_unused = may_be_unused
        self._backwards = -1  # that have been, when a plan is asked for
        self._learned: list[list[int]] = []

    def plan(self, parameters: Sequence[PlannedParameter], *, is_static: bool) -> list[list[int]]:
        """The plan for the first backward; in later calls, that after one more backward.

        Args:
            parameters: In the order in which backward is expected to complete them.
            is_static: Whether torch would take the graph for static. Then it learns the order in
                the second backward, not in the first.
        """
        self._backwards += 1
        # Torch does not part those that some rank does without from the others.
        alike = [replace(parameter, is_regular=True) for parameter in parameters]
        keeps_first = self._backwards < (2 if is_static else 1)
        if keeps_first or (self._may_be_unused and not is_static):
            alike.sort(key=lambda parameter: parameter.index)
            caps_bytes = self._caps_bytes if self._cuts_first else (sys.maxsize,)
            return sorted(plan_buckets(alike, caps_bytes), key=min, reverse=True)
        indices = {parameter.index for parameter in parameters}
        if {index for bucket in self._learned for index in bucket} != indices:
            used = [new for new, old in zip(alike, parameters, strict=True) if old.is_regular]
            unused = [new for new, old in zip(alike, parameters, strict=True) if not old.is_regular]
            unused.sort(key=lambda parameter: parameter.index)
            self._learned = plan_buckets([*used, *unused], self._caps_bytes)
        return self._learned
