"""Several backwards to one step: `no_sync()`."""

import copy

import pytest
import torch
from training import TIME_LIMIT, Branches, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


def accumulate(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Branches(3), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        rounds = model.stats().rounds
        for micro in range(3):
            # Branches 0 and 1 get their gradient under no_sync alone.
            if micro < 2:
                with model.no_sync():
                    model(batch(rank, 5, 4, step=micro), micro).backward()
                    with model.no_sync():
                        pass
                    model(batch(rank, 5, 4, step=micro + 10), micro).backward()
            else:
                model(batch(rank, 5, 4, step=micro), 2).backward()
        assert model.stats().rounds == rounds + 1
        for r in range(size):
            for micro in range(3):
                steps = (micro, micro + 10) if micro < 2 else (micro,)
                for step in steps:
                    (reference(batch(r, 5, 4, step=step), micro) / size).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None
            else:
                assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_no_sync(run: Runner, cap_mb: float) -> None:
    run(accumulate, cap_mb)
