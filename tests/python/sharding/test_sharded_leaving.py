"""Ranks that leave right after a step: the others still get the parameters that it has updated."""

import contextlib
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launch import Ranks, rank_outcomes, run_command
from torch import nn
from training import LIMIT_S, TIME_LIMIT, joined
from twins import steps_late

import pydist

pytestmark = TIME_LIMIT

# How much later than the others the last rank steps: long enough for them to be gone.
LATE_S = 0.3


@pytest.fixture(scope="module", params=["native-2", "gloo-3"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    backend, count = request.param.split("-")
    with Ranks(int(count), {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


def step_and_leave(how: str) -> None:
    rank, size = joined()
    # Buckets enough for some to be under way.
    module = nn.Sequential(*[nn.Linear(50, 50, bias=False) for _ in range(4)])
    model = pydist.DataParallel(module, bucket_cap_mb=0.005)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    expected = [parameter.detach() - 2.0 for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full((50, 50), 2.0)
    model.sync_gradients()
    pydist.barrier()
    with steps_late(LATE_S / 3) if rank == size - 1 else contextlib.nullcontext():
        optimizer.step()
    if how == "optimizer":
        del optimizer
    elif how == "model and optimizer":
        del model, optimizer
    else:
        pydist.shutdown()
    for ours, theirs in zip(module.parameters(), expected, strict=True):
        assert torch.equal(ours, theirs)
        assert type(ours) is nn.Parameter


@pytest.mark.parametrize("how", ["optimizer", "model and optimizer", "job"])
def test_who_leaves_waits(ranks: Ranks, how: str) -> None:
    ranks.run(step_and_leave, how, timeout=LIMIT_S)


def step_beside_one_that_does_not(how: str) -> float:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(50, 50))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    optimizer._communicator.timeout = 0.5
    model(torch.ones(2, 50)).sum().backward()
    pydist.barrier()
    if rank == 1:
        with optimizer._joint.under_way():
            optimizer._joint.vote(optimizer.param_groups, optimizer.defaults)
        time.sleep(2.0)
        return 0.0
    optimizer.step()
    began = time.monotonic()
    if how == "optimizer":
        del optimizer
    else:
        pydist.shutdown()
    took = time.monotonic() - began
    with pytest.raises(pydist.Error):
        _ = model.weight + 1
    return took


@pytest.mark.parametrize("how", ["optimizer", "job"])
def test_no_longer_than_the_group_does(how: str) -> None:
    first, second = rank_outcomes(
        step_beside_one_that_does_not, 2, how, env={"PYDIST_BACKEND": "native"}, timeout=LIMIT_S
    )
    assert first.ok, first.describe()
    assert second.ok, second.describe()
    assert first.value < 1.9


SCRIPT = f"""
    import time
    import torch, pydist
    import pydist.sharding.step.bucket_step as steps

    model = pydist.DataParallel(torch.nn.Linear(50, 50))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    model(torch.ones(2, 50)).sum().backward()
    if pydist.rank() == 1:
        gather = steps.gather
        steps.gather = lambda *arguments: (time.sleep({LATE_S}), gather(*arguments))
    optimizer.step()
    if pydist.rank() == 1:
        assert bool(model.weight.isfinite().all())
        print("arrived", flush=True)
"""


def test_the_end_of_the_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = run_command(
        [sys.executable, "-m", "pydist", "run", "-n", "2", str(script)],
        timeout=LIMIT_S,
        env={"PYDIST_BACKEND": "native"},
    )
    assert done.returncode == 0, done.stderr
    assert "arrived" in done.stdout
