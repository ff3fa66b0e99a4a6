"""What ranks tell each other about a checkpoint, so that all go on or all raise the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydist.errors import CheckpointError, InvalidUsage, Mismatch
from pydist.job.outcome import Outcome, failed, is_of_signal_handler, outcomes
from pydist.job.rank_names import culprits, name_ranks

if TYPE_CHECKING:
    from pydist._native import Communicator


class KnownToAll(BaseException):
    """Carries what a handler of signals has raised on this rank out of a call that all ranks leave.

    `Lane.turn` raises `error` itself, and goes on using the lane.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def agree(
    communicator: Communicator,
    call: str,
    doing: str,
    error: BaseException | None,
    facts: str = "",
) -> None:
    """Raises on every rank what went wrong on any. All ranks call it.

    Args:
        communicator: The ranks.
        call: What the user called.
        doing: What was tried, for the message.
        error: What went wrong here; None if nothing.
        facts: What must be the same on all ranks.

    Raises:
        KnownToAll: A handler of signals has raised something on this rank.
        InvalidUsage: The call itself was wrong, on some rank.
        CheckpointError: Something else went wrong on some rank.
        Mismatch: `facts` differ.
    """
    everybody = outcomes(communicator, call, error, facts)
    if error is not None and is_of_signal_handler(error):
        raise KnownToAll(error)
    if wrong := failed(everybody):
        ranks_of: dict[str, list[int]] = {}
        for rank in wrong:
            ranks_of.setdefault(_said(everybody[rank]), []).append(rank)
        said = "; ".join(
            told if len(ranks) == communicator.size else f"{name_ranks(ranks)}: {told}"
            for told, ranks in ranks_of.items()
        )
        is_usage = all(everybody[rank].is_usage for rank in wrong)
        raised = InvalidUsage if is_usage else CheckpointError
        raise raised(
            f"{doing} failed. {said}", **culprits(communicator, wrong, everybody[wrong[0]].said)
        ) from error
    other = next((r for r, o in enumerate(everybody) if o.facts != everybody[0].facts), None)
    if other is not None:
        raise Mismatch(
            f"{doing} was called otherwise on rank {other} than on rank 0: "
            f"{everybody[other].facts}, where rank 0 has {everybody[0].facts}; all ranks pass the "
            "same",
            **culprits(communicator, [0, other], "called it otherwise than others"),
        )


def _said(outcome: Outcome) -> str:
    """An error of pydist's says by itself what it is about."""
    own = outcome.is_usage or outcome.error == CheckpointError.__name__
    return outcome.text if own else outcome.said
