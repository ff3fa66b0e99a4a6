"""An epoch's indices, one by one and in batches, beside torch's samplers."""

from collections import deque
from collections.abc import Iterable

import pytest
import torch.utils.data as torch_data
from rank_groups import MeasureInTurns
from turns import Pair

import pydist

LENGTH = 200_000


def consume(indices: Iterable[object]) -> None:
    """At the speed of C: what is left is what the sampler takes."""
    deque(indices, maxlen=0)


def sampler_pair(batch: int | None, share: int) -> Pair:
    """One rank of `share`, since torch's shuffles for all of them on each."""
    data = range(LENGTH * share)
    ours = pydist.DistributedSampler(data, share, 0)
    theirs: torch_data.DistributedSampler[int] = torch_data.DistributedSampler(
        data,  # type: ignore[arg-type]
        share,
        0,
    )
    if batch is None:
        return Pair(lambda: consume(ours), lambda: consume(theirs), "torch's DistributedSampler")
    our_batches = pydist.BatchSampler(ours, batch)
    their_batches = torch_data.BatchSampler(theirs, batch, False)
    return Pair(
        lambda: consume(our_batches), lambda: consume(their_batches), "torch's BatchSampler"
    )


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("batch", [None, 8, 256])
def bench_sampler(measure_in_turns: MeasureInTurns, batch: int | None, share: int) -> None:
    measure_in_turns(1, sampler_pair, batch, share)
