"""Sees to it that all ranks take a step, or none does.

Before anything changes, the ranks vote. What raises on one rank before that, the others hear in the
vote. What raises on one rank alone after it leaves parameters incomplete, so it ends the groups in
which the others would wait for this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from pydist import _native
from pydist.errors import Error, InvalidUsage, Mismatch
from pydist.job.last_words import in_words
from pydist.job.outcome import outcomes
from pydist.job.rank_names import culprits
from pydist.parallel.wrapper import DataParallel
from pydist.sharding.step.same_options import digest_of, require_same_values, values_of_step

# How far a step has come: its ranks have not voted yet, have voted, have changed parameters, or all
# know of the exception that ends it.
_Phase = Literal["checking", "voted", "stepped", "told"]


class JointStep:
    """What the ranks of an optimizer tell each other about its steps; see the module's text.

    Args:
        communicator: The ranks.
        wrapper: The model whose reducer averages the gradients, if any does.
        number: The optimizer's, among those of the model.
    """

    def __init__(
        self, communicator: _native.Communicator, wrapper: DataParallel | None, number: int
    ) -> None:
        self._communicator = communicator
        self._wrapper = wrapper
        self._number = number
        self._failed = ""
        self._phase: _Phase = "checking"
        self._is_under_way = False

    def begin(self) -> None:
        """A step begins, in which its ranks have not voted yet."""
        self._phase = "checking"

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Lets ranks that vote know that this one will, whatever round it begins in the step."""
        reducer = self._reducer
        if self._is_under_way or reducer is None:
            yield
            return
        self._is_under_way = True
        reducer.set_stepping(self._number)
        try:
            yield
        finally:
            self._is_under_way = False
            reducer.set_stepping(0)

    def vote(self, param_groups: Sequence[dict[str, Any]], options: Collection[str]) -> None:
        """Returns once all ranks have said that they can take a step, with the same options.

        Args:
            param_groups: What the step uses.
            options: The keys of what must be the same.

        Raises:
            Mismatch: Options differ (on every rank).
            Error: Another rank can't.
        """
        if self._communicator.size > 1:
            self._vote(values_of_step(param_groups, options), options)

    def note_stepped(self) -> None:
        """Parameters have changed."""
        self._phase = "stepped"

    def tell(self, error: BaseException, *, is_told_later: bool) -> None:
        """Lets the other ranks know, unless they do, that a step has raised here.

        Args:
            error: What it has raised.
            is_told_later: Whether those that have not voted hear of it at the end of `writing()`.
        """
        if self._failed or self._communicator.size == 1 or self._phase == "told":
            return
        if self._phase == "voted":
            # What pydist raises there (Mismatch, or that the group has failed), all ranks raise.
            if not isinstance(error, Error):
                self.give_up("step()", error)
            return
        if is_told_later:
            return
        if self._wrapper is not None:
            reducer = self._reducer
            if reducer is None:  # all ranks have retired the model
                return
            reducer.await_thrown()  # which its thread may not have let go of yet
            # The others hear what raises there from the backward; of an average that is held, when
            # it is concluded or given up. Where it was lost, they have heard.
            if reducer.is_in_backward or reducer.is_held or reducer.why_lost:
                return
        if self._phase == "checking":
            with contextlib.suppress(Error, type(error)), self.under_way():
                self._vote([], [], error)
            self._phase = "told"
        elif self._phase == "stepped":
            self.give_up("step()", error)

    @contextlib.contextmanager
    def giving_up_for_all(self, doing: str) -> Iterator[None]:
        """Around what leaves parameters incomplete where it raises, perhaps on this rank alone."""
        try:
            yield
        except BaseException as error:
            self.give_up(doing, error)
            raise

    def give_up(self, doing: str, error: BaseException) -> None:
        """Tells whoever waits for this rank, in a step or in the backward of the next."""
        self._failed = in_words(error)
        reason = (
            f"{doing} of pydist.ShardedOptimizer raised on rank {self._communicator.rank}, so the "
            "ranks' parameters are incomplete, and the groups of the optimizer and its model have "
            f"ended: {self._failed}"
        )
        self._communicator.abort(reason)
        if self._wrapper is not None:
            self._wrapper._communicator.abort(reason)

    def require_sound(self) -> None:
        """Raises InvalidUsage where this rank has given up."""
        if self._failed:
            raise InvalidUsage(
                f"an earlier step or change of pydist.ShardedOptimizer failed ({self._failed}), "
                "so the parameters are incomplete: load a checkpoint, and make the model and the "
                "optimizer anew"
            )

    @property
    def _reducer(self) -> _native.Reducer | None:
        """What averages the gradients; None where pydist does not, or no longer does."""
        if self._wrapper is None or self._wrapper.is_retired:
            return None
        return self._wrapper._reducer

    def _vote(
        self, values: list[list[Any]], options: Collection[str], error: BaseException | None = None
    ) -> None:
        """Votes on a step.

        Args:
            values: What it uses of groups.
            options: The keys of those.
            error: Why this rank can't take it.
        """
        digest = digest_of(values)
        self._phase = "voted"
        while True:
            refused, went_backward, together, alike = self._votes(error is not None, digest)
            if not went_backward:
                break
            error = error or Error(
                f"rank {_numbers(went_backward)} went backward while this rank called step() of "
                "pydist.ShardedOptimizer, so no rank steps: go backward as often on every rank, "
                "and set the gradients to zero before the next step",
                **culprits(self._communicator, went_backward, "went backward"),
            )
            if not together:  # that raises on the others, which don't come to a vote
                raise error
        if not together:
            raise Mismatch(
                "ranks called step() of different pydist.ShardedOptimizers of one model: step them "
                "in the same order on every rank"
            )
        if refused:
            told = outcomes(self._communicator, "step()", error)
            raise error or Error(
                f"step() of pydist.ShardedOptimizer raised on rank {_numbers(refused)}, so no rank "
                f"has stepped, and parameters are as they were: {told[refused[0]].said}",
                **culprits(self._communicator, refused, told[refused[0]].said),
            )
        if not alike:
            require_same_values(self._communicator, values, options)

    def _votes(self, refuses: bool, digest: int) -> tuple[list[int], list[int], bool, bool]:
        """What `Reducer.vote` returns, also without a reducer."""
        if self._reducer is not None:
            return self._reducer.vote(refuses, digest)
        cpu = torch.device("cpu")  # whatever torch's default is
        said = torch.empty(self._communicator.size, 2, dtype=torch.int64, device=cpu)
        own = torch.tensor([refuses, digest >> 1], device=cpu)
        self._communicator.all_gather(own, said, label="vote on a step")
        votes: list[list[int]] = said.tolist()
        refused = [rank for rank, (refusal, _) in enumerate(votes) if refusal]
        return refused, [], True, len({options for refusal, options in votes if not refusal}) < 2


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
