"""How many samples a step has: of all ranks, of a rank, of a backward."""

from __future__ import annotations

from dataclasses import dataclass

from pydist.errors import InvalidUsage


@dataclass(frozen=True)
class BatchSizes:
    """What a step consists of.

    Attributes:
        micro_batch_size: Samples of a rank's backward; None where nothing says it.
        accumulation_steps: Backwards of a step.
    """

    micro_batch_size: int | None
    accumulation_steps: int


def batch_sizes(
    batch_size: int | None, micro_batch_size: int | None, steps: int | None, ranks: int
) -> BatchSizes:
    """Completes the sizes by batch_size = micro_batch_size * accumulation_steps * ranks.

    Args:
        batch_size: Samples of all ranks for a step; at least 1, as the others.
        micro_batch_size: Samples of a rank for a backward.
        steps: Backwards of a rank for a step.
        ranks: How many.

    Raises:
        InvalidUsage: They contradict each other, or leave a remainder.
    """
    if batch_size is None:
        return BatchSizes(micro_batch_size, 1 if steps is None else steps)
    if micro_batch_size is None:
        steps = 1 if steps is None else steps
        micro_batch_size, left = divmod(batch_size, steps * ranks)
        if left:
            raise InvalidUsage(
                f"training.batch_size is {batch_size}, which {ranks} ranks can't share evenly in "
                f"accumulation_steps={steps}: make it a multiple of {steps * ranks}"
            )
    elif steps is None:
        steps = batch_size // (micro_batch_size * ranks)
    if batch_size != micro_batch_size * steps * ranks:
        raise InvalidUsage(
            f"training.batch_size is {batch_size}, which is not micro_batch_size "
            f"({micro_batch_size}) times accumulation_steps ({steps}) times {ranks} ranks: change "
            "one of them, or leave one out"
        )
    return BatchSizes(micro_batch_size, steps)
