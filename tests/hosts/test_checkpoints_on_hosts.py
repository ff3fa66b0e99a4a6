"""Checkpoints of two hosts: training goes on from them on as many hosts, and on fewer.

And what all ranks read where the hosts have no folder in common. Ranks 0 and 1 are on one host,
rank 2 is on another.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from namespaces import Hosts
from own_folder import have_alone
from rank_process import Outcome
from ranks_on import rank_outcomes_on, run_ranks_on
from saved_training import LIMIT_S, STAGE_1, STAGE_2, WHOLE, Kind, Training, assert_same
from thorough import everyday
from torch import Tensor
from training import joined

import pydist

pytestmark = pytest.mark.timeout(120)

RANKS_PER_HOST = [2, 1]
NATIVE = {"PYDIST_BACKEND": "native"}
# How the optimizer is sharded when it is saved, and when it is loaded.
KINDS: list[tuple[Kind, Kind]] = [(WHOLE, STAGE_2), (STAGE_1, STAGE_1), (STAGE_2, WHOLE)]


def world() -> Any:
    _, size = joined()
    return pydist.new_group(range(size))


def save_amid(folder: str) -> str:
    """Half of a training run, for each way in which the optimizer is sharded."""
    group = world()
    for saved, _ in KINDS:
        training = Training(group, saved)
        training.run(range(5))
        pydist.save(f"{folder}/{saved}", **training.parts)
    return pydist.backend()


def go_on(folder: str) -> list[list[Tensor]]:
    """The other half, each from a checkpoint."""
    group = world()
    ends = []
    for saved, loaded in KINDS:
        training = Training(group, loaded, seed=1)
        training.run(range(70, 71))
        pydist.load(f"{folder}/{saved}", **training.parts)
        ends.append(training.run(range(5, 10)))
    return ends


def never_stop() -> list[Tensor]:
    return Training(world(), WHOLE).run(range(10))


@pytest.fixture(scope="module")
def uninterrupted() -> list[Tensor]:
    """One process, on the whole batch."""
    end: list[Tensor] = run_ranks(never_stop, 1, timeout=LIMIT_S)[0]
    return end


@pytest.fixture(scope="module")
def saved(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("saved"))
    backends = run_ranks_on(hosts, RANKS_PER_HOST, save_amid, folder, timeout=LIMIT_S)
    assert set(backends) == {"native"}
    return folder


def require_same_end(everybody: list[list[list[Tensor]]], uninterrupted: list[Tensor]) -> None:
    """Up to the rounding of sums over other ranks; all ranks have the same bits."""
    for ends in everybody:
        for (before, after), end, first in zip(KINDS, ends, everybody[0], strict=True):
            what = f"saved in stage {before}, loaded in stage {after}"
            assert_same(end, uninterrupted, what, exact=False)
            assert_same(end, first, f"{what}, beside rank 0", exact=True)


@pytest.mark.parametrize("ranks_per_host", everyday([1, 1], thorough=([2, 1],)))
def test_two_hosts_go_on(
    hosts: Hosts, saved: str, uninterrupted: list[Tensor], ranks_per_host: list[int]
) -> None:
    ends = run_ranks_on(hosts, ranks_per_host, go_on, saved, timeout=LIMIT_S)
    require_same_end(ends, uninterrupted)


@pytest.mark.parametrize("nprocs", everyday(1, thorough=(2,)))
def test_one_host_goes_on(saved: str, uninterrupted: list[Tensor], nprocs: int) -> None:
    require_same_end(run_ranks(go_on, nprocs, saved, timeout=LIMIT_S), uninterrupted)


# --- hosts without a folder in common ------------------------------------------------------------


def own_disk(folder: str) -> None:
    """Rank 2 is alone on its host, whose disk is its own."""
    if os.environ["RANK"] == "2":
        have_alone(folder, f"{folder}-of-second")


def model_of(value: float) -> Any:
    joined()
    model = pydist.DataParallel(torch.nn.Linear(4, 2).double())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save_apart(folder: str, is_interrupted_before: bool) -> Any:
    own_disk(folder)
    model = model_of(1.0)
    if is_interrupted_before and pydist.rank() == 2:
        # What a save by this host alone leaves that is killed.
        Path(folder, ".last.partial").mkdir()
    pydist.save(f"{folder}/last", model=model)


def fails_on_all(outcomes: list[Outcome], error: str) -> list[Outcome]:
    for outcome in outcomes:
        assert outcome.error == error, outcome.describe()
    return outcomes


@pytest.mark.parametrize("is_interrupted_before", [False, True])
def test_a_save_into_a_folder_for_each_host_fails_on_all(
    hosts: Hosts, tmp_path: Path, is_interrupted_before: bool
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    outcomes = rank_outcomes_on(
        hosts, RANKS_PER_HOST, save_apart, str(folder), is_interrupted_before, env=NATIVE
    )
    for outcome in fails_on_all(outcomes, "CheckpointError"):
        assert "all ranks must see the same folder" in outcome.message
        assert "rank 2" in outcome.message
    # No half of a checkpoint is left that could be taken for one.
    assert list(folder.iterdir()) == []


def save_by_oneself(folder: str, value: float) -> None:
    pydist.save(f"{folder}/last", model=model_of(value))


def load_apart(folder: str) -> list[float]:
    own_disk(folder)
    model = model_of(0.0)
    try:
        pydist.load(f"{folder}/last", model=model)
    except pydist.Error:
        assert model.bias.tolist() == [0.0, 0.0], "nothing is changed"
        raise
    return model.bias.tolist()  # type: ignore[no-any-return]


def test_a_checkpoint_that_one_host_has_alone_fails_on_all(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    run_ranks(save_by_oneself, 1, str(folder), 1.0)
    outcomes = rank_outcomes_on(hosts, RANKS_PER_HOST, load_apart, str(folder), env=NATIVE)
    for outcome in fails_on_all(outcomes, "CheckpointError"):
        assert "rank 2: there is no checkpoint at" in outcome.message


@pytest.mark.parametrize("is_copy", [False, True])
def test_checkpoints_of_one_name_load_if_they_are_the_same(
    hosts: Hosts, tmp_path: Path, is_copy: bool
) -> None:
    """Each host has one on its own disk: a copy may be loaded, another one may not."""
    folder = tmp_path / "disk"
    run_ranks(save_by_oneself, 1, str(folder), 1.0)
    other = Path(f"{folder}-of-second")
    if is_copy:
        shutil.copytree(folder, other)
        loaded = run_ranks_on(hosts, RANKS_PER_HOST, load_apart, str(folder), env=NATIVE)
        assert loaded == [[1.0, 1.0]] * 3
        return
    run_ranks(save_by_oneself, 1, str(other), 2.0)
    outcomes = rank_outcomes_on(hosts, RANKS_PER_HOST, load_apart, str(folder), env=NATIVE)
    for outcome in fails_on_all(outcomes, "Mismatch"):
        assert "rank 2" in outcome.message
        assert "and there the checkpoint last with manifest.json of sha256 " in outcome.message
