"""Which wrapper trains a parameter: the last to take it up, which retires any other that did."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor

from pydist.errors import Error, InvalidUsage
from pydist.job import membership
from pydist.parallel.ownership import trainers_of
from pydist.parallel.reducer import Trained
from pydist.parallel.wrapper_parts.shard_owners import HasShardOwners, sparse_error
from pydist.parallel.wrapper_parts.uneven_inputs import is_in_join


class Retirement(HasShardOwners):
    """The part of `pydist.DataParallel` that takes parameters up, and lets others take them."""

    def trains(self, parameter: Tensor) -> bool:
        """Whether the wrapper averages a parameter's gradients, or did before it was retired."""
        return self._trained.knows(parameter)

    def has_alone(self, parameter: Tensor) -> bool:
        """Whether a parameter is this rank's own, so that nothing of it is averaged."""
        return self._local.has(parameter)

    def _add(self, joining: Trained) -> None:
        """Trains more parameters, from the next backward on. Talks to nobody."""
        self._take_up(joining, "unfrozen in, or added to, another pydist.DataParallel")
        for name, parameter, is_sparse in joining:
            shards = self._sharded_parameters.get(parameter, ())
            if shards and is_sparse:
                raise sparse_error(name)
            self._reducer.add(name, parameter, is_sparse, *shards)
            self._trained.add(name, parameter, is_sparse)
        self._finite_check.watch(joining, membership.rank(), self._reducer)

    def _take_up(self, trained: Trained, how: str) -> None:
        """Retires whoever else trains any of some parameters. Talks to nobody."""
        parameters = [parameter for _, parameter, _ in trained]
        for other in trainers_of(parameters):
            if other is not self:
                other.retire(parameters, how)

    def retire(self, taken: Sequence[Tensor] | None, how: str) -> None:
        """Trains nothing from now on, as others train parameters of the model. Talks to nobody.

        Args:
            taken: Those parameters, and perhaps others; None: all that train here.
            how: What was done to them, for the errors that follow.
        """
        known = self._trained.known
        ids = {id(parameter) for parameter in (taken or [p for _, p, _ in known])}
        named = [name for name, parameter, _ in known if id(parameter) in ids]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        reason = (
            f"this pydist.DataParallel was retired: its parameters {', '.join(named[:3])}{more} "
            f"were {how}, and two can't average one gradient. Use the new wrapper, with optimizers "
            "made for it; put modules that share parameters into one module (in an nn.ModuleDict, "
            "say), whose forward runs them, and wrap that"
        )
        if is_in_join(self):
            raise InvalidUsage(f"in join() of that wrapper, which has to be over first: {reason}")
        for owner in self.shard_owners():
            with contextlib.suppress(Error):  # of a group that failed; then nothing arrives
                owner.finish()
        self._finite_check.stop()
        self._reducer.retire(reason)
        self._working_reducer, self._why_retired = None, reason
