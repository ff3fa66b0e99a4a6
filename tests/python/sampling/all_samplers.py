"""The samplers of all ranks of a job, in one process."""

import itertools
from typing import Any

import pydist


def samplers(length: int, ranks: int, **settings: Any) -> list[pydist.DistributedSampler]:
    return [pydist.DistributedSampler(range(length), ranks, r, **settings) for r in range(ranks)]


def batch_samplers(
    length: int, ranks: int, batch: int, *, drop_last: bool = False, **settings: Any
) -> list[pydist.BatchSampler]:
    return [
        pydist.BatchSampler(sampler, drop_last=drop_last, global_batch_size=batch)
        for sampler in samplers(length, ranks, **settings)
    ]


def flat(parts: Any) -> list[int]:
    return [*itertools.chain.from_iterable(parts)]
