"""What is saved on some ranks is loaded on others; what cannot be saved is refused on all."""

import copy
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from launch import Ranks
from saved_training import LIMIT_S, STAGE_1, STAGE_2, Training, assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader
from training import joined

import pydist
import pydist.checkpoint.dcp_files as dcp_files
from pydist.checkpoint.manifest import MANIFEST

pytestmark = pytest.mark.timeout(60)


def keep_what_waits(folder: str) -> None:
    """State of parameters that are frozen when it is loaded, saved on, and they train again."""
    rank, _ = joined()
    groups = {n: pydist.new_group(range(n)) for n in (2, 3)}
    states = []
    if rank < 2:
        training = Training(groups[2], STAGE_1)
        training.run(range(3))
        pydist.save(f"{folder}/trained", **training.parts)
        states.append(pydist.checkpoint.to_torch(f"{folder}/trained"))
        again = Training(groups[2], STAGE_2, seed=1, frozen=("inside.weight", "image.weight"))
        again.run(range(70, 71))
        pydist.load(f"{folder}/trained", **again.parts)
        pydist.save(f"{folder}/frozen", **again.parts)
        # As one rank's part, too.
        local = copy.deepcopy(again.optimizer.state_dict())
        again.optimizer.load_state_dict(local)
        pydist.save(f"{folder}/local", **again.parts)
        for name in ("frozen", "local"):
            states.append(pydist.checkpoint.to_torch(f"{folder}/{name}"))
        expected = training.run(range(3, 6))
        for parameter in again.model.parameters():
            parameter.requires_grad_(parameter is not again.model.frozen)
        assert_same(again.run(range(3, 6)), expected, "unfrozen", exact=False)
        assert not again.optimizer._waiting  # type: ignore[attr-defined]
        for other in states[1:]:
            for number, values in states[0]["optimizer"]["state"].items():
                found = other["optimizer"]["state"][number]
                assert all(torch.equal(values[key], found[key]) for key in values)
    pydist.barrier()
    if rank < 3:
        more = Training(groups[3], STAGE_1, seed=2)
        pydist.load(f"{folder}/frozen", **more.parts)
        found = more.run(range(3, 6))
        if rank < 2:
            assert_same(found, expected, "on more ranks", exact=False)
    pydist.barrier()


def test_state_of_what_is_frozen(four: Ranks, tmp_path: Path) -> None:
    four.run(keep_what_waits, str(tmp_path), timeout=LIMIT_S)


def save_everything(folder: str) -> None:
    rank, size = joined()
    world = pydist.new_group(range(size))
    training = Training(world, STAGE_2)
    samples: Any = range(96)
    loader = pydist.prepare(DataLoader(samples, 8, shuffle=True), seed=3)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    place = f"{folder}/everything"
    pydist.save(
        place,
        **training.parts,
        sampler=loader,
        extra={"losses": [1.0, 2.0], "best": torch.ones(2), "name": "x"},
    )
    rest = [batch.tolist() for batch in iterator]
    drawn = (random.random(), np.random.rand(), torch.rand(2).tolist())
    other = pydist.prepare(DataLoader(samples, 8, shuffle=True), seed=4)
    again = Training(world, STAGE_1, seed=5)
    extra = pydist.load(place, **again.parts, sampler=other)
    assert extra["losses"] == [1.0, 2.0]
    assert torch.equal(extra["best"], torch.ones(2))
    assert drawn == (random.random(), np.random.rand(), torch.rand(2).tolist())
    assert [batch.tolist() for batch in other] == rest
    # Steps, of which the last two stay; asynchronous, while training goes on.
    steps = Path(folder) / "steps"
    for step in range(1, 5):
        handle = pydist.save(steps, **training.parts, step=step, keep=2, asynchronous=True)
        values = training.run(range(step, step + 1))
    handle.wait()
    assert handle.done()
    assert handle.path == steps / "step-000004"
    assert sorted(p.name for p in steps.iterdir()) == ["step-000003", "step-000004"]
    assert pydist.checkpoint.latest(steps) == handle.path
    pydist.load(steps, **again.parts)
    assert_same(again.run(range(4, 5)), values, "asynchronous", exact=False)
    # What is saved is the state at the call, whenever it is written.
    training = Training(world, STAGE_1, optimizer_class=torch.optim.NAdam)
    training.run(range(3))
    held: list[threading.Thread] = []
    with mock.patch.object(threading.Thread, "start", lambda thread: held.append(thread)):
        handle = pydist.save(place, **training.parts, asynchronous=True)
    values = training.run(range(3, 6))
    held[0].start()
    handle.wait()
    again = Training(world, STAGE_1, optimizer_class=torch.optim.NAdam, seed=6)
    pydist.load(place, **again.parts)
    assert_same(again.run(range(3, 6)), values, "written later", exact=True)
    # The last save is still under way when the ranks leave.
    pydist.save(f"{folder}/last", **training.parts, asynchronous=True)
    pydist.shutdown()
    assert (Path(folder) / "last" / MANIFEST).exists()


