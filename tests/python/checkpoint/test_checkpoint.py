"""Checkpoints: saved on some ranks, loaded on others; killed, damaged, and at fault."""

import copy
import itertools
import os
import random
import re
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from forged_checkpoint import write_as_before
from launch import Ranks
from saved_training import LIMIT_S, SAMPLES, STAGE_1, STAGE_2, WHOLE, Training, assert_same
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from training import Tied, joined

import pydist
import pydist.checkpoint.dcp_files as dcp_files
from pydist.checkpoint.manifest import MANIFEST
from pydist.parallel.bucket_planner import DEFAULT_CAP_BYTES

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
        ({"model": {"G": 3}}, "model 'G': model is a int; it must be a module"),
        ({"model": {"a.b": module}}, r"model= has the name 'a\.b'; names are text of letters"),
        ({"optimizer": {3: zero}}, "optimizer= has the name 3; names are text"),
        ({"scheduler": {"G": None}}, r"scheduler\['G'\] is None: leave out"),
        ({"stateful": module}, "stateful is a Linear; it must be a mapping"),
        ({"stateful": {"it": 3}}, r"stateful 'it' is a int, which has no load_state_dict\(\)"),
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


def abandon(folder: str) -> None:
    """Goes on from an earlier step: what is saved then is the last, whatever its number."""
    joined()

    def left() -> list[int]:
        return sorted(int(path.name[-6:]) for path in Path(folder).iterdir())

    def save(step: int, **options: Any) -> None:
        pydist.save(folder, step=step, extra=step, **options)

    for step in (10, 20, 30):
        save(step, keep=3)
    assert pydist.load(f"{folder}/step-000010") == 10
    save(15, keep=3)
    assert pydist.load(folder) == 15
    assert left() == [15, 20, 30]
    save(20)  # once more
    assert pydist.load(folder) == 20
    save(16, keep=2)
    assert left() == [16, 20]
    save(17, keep=1)
    assert left() == [17]
    # Of earlier versions, which gave no number: older than the others, and by step.
    for step in (18, 19):
        save(step)
        write_as_before(Path(folder) / f"step-0000{step}", "sequence")
    assert pydist.load(folder) == 17
    shutil.rmtree(f"{folder}/step-000017")
    assert pydist.load(folder) == 19
    save(12, keep=2)
    assert left() == [12, 19]
    # The last one's damage is named, rather than another one loaded.
    manifest = Path(folder) / "step-000012" / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-20])
    with pytest.raises(pydist.CheckpointError, match=r"step-000012/manifest.json is damaged"):
        pydist.load(folder)


def test_the_last_is_what_was_saved_last(tmp_path: Path) -> None:
    with Ranks(1) as alone:
        alone.run(abandon, str(tmp_path), timeout=LIMIT_S)


def die_at_every_step(folder: str) -> tuple[int, list[int]]:
    """Saves in forked processes, of which the n-th dies at its n-th change of a file or folder."""
    changes = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
    placement = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in (*placement, "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    torch.set_num_threads(1)
    place = Path(folder) / "steps"
    model = nn.Linear(300, 4)
    found: list[list[int]] = []

    def fill(value: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)

    def save(value: float, die_at: int) -> None:
        count = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event not in changes:
                return
            # What a folder is emptied of has names relative to it.
            if event not in ("os.remove", "os.rmdir") and folder not in str(arguments[0]):
                return
            if event == "open" and arguments[1] not in ("w", "wb", "xb", "w+b"):
                return
            count += 1
            if count == die_at:
                os._exit(9)

        sys.addaudithook(watch)
        fill(value)
        pydist.save(place / "one", model=model)
        pydist.save(place, model=model, step=int(value), keep=1)
        os._exit(0)

    for die_at in range(1000):
        # The first one lives, and so does one that nothing kills any more.
        child = os.fork()
        if child == 0:
            try:
                save(float(die_at), die_at)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 9), code
        values = []
        for path in (place / "one", place):
            state = pydist.checkpoint.to_torch(path)["model"]
            value = float(state["bias"][0])
            assert all(bool((tensor == value).all()) for tensor in state.values())
            values.append(int(value))
        assert place / "one" != pydist.checkpoint.latest(place)
        # The old one or the new one, and never an older one than before.
        previous = found[-1] if found else [0, 0]
        assert all(a in (b, die_at) for a, b in zip(values, previous, strict=True)), values
        found.append(values)
        if code == 0 and die_at:
            assert values == [die_at, die_at]
            left = sorted(path.name for path in place.iterdir())
            assert left == ["one", f"step-{die_at:06d}"]
            return die_at, [a for a, _ in found]
    raise AssertionError("never done")


