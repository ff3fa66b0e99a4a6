"""What a process pays before its first step: importing pydist, and joining a job of N ranks."""

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from rank_groups import RankGroups
from replayed_times import Record
from turns import Times

import pydist

IMPORT_ROUNDS = 9
INIT_ROUNDS = 15


def seconds_to_import(module: str) -> float:
    """In a fresh interpreter, whose own start does not count."""
    code = (
        f"import time; start_s = time.perf_counter(); import {module}; "
        "print(time.perf_counter() - start_s)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return float(done.stdout)


def seconds_to_join(is_subject: bool) -> float:
    """On each rank: until the first all_reduce is over, since a group may connect at leisure."""
    ones = torch.ones(1)
    start_s = time.perf_counter()
    if is_subject:
        pydist.init("native")
        pydist.all_reduce(ones)
    else:
        dist.init_process_group("gloo")
        dist.all_reduce(ones)
    took_s = time.perf_counter() - start_s
    if is_subject:
        pydist.shutdown()
    else:
        dist.destroy_process_group()
    return took_s


def bench_import(record: Record) -> None:
    """torch is what pydist imports: a ratio of 1 is an import that costs nothing beyond it."""
    times = Times("import torch")
    for module in ("torch", "pydist"):
        seconds_to_import(module)  # into the page cache
    for _ in range(IMPORT_ROUNDS):
        times.reference_s.append(seconds_to_import("torch"))
        times.subject_s.append(seconds_to_import("pydist"))
    record(times)


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def bench_init(rank_groups: RankGroups, record: Record, nprocs: int) -> None:
    rank_groups.close()  # of ranks that have joined a job already
    times = Times("init_process_group, gloo")
    for is_subject in (False, True):
        rank_groups.run(nprocs, seconds_to_join, is_subject)
    for _ in range(INIT_ROUNDS):
        times.reference_s.append(max(rank_groups.run(nprocs, seconds_to_join, False)))
        times.subject_s.append(max(rank_groups.run(nprocs, seconds_to_join, True)))
    record(times)
