"""Checkpoints of several ranks, of which one dies, is interrupted, or leaves in the middle."""

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch import Ranks, run_ranks
from thorough import everyday
from torch import nn
from training import joined

import pydist
import pydist.checkpoint.saving as saving
from pydist.checkpoint import loading
from pydist.checkpoint.manifest import MANIFEST

LIMIT_S = 50.0

pytestmark = pytest.mark.timeout(60)

_CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def trained(value: float) -> tuple[pydist.DataParallel, pydist.ShardedOptimizer]:
    """A model of which everything is `value`, and an optimizer of which each rank has a part."""
    model = pydist.DataParallel(nn.Linear(300, 4), bucket_cap_mb=0.001)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    model.sync_gradients()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, optimizer


def whole_value(place: Path) -> float:
    """What all of a checkpoint is."""
    state = pydist.checkpoint.to_torch(place)
    momenta = [values["momentum_buffer"] for values in state["optimizer"]["state"].values()]
    values = {float(v) for t in (*state["model"].values(), *momenta) for v in t.unique()}
    assert len(values) == 1, values
    return values.pop()


def die_while_saving(folder: str, value: float, victim: int, die_at: int) -> str:
    """The victim kills itself at its n-th change of a file or folder."""
    rank, _ = joined()
    place = Path(folder) / "place"
    model, optimizer = trained(value)
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in _CHANGES or rank != victim or die_at == 0:
            return
        # What a folder is emptied of has names relative to it.
        if event not in ("os.remove", "os.rmdir") and folder not in str(arguments[0]):
            return
        if event == "open" and arguments[1] not in ("w", "wb", "xb", "w+b"):
            return
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    try:
        pydist.save(place, model=model, optimizer=optimizer, asynchronous=die_at % 8 == 1).wait()
    except pydist.PeerLost as error:
        return str(error)
    # What follows is written too, unless somebody is gone.
    return "saved"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_while_all_save(tmp_path: Path, victim: int) -> None:
    """The old checkpoint or the new one is there, whole, and the other rank says who is gone.

    Where a save alone in its process may die, `test_killed_at_every_step` tries all; here, some.
    """
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        assert ranks.run(die_while_saving, str(tmp_path), 1.0, victim, 0) == ["saved", "saved"]
    place = tmp_path / "place"
    present = 1.0
    seen = []
    for die_at in range(1, 99, 4 if victim == 0 else 1):
        new = 1.0 + die_at
        with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
            outcomes = ranks.outcomes(
                die_while_saving, str(tmp_path), new, victim, die_at, timeout=20
            )
        died = outcomes[victim].exit_code == -signal.SIGKILL
        survivor = outcomes[1 - victim]
        assert survivor.ok, survivor.describe()
        found = whole_value(place)
        assert found in (present, new)
        seen.append(found == new)
        present = found
        if not died:
            assert survivor.value == "saved"
            break
        assert survivor.value == "saved" or f"rank {victim}" in survivor.value
    assert not died
    # Rank 0 makes, completes and moves folders; the other one writes a file.
    assert seen[-1]
    assert len(seen) > (4 if victim == 0 else 1)
    assert seen[0] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place"]


def leave_in_the_middle(folder: str) -> list[str]:
    """Rank 1 is interrupted while it writes, lives on, and comes back for more."""
    rank, _ = joined()
    model, optimizer = trained(1.0)
    place = Path(folder) / "place"
    pydist.save(place, model=model, optimizer=optimizer)
    write = saving._write_own

    def interrupted(*arguments: Any) -> Any:
        if rank == 1:
            raise KeyboardInterrupt
        return write(*arguments)

    said = []
    with (
        mock.patch.object(saving, "_write_own", interrupted),
        pytest.raises((KeyboardInterrupt, pydist.Error)) as met,
    ):
        pydist.save(place, model=model, optimizer=optimizer, extra="second")
    said.append(f"{met.type.__name__}: {met.value}")
    for again in (
        lambda: pydist.save(place, model=model, optimizer=optimizer, extra="third"),
        lambda: pydist.load(place, model=model, optimizer=optimizer),
    ):
        with pytest.raises(pydist.Error) as error:
            again()
        said.append(f"{error.type.__name__}: {error.value}")
    # Training goes on.
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    optimizer.finish()
    assert whole_value(place) == 1.0
    assert pydist.checkpoint.to_torch(place)["extra"] is None
    return said


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_an_interrupted_save_is_not_mixed_up_with_the_next(tmp_path: Path, backend: str) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend, "PYDIST_TIMEOUT": "20"}) as ranks:
        said = ranks.run(leave_in_the_middle, str(tmp_path), timeout=LIMIT_S)
    assert said[1][0].startswith("KeyboardInterrupt")
    for rank, errors in enumerate(said):
        for error in errors[rank == 1 :]:
            assert error.startswith(("Aborted", "PeerLost")), error
            if backend == "native":
                assert "ended half-way on rank 1, with KeyboardInterrupt" in error


