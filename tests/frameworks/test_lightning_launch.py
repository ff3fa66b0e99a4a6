"""Who starts the processes: strategies by themselves, torchrun, or Slurm."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lightning_runs as runs
import pytest
import toy_training as toy
from launch import Ranks, run_command

import pydist

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed: make test-frameworks installs it",
)

PROGRAM = Path(__file__).with_name("lightning_program.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT_S = 100.0


def lines_of(*arguments: str, begin: str = "rank ") -> list[str]:
    """What the ranks of a program have said, in their order: lines that begin so."""
    path = ":".join(filter(None, sys.path))
    command = [sys.executable, *arguments]
    ended = run_command(command, env={"PYTHONPATH": path}, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    return sorted(line for line in ended.stdout.splitlines() if line.startswith(begin))


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("pydist", "2"), ("pydist", "auto"), ("pydist_spawn", "2"), ("pydist_notebook", "2")],
)
def test_a_program_starts_its_processes(strategy: str, devices: str) -> None:
    assert lines_of(str(PROGRAM), strategy, devices) == [
        f"rank {rank} of 2 in DataParallel by LightningEnvironment" for rank in range(2)
    ]


def test_a_program_with_another_strategy_has_the_same_losses() -> None:
    ours = lines_of(str(PROGRAM), "pydist", "2", begin="loss ")
    assert len(ours) == 6
    assert ours == lines_of(str(PROGRAM), "ddp", "2", begin="loss ")


@pytest.mark.parametrize("devices", ["2", "auto"])
def test_torchrun_starts_a_program(devices: str) -> None:
    assert lines_of(*TORCHRUN, str(PROGRAM), "pydist", devices) == [
        f"rank {rank} of 2 in DataParallel by TorchElasticEnvironment" for rank in range(2)
    ]


@toy.leaving()
def under_slurm() -> tuple[str, int, list[float]]:
    """A training in a process that has of a launcher what `srun` sets on one node."""
    rank = os.environ["RANK"]
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "training",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
    }
    with mock.patch.dict(os.environ, variables):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        settings = {"accelerator": runs.two_processors(), "max_epochs": 1}
        trainer = runs.trainer_of("lightning", "pydist", "auto", **settings)
        model = runs.regression("lightning", length=24, batch_size=3)
        trainer.fit(model)
        environment = type(trainer.strategy.cluster_environment).__name__
        return environment, trainer.global_rank, model.losses


def test_slurm_starts_the_processes() -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.run(under_slurm, timeout=LIMIT_S)
    assert [outcome[:2] for outcome in outcomes] == [("SLURMEnvironment", rank) for rank in (0, 1)]
    losses = [outcome[2] for outcome in outcomes]
    assert [len(own) for own in losses] == [4, 4]
    assert losses[0] != losses[1]


def test_a_rank_that_has_died_is_not_explained_by_its_batches() -> None:
    strategy = importlib.import_module("pydist.integrations.lightning").LightningStrategy()
    strategy._uneven = "Ranks have unequally many batches."
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(training=False))
    for cause, is_explained in (("has died", False), ("has left the group", True)):
        with pytest.raises(pydist.PeerLost) as caught, strategy._telling_of_uneven_batches():
            raise pydist.PeerLost(f"rank 1 {cause}.", ranks=(1,), cause=cause)
        assert ("unequally many" in str(caught.value)) == is_explained
        assert caught.value.ranks == (1,)
