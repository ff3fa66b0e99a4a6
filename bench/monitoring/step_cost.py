"""What `monitor.step()` costs the training thread: microseconds of processor, a step.

    python bench/monitoring/step_cost.py            # one rank, and two

Rank 0 writes the lines of all ranks; the others send theirs. Steps follow each other at once, with
a pause now and then so that the ranks stay within a chunk of each other, as averaging keeps them.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch

import pydist

_EVERY = 10


def cost_us(steps: int) -> float:
    """Of this rank."""
    pydist.init()
    model = pydist.DataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(1, 8)).sum().backward()
    loss = torch.tensor(1.0)
    spent_s = 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        pydist.monitor(folder, model=model, every=_EVERY, tensorboard=False) as monitor,
    ):
        for _ in range(steps // _EVERY):
            began_s = time.thread_time()
            for _ in range(_EVERY):
                monitor.step(loss=loss, samples=8, lr=0.1)
            spent_s += time.thread_time() - began_s
            pydist.barrier()
    return spent_s / (steps // _EVERY * _EVERY) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    if options.steps < _EVERY:
        parser.error(f"--steps must be {_EVERY} or more")
    for nprocs in (1, 2):
        for rank, cost in enumerate(pydist.spawn(cost_us, (options.steps,), nprocs=nprocs)):
            print(f"rank {rank} of {nprocs}: {cost:.1f} us of processor a step")


if __name__ == "__main__":
    main()