def test_killed_at_every_step(tmp_path: Path) -> None:
    with Ranks(1) as alone:
        [(deaths, found)] = alone.run(die_at_every_step, str(tmp_path), timeout=LIMIT_S)
    assert deaths > 20
    assert len(set(found)) > 10  # deaths after the new one was in its place


def convert(folder: str) -> None:
    rank, size = joined()
    world = pydist.new_group(range(size))
    training = Training(world, STAGE_2)
    training.run(range(4))
    place = Path(folder) / "native"
    pydist.save(place, **training.parts)
    state = pydist.checkpoint.to_torch(place)
    expected = training.run(range(4, 8))
    # Into plain torch: an unwrapped module and the class itself, on all samples.
    module = Tied(torch.float64)
    module.load_state_dict(state["model"])
    named = list(module.named_parameters())
    plain: Any = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1]},
            {"params": [p for _, p in named if p.dim() <= 1]},
        ]
    )
    plain.load_state_dict(copy.deepcopy(state["optimizer"]))  # which it would write into
    schedule = torch.optim.lr_scheduler.StepLR(plain, 3, 0.5)
    schedule.load_state_dict(state["scheduler"])
    for step in range(4, 8):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
        plain.zero_grad()
        module(batch).mean().backward()
        plain.step()
        schedule.step()
    found = [p.detach() for p in module.parameters()]
    assert_same(found, expected, "in plain torch", exact=False)
    # And back, under the names that torch's wrapper gives.
    wrapped = {f"module.{name}": value for name, value in state["model"].items()}
    for kind in (WHOLE, STAGE_1, STAGE_2):
        again = Training(world, kind, seed=2)
        pydist.checkpoint.from_torch(
            {"model": wrapped, "optimizer": copy.deepcopy(state["optimizer"])},
            model=again.model,
            optimizer=again.optimizer,
        )
        again.scheduler.load_state_dict(state["scheduler"])
        assert_same(again.run(range(4, 8)), expected, f"into stage {kind}", exact=False)
    # torch's own tool reads the files.
    if rank == 0:
        dcp_to_torch_save(place, Path(folder) / "torch.pt")
        flat = torch.load(Path(folder) / "torch.pt", weights_only=True)
        for name, value in state["model"].items():
            assert torch.equal(flat[f"model.{name}"], value), name
    pydist.barrier()


def convert_zero(folder: str) -> None:
    """What torch's ZeroRedundancyOptimizer under its DistributedDataParallel has saved."""
    rank, size = joined()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 31), nn.Tanh(), nn.Linear(31, 2)).double()
    ours = pydist.DataParallel(copy.deepcopy(module))
    sharded = pydist.ShardedOptimizer(ours, torch.optim.AdamW, stage=2, lr=1e-2)
    theirs = nn.parallel.DistributedDataParallel(module)
    zero = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.AdamW, lr=1e-2)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(size * step + rank)
            optimizer.zero_grad()
            batch = torch.randn(5, 8, generator=generator, dtype=torch.float64)
            model(batch).square().mean().backward()
            optimizer.step()

    run(theirs, zero, range(5))
    zero.consolidate_state_dict(0)
    if rank == 0:
        saved = {"model": theirs.state_dict(), "optimizer": zero.state_dict()}
        torch.save(saved, Path(folder) / "zero.pt")
    pydist.barrier()
    pydist.checkpoint.from_torch(Path(folder) / "zero.pt", model=ours, optimizer=sharded)
    # A wrapper of torch's is saved under the module's own names as well.
    pydist.save(Path(folder) / "ddp", model=theirs)
    run(theirs, zero, range(5, 8))
    run(ours, sharded, range(5, 8))
    first, second = ([p.detach() for p in model.parameters()] for model in (ours, theirs))
    assert_same(first, second, "from ZeroRedundancyOptimizer", exact=False)
    pydist.load(Path(folder) / "ddp", model=ours)
    pydist.load(Path(folder) / "ddp", model=module)
    first, second = ([p.detach() for p in model.parameters()] for model in (ours, module))
    assert_same(first, second, "of a wrapper of torch's", exact=True)


