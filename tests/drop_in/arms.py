"""Runs programs on each arm: a library, a backend and a number of ranks.

The ranks of an arm start once and run one program after another, each within a limit of its own
(launch.py). A program that fails, or does not end, takes its ranks with it, and the next program
gets new ones. So no program's failure reaches another's result.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import gpu_ranks
import torch
import torch.distributed as dist
from harness import Alone, Library, Program, Record, Step
from launch import ExpiredError, Outcome, Ranks
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

# Of one program on one arm.
LIMIT_S = 20.0


@dataclass(frozen=True)
class Arm:
    """A library on a backend with so many ranks."""

    library: Literal["one process", "torch DDP", "pydist"]
    backend: Literal["native", "gloo", "nccl"]
    nprocs: int

    @property
    def name(self) -> str:
        if self.library == "one process":
            return "alone"
        return f"{'ddp' if self.library == 'torch DDP' else self.backend}-{self.nprocs}"

    @property
    def keeps_its_group(self) -> bool:
        """Whether the script makes torch's group on gloo itself, as one for torch's DDP does.

        Otherwise pydist makes it, and `torch.distributed` runs on pydist's engine as well.
        """
        return self.library != "pydist" or self.backend == "gloo"


ALONE = Arm("one process", "gloo", 1)
DDP = {nprocs: Arm("torch DDP", "gloo", nprocs) for nprocs in (1, 2, 3)}
PYDIST = (
    Arm("pydist", "native", 1),
    Arm("pydist", "native", 2),
    Arm("pydist", "native", 3),
    Arm("pydist", "gloo", 2),
    Arm("pydist", "gloo", 3),
    Arm("pydist", "nccl", 2),
)


@dataclass
class Recording:
    """What one program did on one rank."""

    steps: list[Step]
    warned: set[str]
    # A digest of the state in which the program left torch's random numbers.
    random_state: str


@dataclass
class Result:
    """What one program did on all ranks of an arm."""

    outcomes: list[Outcome] = field(default_factory=list)
    # The stacks of all ranks, where the program passed its limit.
    hung: str = ""

    def is_refused(self, program: Program) -> bool:
        """Whether every rank raised what the program expects of pydist; ranks go on after that."""
        return bool(program.refused and self.outcomes) and all(
            outcome.error is not None
            and re.search(program.refused, f"{outcome.error}: {outcome.message}")
            for outcome in self.outcomes
        )

    @property
    def recordings(self) -> list[Recording]:
        """By rank; raises AssertionError, with what the ranks said, where one failed."""
        assert not self.hung, self.hung
        if not all(outcome.ok for outcome in self.outcomes):
            raise AssertionError("\n".join(outcome.describe() for outcome in self.outcomes))
        return [outcome.value for outcome in self.outcomes]


class Arms:
    """The ranks of all arms, and what programs have done on them so far."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._ranks: dict[Arm, Ranks] = {}
        self._results: dict[tuple[Arm, str], Result] = {}

    def result(self, arm: Arm, program: Program) -> Result:
        """Runs a program on an arm, or remembers what it did there."""
        key = (arm, program.name)
        if key not in self._results:
            self._results[key] = self._run(arm, program)
        return self._results[key]

    def _run(self, arm: Arm, program: Program) -> Result:
        if arm not in self._ranks:
            backend = arm.backend if arm.library == "pydist" else None
            self._ranks[arm] = Ranks(arm.nprocs, {"PYDIST_BACKEND": backend})
        ranks = self._ranks[arm]
        try:
            outcomes = ranks.outcomes(
                perform, arm, program.module, program.name, timeout=self._limit_s
            )
        except ExpiredError as error:
            del self._ranks[arm]  # all of them were killed
            return Result(hung=str(error))
        result = Result(outcomes)
        if not (all(outcome.ok for outcome in outcomes) or result.is_refused(program)):
            self._ranks.pop(arm).close()
        return result

    def close(self) -> None:
        """Ends all ranks."""
        while self._ranks:
            self._ranks.popitem()[1].close()


# -- in a rank


# What the last program raised here. It holds the program's models, whose groups would end with
# them, under ranks that have not come as far yet: so it stays until all ranks have answered.
_raised: list[Exception] = []


def perform(arm: Arm, module: str, name: str) -> Recording:
    """Runs a program in this rank."""
    _raised.clear()
    gc.collect()
    try:
        return _perform(arm, module, name)
    except Exception as error:
        _raised.append(error)
        raise


def _perform(arm: Arm, module: str, name: str) -> Recording:
    lib = _library(arm)
    text = getattr(importlib.import_module(module), name)
    gc.freeze()  # what is loaded by now stays, and is not looked through again and again
    record = Record()
    with _as_in_a_fresh_process(lib.rank), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if arm.backend == "nccl" and not gpu_ranks.IS_REAL:
            # Of the fake device's way to run the CPU's kernels.
            warnings.filterwarnings(
                "ignore", message="An output with one or more elements was resized"
            )
        text(lib, record)
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    return Recording(record.steps, {str(warning.message) for warning in caught}, state)


@contextlib.contextmanager
def _as_in_a_fresh_process(rank: int) -> Iterator[None]:
    # Models begin differently on each rank, so wrapping them has to make them the same.
    torch.manual_seed(rank)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    # A rank is a daemon of the test's process, and the workers of a loader are children of it.
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    try:
        with mock.patch.dict(config, daemon=False):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
        gc.collect()


def _library(arm: Arm) -> Library:
    if arm.backend == "nccl":
        gpu_ranks.install()
    if arm.keeps_its_group and not dist.is_initialized():
        dist.init_process_group("gloo")
    device = torch.device("cpu")
    if arm.library == "pydist":
        import pydist

        pydist.init()
        if arm.backend == "nccl":
            device = pydist.device()
        names: dict[str, Any] = {
            "DataParallel": pydist.DataParallel,
            "DistributedSampler": pydist.DistributedSampler,
            "SyncBatchNorm": pydist.SyncBatchNorm,
            "ShardedOptimizer": pydist.ShardedOptimizer,
        }
    elif arm.library == "torch DDP":
        names = {
            "DataParallel": DistributedDataParallel,
            "DistributedSampler": DistributedSampler,
            "SyncBatchNorm": nn.SyncBatchNorm,
            "ShardedOptimizer": _zero_redundancy,
        }
    else:
        names = {
            "DataParallel": Alone,
            "DistributedSampler": DistributedSampler,
            "SyncBatchNorm": _NothingToSynchronize,
            "ShardedOptimizer": _whole,
        }
    return Library(
        arm.library, rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, **names
    )


def _zero_redundancy(model: nn.Module, optimizer_class: Any, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optimizer_class, **options)


def _whole(model: nn.Module, optimizer_class: Any, **options: Any) -> Any:
    return optimizer_class(model.parameters(), **options)


class _NothingToSynchronize:
    """One process's batch norm is over the whole batch as it is."""

    @staticmethod
    def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
        return module