def fail_together(folder: str) -> None:
    rank, size = joined()
    world: Any = pydist.new_group(range(size))
    training = Training(world, STAGE_1)
    place = Path(folder) / "failing"
    pydist.save(place, **training.parts)
    before = pydist.checkpoint.to_torch(place)
    training.run(range(2))

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if refusing and event == "open" and str(arguments[0]).endswith("__1_0.distcp"):
            raise OSError(28, "No space left on device")

    refusing = rank == 1
    sys.addaudithook(refuse)
    with pytest.raises(pydist.CheckpointError, match=r"rank 1: .*No space left on device"):
        pydist.save(place, **training.parts)
    handle = pydist.save(place, **training.parts, asynchronous=True)
    with pytest.raises(pydist.CheckpointError, match="rank 1"):
        handle.wait()
    pydist.save(place, **training.parts, asynchronous=True)
    with pytest.raises(pydist.CheckpointError, match="before this one"):
        pydist.save(place, **training.parts)
    assert [p.name for p in Path(folder).iterdir()] == ["failing"]
    refusing = False
    after = pydist.checkpoint.to_torch(place)
    assert all(torch.equal(after["model"][n], v) for n, v in before["model"].items())
    pydist.barrier()
    # What a rank alone asks for.
    with pytest.raises(pydist.Mismatch, match="rank 1"):
        pydist.save(place if rank != 1 else f"{place}2", **training.parts)
    with pytest.raises(pydist.InvalidUsage, match=r"rank 0: extra can't be.*; rank 3: keep="):
        pydist.save(place, keep=1 if rank == 3 else None, extra=lambda: 1)
    with pytest.raises(pydist.InvalidUsage, match=r"holds a numpy.*holds numbers, text"):
        pydist.save(place, extra={"losses": np.zeros(2)})
    refuse_what_is_not_whole(place, training)
    # What does not fit, changes nothing.
    with pytest.raises(pydist.InvalidUsage, match="has no sampler"):
        pydist.load(place, sampler=training.scheduler)
    small = pydist.DataParallel(nn.Linear(2, 2), process_group=world)
    values = [p.detach().clone() for p in small.parameters()]
    with pytest.raises(pydist.InvalidUsage, match="another model"):
        pydist.load(place, model=small)
    assert_same([p.detach() for p in small.parameters()], values, "refused", exact=True)
    sgd = pydist.ShardedOptimizer(small, torch.optim.SGD, lr=0.1)
    with pytest.raises(pydist.InvalidUsage, match="AdamW"):
        pydist.load(place, optimizer=sgd)
    pydist.barrier()
    if rank == 0:
        file = place / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    pydist.barrier()
    with pytest.raises(pydist.CheckpointError, match=r"__1_0\.distcp is damaged"):
        pydist.load(place, **training.parts)
    training.run(range(2, 3))
    pydist.barrier()


def misname_the_path(folder: str) -> None:
    """Whichever ranks do: the others are told, and saves go on."""
    rank, _ = joined()
    pydist.save(f"{folder}/named", extra=2)
    for wrong in (None, b"bytes", 3):
        for everywhere in (True, False):
            path: Any = wrong if everywhere or rank == 1 else f"{folder}/named"
            for act in (pydist.save, pydist.load):
                with pytest.raises(pydist.InvalidUsage, match=r"path=.* is not valid"):
                    act(path)
    pydist.save(f"{folder}/named", extra=3)
    assert pydist.load(f"{folder}/named") == 3


def test_a_path_that_is_none(four: Ranks, tmp_path: Path) -> None:
    four.run(misname_the_path, str(tmp_path), timeout=LIMIT_S)


def save_numbers_of_numpy(folder: str) -> None:
    """A schedule by numpy's functions makes the rate one of its numbers."""
    joined()
    model = pydist.DataParallel(nn.Linear(2, 2))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + np.cos(step / 10))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    rate = optimizer.param_groups[0]["lr"]
    assert type(rate) is np.float64
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    extra = {"seen": np.int64(2**40), "scores": [(np.float32(0.1), np.bool_(True))]}
    pydist.save(f"{folder}/numpy", **parts, extra=extra)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] != rate
    loaded = pydist.load(f"{folder}/numpy", **parts)
    assert loaded == {"seen": 2**40, "scores": [(float(np.float32(0.1)), True)]}
    assert optimizer.param_groups[0]["lr"] == rate == scheduler.get_last_lr()[0]


def test_numbers_of_numpy(four: Ranks, tmp_path: Path) -> None:
    four.run(save_numbers_of_numpy, str(tmp_path), timeout=LIMIT_S)