def drop_the_model(folder: str) -> bool:
    """While it is being saved."""
    joined()

    def start() -> None:
        model = pydist.DataParallel(nn.Sequential(*(nn.Linear(700, 700) for _ in range(8))))
        pydist.save(Path(folder) / "dropped", model=model, asynchronous=True)

    start()
    gc.collect()
    pydist.shutdown()
    return (Path(folder) / "dropped" / MANIFEST).exists()


def test_the_end_waits_for_models_that_are_gone(tmp_path: Path) -> None:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        assert ranks.run(drop_the_model, str(tmp_path), timeout=LIMIT_S) == [True, True]


def save_of_some(folder: str) -> bool:
    """Of torch's wrapper over two of three ranks: the third knows nothing of it."""
    rank, _ = joined()
    group = torch.distributed.new_group([0, 2])
    if rank != 1:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
        pydist.save(Path(folder) / "some", model=model)
        pydist.load(Path(folder) / "some", model=model)
    return True


def test_ranks_of_a_wrapper_of_torchs(tmp_path: Path) -> None:
    with Ranks(3, {"PYDIST_BACKEND": "native", "PYDIST_TIMEOUT": "10"}) as ranks:
        assert all(ranks.run(save_of_some, str(tmp_path), timeout=LIMIT_S))


def call_alone(folder: str, act: Any) -> str:
    """Rank 0 does what all must; says what it was told."""
    torch.set_num_threads(1)
    pydist.init(timeout=1)
    path: Any = f"{folder}/place"
    pydist.save(path)
    if pydist.rank() == 0:
        with pytest.raises(pydist.Timeout) as raised:
            act(path)
        pydist.barrier(timeout=10)
        return str(raised.value)
    pydist.barrier(timeout=10)
    return ""


@pytest.mark.parametrize("act", [pydist.save, pydist.load])
def test_a_rank_alone_is_told_what_it_waits_in(tmp_path: Path, act: Any) -> None:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        told, _ = ranks.run(call_alone, str(tmp_path), act, timeout=LIMIT_S)
    assert f"(pydist.{act.__name__}())" in told
    assert "rank 1" in told


class PreemptedError(Exception):
    """What a program raises where the machine is to be taken away."""


def be_preempted(_number: int, _frame: object) -> None:
    raise PreemptedError("now")


def load_amid_a_signal(folder: str) -> tuple[str, str]:
    pydist.init()
    model = pydist.DataParallel(nn.Linear(2, 2))
    pydist.save(folder, model=model)
    before = signal.signal(signal.SIGUSR1, be_preempted)

    def interrupted(_folder: Path) -> None:
        if pydist.rank() == 1:
            signal.raise_signal(signal.SIGUSR1)  # to this thread, so now

    try:
        with mock.patch.object(loading, "saved_after", interrupted):
            pydist.load(folder, model=model)
    except (PreemptedError, pydist.CheckpointError) as error:
        raised = type(error).__name__, str(error)
    finally:
        signal.signal(signal.SIGUSR1, before)
    # All ranks know of it, so the next call meets.
    pydist.load(folder, model=model)
    return raised


def test_an_exception_of_a_signal_handler_stays_what_it_is(tmp_path: Path) -> None:
    other, own = run_ranks(load_amid_a_signal, 2, str(tmp_path / "checkpoint"))
    assert own == ("PreemptedError", "now")
    assert other[0] == "CheckpointError", other
    assert "rank 1: PreemptedError: now" in other[1]