def test_to_and_from_torch(four: Ranks, tmp_path: Path) -> None:
    four.run(convert, str(tmp_path), timeout=LIMIT_S)
    four.run(convert_zero, str(tmp_path), timeout=LIMIT_S)


def test_damage_is_named(tmp_path: Path) -> None:
    """In this process, alone: each file cut short, flipped, and gone."""
    with Ranks(1) as alone:
        alone.run(damage, str(tmp_path), timeout=LIMIT_S)


def damage(folder: str) -> None:
    joined()
    place = Path(folder) / "whole"
    model = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 3, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    pydist.save(place, model=model, optimizer=optimizer)
    pydist.load(place, model=model, optimizer=optimizer)
    for file in sorted(place.iterdir()):
        content = file.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        for damaged in (content[:-1], flipped, b"", None):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            name = file.name if file.name != MANIFEST or damaged is not None else "no checkpoint"
            with pytest.raises(pydist.CheckpointError, match=re.escape(name)):
                pydist.load(place, model=model)
        file.write_bytes(content)
    pydist.load(place, model=model, optimizer=optimizer)
    with pytest.raises(pydist.CheckpointError, match="exists and is no checkpoint"):
        pydist.save(folder, model=model)
    # What torch's writer makes of a full disk.
    full = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    with (
        mock.patch.object(dcp_files, "write_file", side_effect=full),
        pytest.raises(pydist.CheckpointError, match=r"__0_0\.distcp can't be.*\d bytes free.*pos"),
    ):
        pydist.save(place, model=model)
    # What tempfile makes, say.
    empty = Path(folder) / "empty"
    empty.mkdir()
    pydist.save(empty, model=model, optimizer=optimizer)
    pydist.load(empty, model=model, optimizer=optimizer)
    # As a save leaves it that is killed between its two renames, and a script that makes folders
    # before it starts again: what there is stays until there is more.
    empty.rename(Path(folder) / ".empty.previous")
    empty.mkdir()
    with (
        mock.patch("pydist.checkpoint.saving.publish", side_effect=OSError("no")),
        pytest.raises(pydist.CheckpointError),
    ):
        pydist.save(empty, model=model, optimizer=optimizer)
    pydist.load(empty, model=model, optimizer=optimizer)
    # A link stays one.
    link = Path(folder) / "link"
    link.symlink_to(place)
    for _ in range(2):
        pydist.save(link, model=model, optimizer=optimizer)
        pydist.load(link, model=model, optimizer=optimizer)
    assert link.is_symlink()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["empty", "link", "whole"]
    with pytest.raises(pydist.CheckpointError, match="there is no checkpoint at"):
        pydist.load(Path(folder) / "nowhere", model=model)


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


def fail_half_way(folder: str) -> None:
    rank, size = joined()
    training = Training(pydist.new_group(range(size)), STAGE_2)
    training.run(range(2))
    pydist.save(folder, **training.parts)
    read = dcp_files.Contents.read_tensors
    calls = 0

    def fail_at_the_fourth(self: dcp_files.Contents, wanted: Any) -> None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 4:
            raise OSError(5, "Input/output error")
        read(self, wanted)

    with mock.patch.object(dcp_files.Contents, "read_tensors", fail_at_the_fourth):
        with pytest.raises(pydist.CheckpointError, match=r"half-way, .*rank 1: .*Input/output"):
            pydist.load(folder, **training.parts)
        assert calls >= 4
        pydist.load(folder, **training.parts)
    training.run(range(1))


