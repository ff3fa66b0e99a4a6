"""What a wrapper tells of how its gradients travel, and what that has cost."""

from __future__ import annotations

from pydist.parallel.bucket_planner import BucketPlan, PlannedBucket
from pydist.parallel.reducer import CommunicationStats
from pydist.parallel.wrapper_parts.wrapper_state import WrapperState


class Introspection(WrapperState):
    """The part of `pydist.DataParallel` that shows what it does."""

    # How often the program has called `reset_stats()`, for who counts beside it.
    stats_resets: int

    @property
    def plan(self) -> BucketPlan:
        """The buckets in which gradients travel, in the order of launching; prints as a table.

        Agreed by all ranks. After the first steps it follows the order in which backward has
        completed the gradients; parameters that not every rank uses are in buckets of their own, at
        the end.
        """
        seen = self._reducer.stats.buckets
        return BucketPlan(
            tuple(
                PlannedBucket(
                    size_bytes,
                    tuple(self._trained.known[index][0] for index in members),
                    seen[number].ready_s if seen else None,
                )
                for number, (_, size_bytes, members) in enumerate(self._reducer.buckets)
            )
        )

    def stats(self) -> CommunicationStats:
        """What averaging has cost this rank since construction or the last `reset_stats()`.

        In total, and for each bucket when it was ready, launched and done. `PYDIST_TIMELINE=path`
        writes the same of every step as a trace that Perfetto shows.
        """
        return self._reducer.stats

    def reset_stats(self) -> None:
        """Lets `stats()` count from zero."""
        self._reducer.reset_stats()
        self.stats_resets += 1
