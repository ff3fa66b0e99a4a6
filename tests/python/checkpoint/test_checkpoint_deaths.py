"""A process that dies while it saves, and damage to what is on the disk."""

import os
import re
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forged_checkpoint import write_as_before
from launch import Ranks
from saved_training import LIMIT_S, STAGE_2, Training
from torch import nn
from training import joined

import pydist
import pydist.checkpoint.dcp_files as dcp_files
from pydist.checkpoint.manifest import MANIFEST

pytestmark = pytest.mark.timeout(60)


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