def test_loading_that_fails_half_way_says_so(tmp_path: Path) -> None:
    """On all ranks; and what is loaded then is whole."""
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        ranks.run(fail_half_way, str(tmp_path / "it"), timeout=LIMIT_S)


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


# ---- wrappers, and other precision --------------------------------------------------------


def deep_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 2)))


def save_wrapped(folder: str) -> None:
    """However torch has wrapped or compiled it, a model is saved under its own names."""
    _, size = joined()
    group: Any = pydist.new_group(range(size))

    def compiled(module: nn.Module) -> Any:
        return torch.compile(module, backend="eager")

    def compiled_within() -> nn.Module:
        module = deep_model()
        module[2] = compiled(module[2])
        return module

    def ddp_within() -> nn.Module:
        module = deep_model()
        module[0] = nn.parallel.DistributedDataParallel(module[0])
        return module

    ddp: Any = nn.parallel.DistributedDataParallel
    makers: list[Any] = [
        lambda: pydist.DataParallel(deep_model(), process_group=group),
        lambda: pydist.DataParallel(compiled(deep_model()), process_group=group),
        lambda: compiled(pydist.DataParallel(deep_model(), process_group=group)),
        lambda: pydist.DataParallel(compiled_within(), process_group=group),
        lambda: ddp(compiled(deep_model())),
        lambda: compiled(ddp(deep_model())),
        ddp_within,
    ]
    names = [f"model.{name}" for name in deep_model().state_dict()]
    for number, make in enumerate(makers):
        model = make()
        if number < 4:
            optimizer: Any = pydist.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        place = f"{folder}/wrapped-{number}"
        pydist.save(place, model=model, optimizer=optimizer)
        assert sorted(dcp_files.Contents(Path(place)).names & set(names)) == sorted(names)
        other = makers[(number + 1) % len(makers)]()
        second: Any = torch.optim.SGD(other.parameters(), lr=0.2)
        pydist.load(place, model=other, optimizer=second)
        assert all(float(p.detach().mean()) == number for p in other.parameters())
        assert second.param_groups[0]["lr"] == 0.1
        # From plain torch as well, with whatever has wrapped it there.
        third = makers[(number + 2) % len(makers)]()
        states = [pydist.checkpoint.to_torch(place)["model"]]
        if number < 6:
            states.append(model.state_dict())
        for state in states:
            pydist.checkpoint.from_torch({"model": state}, model=third)
            assert all(float(p.detach().mean()) == number for p in third.parameters())
            if isinstance(third, pydist.DataParallel):
                with torch.no_grad():
                    next(third.parameters()).zero_()
                third.load_state_dict(state)
                assert float(next(third.parameters()).detach().mean()) == number
        pydist.barrier()


def test_names_without_wrappers(four: Ranks, tmp_path: Path) -> None:
    four.run(save_wrapped, str(tmp_path), timeout=LIMIT_S)


