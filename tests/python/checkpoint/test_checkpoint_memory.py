"""How much memory saving and loading take."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from saved_training import LIMIT_S
from torch import nn
from torch.profiler import ProfilerActivity, profile
from training import joined

import pydist
from pydist.parallel.bucket_planner import DEFAULT_CAP_BYTES

pytestmark = pytest.mark.timeout(60)


def peak_bytes() -> int:
    """The most memory that this process had since the last call; what it has now, at the first."""
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    Path("/proc/self/clear_refs").write_text("5")
    return peak


def weigh(folder: str) -> list[float]:
    """What saving takes at most beside the state, in buckets: now, and asynchronously."""
    joined()
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
    model = pydist.DataParallel(nn.Sequential(*layers))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, stage=2)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    pydist.save(f"{folder}/warm", **parts)
    taken = []
    for asynchronous in (False, True):
        peak_bytes()
        before = peak_bytes()
        pydist.save(f"{folder}/weighed", **parts, asynchronous=asynchronous).wait()
        taken.append((peak_bytes() - before) / DEFAULT_CAP_BYTES)
    pydist.barrier()
    return taken


def weigh_loading(folder: str, fused: bool) -> float:
    """What torch allocates at most, in buckets: for the state, and for loading it anew."""
    joined()
    layers = [layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
    model = pydist.DataParallel(nn.Sequential(*layers), bucket_cap_mb=8)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, stage=2, fused=fused)
    model(torch.ones(1, 1024)).sum().backward()
    # From before there is a state: what was allocated earlier is not counted when it is freed.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        optimizer.step()
        pydist.save(folder, model=model, optimizer=optimizer)
        pydist.load(folder, model=model, optimizer=optimizer)
    result: Any = profiled.profiler
    events = [event for event in result.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes)) / DEFAULT_CAP_BYTES


@pytest.mark.parametrize("fused", [False, True])
def test_memory_of_loading(fused: bool, tmp_path: Path) -> None:
    """A rank's state is 6 buckets, and loading it anew takes about three more at a time."""
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        for taken in ranks.run(weigh_loading, str(tmp_path / "it"), fused, timeout=LIMIT_S):
            assert 6 < taken < 6 + 3.5


def test_memory(tmp_path: Path) -> None:
    """Two ranks, of which each writes 4.5 buckets."""
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        for now, later in ranks.run(weigh, str(tmp_path), timeout=LIMIT_S):
            assert now < 2
            assert later < 4.5 + 2  # a copy of what the rank writes