def save_from_several_models(folder: str) -> None:
    """What is under way at a place comes first, whosever it is, and is told of if it failed."""
    _, size = joined()
    place = f"{folder}/shared"

    def model(seed: float) -> Any:
        module = nn.Linear(5, 3)
        nn.init.constant_(module.weight, seed)
        return pydist.DataParallel(module, process_group=pydist.new_group(range(size)))  # type: ignore[arg-type]

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.3)
        if fails:
            raise OSError(28, "No space left on device")
        return write_file(*arguments)

    write_file, fails = dcp_files.write_file, False
    first, second = model(1.0), model(2.0)
    with mock.patch.object(dcp_files, "write_file", slowly):
        pydist.save(place, model=first, asynchronous=True)
        pydist.load(place, model=second)
        assert float(second.weight[0, 0].detach()) == 1.0
        pydist.save(place, model=first, asynchronous=True)
        with torch.no_grad():
            second.weight.fill_(3.0)
        pydist.save(place, model=second)
        assert float(pydist.checkpoint.to_torch(place)["model"]["weight"][0, 0]) == 3.0
        pydist.save(place, model=first, asynchronous=True)
        assert float(pydist.checkpoint.to_torch(place)["model"]["weight"][0, 0]) == 1.0
        # Also of steps: what one leaves half-written is another's.
        for step, each in enumerate((first, second)):
            pydist.save(f"{folder}/steps", model=each, step=step, keep=2, asynchronous=True)
        whole = pydist.checkpoint.to_torch(f"{folder}/steps")["model"]
        assert float(whole["weight"][0, 0]) == 3.0
        fails = True
        for act in (
            lambda: pydist.load(place, model=second),
            lambda: pydist.save(place, model=second),
            lambda: pydist.checkpoint.to_torch(place),
        ):
            pydist.save(place, model=first, asynchronous=True)
            with pytest.raises(pydist.CheckpointError, match="No space left"):
                act()
    pydist.barrier()
    # Steps do not go into what is replaced as a whole, nor the other way round.
    for asynchronous in (False, True):
        with pytest.raises(pydist.InvalidUsage, match=r"shared is a checkpoint itself.*another"):
            pydist.save(place, model=first, step=3, asynchronous=asynchronous)
    with pytest.raises(pydist.CheckpointError, match=r"steps exists and is no checkpoint.*step="):
        pydist.save(f"{folder}/steps", model=first)
    pydist.barrier()


def test_several_models_save_at_one_place(four: Ranks, tmp_path: Path) -> None:
    four.run(save_from_several_models, str(tmp_path), timeout=LIMIT_S)


def refuse_what_is_not_whole(place: Path, training: Training) -> None:
    module = nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW)
    mesh = init_device_mesh("cpu", (pydist.world_size(),))
    parted: Any = nn.Linear(4, 4)
    parted.weight = nn.Parameter(distribute_tensor(parted.weight.detach(), mesh, [Shard(0)]))
    several: list[Any] = [training.optimizer]
    for arguments, match in (
        ({"optimizer": several}, "optimizer is a list; it must be an optimizer, or a mapping"),
        ({"model": [module]}, "model is a list; it must be a module, or a mapping"),
        ({"model": {"G": 3}}, "model 'G': model is an int; it must be a module"),
        ({"model": {"a.b": module}}, r"model= has the name 'a\.b'; names are text of letters"),
        ({"optimizer": {3: zero}}, "optimizer= has the name 3; names are text"),
        ({"scheduler": {"G": None}}, r"scheduler\['G'\] is None: leave out"),
        ({"stateful": module}, "stateful is a Linear; it must be a mapping"),
        ({"stateful": {"it": 3}}, r"stateful 'it' is an int, which has no load_state_dict\(\)"),
        ({"optimizer": zero}, "ZeroRedundancyOptimizer.*from_torch"),
        ({"optimizer": {"zero": zero}}, "optimizer 'zero': .*ZeroRedundancyOptimizer.*from_torch"),
        ({"model": parted}, r"weight is a DTensor.*use torch\.distributed\.checkpoint"),
        ({"model": nn.Linear(2, 2, device="meta")}, "weight is torch.strided on meta"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=match):
            pydist.save(place, **arguments)
        if "zero'" in match:
            match = "has no optimizer 'zero': it was saved with one that has no name"
        with pytest.raises(pydist.InvalidUsage, match=match):
            pydist.load(place, **arguments)
    with pytest.raises(pydist.InvalidUsage, match="pass a folder in it"):
        pydist.save("/", model=module)


def test_everything_and_asynchronous(four: Ranks, tmp_path: Path) -> None:
    four.run(save_everything, str(tmp_path), timeout=LIMIT_S)


def test_what_fails_on_one_rank_fails_on_all(four: Ranks, tmp_path: Path) -> None:
    four.run(fail_together, str(tmp_path), timeout=LIMIT_S)