def refuse_what_does_not_fit() -> None:
    """Before anything has changed."""
    _, size = joined()
    world: Any = pydist.new_group(range(size))
    for kind in (WHOLE, STAGE_1, STAGE_2):
        training = Training(world, kind)
        training.run(range(2))
        before = training.values()
        plain = Tied(torch.float64)
        named = list(plain.named_parameters())
        groups = [{"params": [p for _, p in named if (p.dim() > 1) == w]} for w in (True, False)]
        adam: Any = torch.optim.AdamW(groups)
        plain(torch.ones(SAMPLES, 8, dtype=torch.float64)).mean().backward()
        adam.step()
        model, state = plain.state_dict(), adam.state_dict()
        zero = ZeroRedundancyOptimizer(copy.deepcopy(plain).parameters(), torch.optim.AdamW)

        def changed(
            state: dict[str, Any] = state, number: int = 0, **values: Any
        ) -> dict[str, Any]:
            return {**state, "state": {**state["state"], number: values}}

        def of_class(name: str, given: Any = adam.param_groups) -> dict[str, Any]:
            fresh = [{"params": group["params"]} for group in given]
            found: dict[str, Any] = getattr(torch.optim, name)(fresh, lr=0.1).state_dict()
            return found

        cases: list[tuple[str, dict[str, Any]]] = [
            ("Missing key.*scale", {"model": {k: v for k, v in model.items() if k != "scale"}}),
            ("Unexpected key.*more", {"model": {**model, "more": torch.ones(1)}}),
            ("size mismatch for scale", {"model": {**model, "scale": torch.ones(3)}}),
            (r"class than AdamW: .*lacks amsgrad.*has momentum", {"optimizer": of_class("SGD")}),
            ("lacks amsgrad", {"optimizer": of_class("RAdam")}),
            ("its decoupled_weight_decay is False", {"optimizer": of_class("Adam")}),
            ("no 'state'", {"optimizer": {"param_groups": state["param_groups"]}}),
            ("all of it, Zero", {"optimizer": zero.optim.state_dict()}),
            ("in none of its groups", {"optimizer": changed(number=99)}),
            ("exp_avg of shape", {"optimizer": changed(exp_avg=torch.ones(2, 2))}),
        ]
        if kind == WHOLE:
            part = Training(world, STAGE_1).optimizer.state_dict()
            cases.append(("one rank's part of a pydist", {"optimizer": part}))
        for match, wrong in cases:
            with pytest.raises(pydist.InvalidUsage, match=match):
                pydist.checkpoint.from_torch(
                    {"model": model, "optimizer": state, **wrong},
                    model=training.model,
                    optimizer=training.optimizer,
                )
            for ours, theirs in zip(training.values(), before, strict=True):
                assert torch.equal(ours, theirs), match
        with pytest.raises(RuntimeError, match="consolidate"):
            zero.state_dict()
        training.run(range(2, 4))


def test_what_does_not_fit_changes_nothing(four: Ranks) -> None:
    four.run(refuse_what_does_not_fit, timeout=LIMIT_S)


class Blocks(torch.optim.Optimizer):
    """Keeps what is of blocks of elements, and cannot be tried out."""

    is_there = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.is_there:
            raise RuntimeError("on the GPU, please")
        for p in (p for group in self.param_groups for p in group["params"]):
            blocks = p.flatten().split(240)
            self.state[p]["scales"] = torch.stack([block.abs().max() for block in blocks])
            p.sub_(p.grad, alpha=0.1)


def refuse_blocks(folder: str) -> None:
    """What can't be cut is not saved, where some ranks have it, nor loaded into other shards."""
    rank, _ = joined()
    Blocks.is_there = False

    model = pydist.DataParallel(nn.Linear(10, 100, bias=False))
    linear = nn.Linear(10, 100)
    linear.weight.requires_grad_(False)
    frozen = pydist.DataParallel(linear)
    ours, waiting = (pydist.ShardedOptimizer(each, Blocks) for each in (model, frozen))
    whole = nn.Linear(10, 100, bias=False)
    theirs = Blocks(whole.parameters())
    Blocks.is_there = True
    for module, optimizer in ((model, ours), (whole, theirs)):
        module(torch.ones(1, 10)).sum().backward()
        optimizer.step()
    (part,) = ours.sharded_state().parameters["weight"].ranges
    assert part.values["scales"].numel() == (1 if rank == 3 else 2)
    text = r"Blocks keeps 'scales' for \d+ elements of parameter weight.*; use"
    for asynchronous in (False, True):
        with pytest.raises(pydist.InvalidUsage, match=text):
            pydist.save(f"{folder}/ours", model=model, optimizer=ours, asynchronous=asynchronous)
    assert not Path(folder, "ours").exists()

    # As it was cut, it stays good; and so it does where it is whole.
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    (again,) = ours.sharded_state().parameters["weight"].ranges
    assert torch.equal(again.values["scales"], part.values["scales"])
    pydist.save(f"{folder}/theirs", model=whole, optimizer=theirs)
    scales = theirs.state[whole.weight].pop("scales")
    pydist.load(f"{folder}/theirs", model=whole, optimizer=theirs)
    assert torch.equal(theirs.state[whole.weight]["scales"], scales)

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(pydist.InvalidUsage, match=text):
        pydist.load(f"{folder}/theirs", model=model, optimizer=ours)
    state, turned, held = ours.sharded_state(), ours.sharded_state(), waiting.sharded_state()
    turned.parameters["weight"].dims = (1, 0)
    for known in (state, turned, held):
        one = pydist.StateRange(0, 1000, {"scales": scales})
        known.parameters["weight"].ranges = [one]
        known.groups[0]["lr"] = 7.0
    for load in (
        lambda: ours.load_sharded_state(state),
        lambda: ours.load_sharded_state(turned),
        lambda: waiting.load_sharded_state(held),
    ):
        with pytest.raises(pydist.InvalidUsage, match="keeps 'scales' for 1000 elements"):
            load()
    assert ours.param_groups[0]["lr"] == waiting.param_groups[0]["lr"] == 0.1
    (again,) = ours.sharded_state().parameters["weight"].ranges
    assert torch.equal(again.values["scales"], part.values["scales"])
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new.detach())


def test_state_that_cannot_be_cut(four: Ranks, tmp_path: Path) -> None:
    four.run(refuse_blocks, str(tmp_path), timeout=LIMIT_S)


def change_precision(folder: str) -> None:
    """From 16 bits with float32 copies to float32 and back: nothing is rounded on the way."""
    _, size = joined()
    world: Any = pydist.new_group(range(size))
    first = Training(world, STAGE_1, dtype=torch.bfloat16)
    first.run(range(4))
    pydist.save(f"{folder}/short", **first.parts)
    masters = dcp_files.Contents(Path(f"{folder}/short"))
    for kind in (STAGE_2, WHOLE):
        wide = Training(world, kind, seed=1, dtype=torch.float32)
        wide.run(range(70, 71))
        pydist.load(f"{folder}/short", **wide.parts)
        for name, parameter in wide.model.named_parameters():
            entry = masters.tensor(f"optimizer.state.{name}.master")
            if entry is None:  # one that is frozen, or in float64
                continue
            flat = torch.empty(parameter.numel())
            masters.read_tensors([(f"optimizer.state.{name}.master", (0,), flat)])
            assert torch.equal(flat.sort().values, parameter.detach().reshape(-1).sort().values)
            assert not torch.equal(flat, flat.bfloat16().float())
        pydist.save(f"{folder}/wide", **wide.parts)
        again = Training(world, STAGE_2, seed=2, dtype=torch.bfloat16)
        again.run(range(70, 71))
        pydist.load(f"{folder}/wide", **again.parts)
        pydist.save(f"{folder}/again", **again.parts)
        pydist.barrier()
        before, after = (
            dcp_files.Contents(Path(f"{folder}/{name}")) for name in ("short", "again")
        )
        assert before.names == after.names
        for name in sorted(before.names):
            if (entry := before.tensor(name)) is not None:
                pair = [torch.empty(entry.size, dtype=entry.properties.dtype) for _ in range(2)]
                for contents, box in zip((before, after), pair, strict=True):
                    contents.read_tensors([(name, (0,) * box.dim(), box)])
                assert torch.equal(*pair), name
        pydist.barrier()
    # What was written into a parameter since is no rounding of its copy.
    with torch.no_grad():
        first.model.inside.weight.mul_(2.0)
    pydist.save(f"{folder}/written", **first.parts)
    wide = Training(world, STAGE_2, seed=1, dtype=torch.float32)
    pydist.load(f"{folder}/written", **wide.parts)
    assert torch.equal(wide.model.inside.weight, first.model.inside.weight.float())


def test_other_precision(four: Ranks, tmp_path: Path) -> None:
    four.run(change_precision, str(tmp_path), timeout=LIMIT_S)
