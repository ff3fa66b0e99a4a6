"""The file of what earlier jobs have found to be fastest: who reads and writes it, and when not."""

import json
import logging
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import rank_outcomes, run_ranks

import pydist
from pydist import _native
from pydist.config import tuning_file
from pydist.config.processor_name import processor_name
from pydist.config.tuning_file import Unusable
from pydist.errors import InvalidUsage

CLASS = {
    "kind": "all_reduce",
    "memory": "ordinary",
    "ranks": 2,
    "bytes": 1 << 20,
    "way": [1 << 17, False, False],
    "times_us": [[[1 << 17, False, False], 40.5], [[1 << 19, False, False], 52]],
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PYDIST_TUNING", raising=False)
    path = tuning_file.path()
    assert path.parent == tmp_path / "pydist"
    path.parent.mkdir()
    yield path
    _native.replace_tuning_table([])


def document(**changes: Any) -> dict[str, Any]:
    return {
        "format": tuning_file.FORMAT,
        "processor": processor_name(),
        "kernel": os.uname().release,
        "classes": [CLASS],
        **changes,
    }


@dataclass
class Learnt:
    """As `_native.TunedClass`, of this process's own times."""

    kind: str = "broadcast"
    memory: str = "ordinary"
    ranks: int = 2
    bytes: int = 1 << 22
    way: tuple[int, bool, bool] = (1 << 18, True, False)
    times_us: tuple[tuple[tuple[int, bool, bool], float], ...] = (
        ((1 << 18, True, False), 12.34567),
    )
    is_learnt: bool = True
    sends_too: bool = False


def known() -> list[tuple[str, int, int]]:
    return [(each.kind, each.bytes, each.way[0]) for each in _native.tuning_table()]


# -- one process


def test_without_a_file_there_is_nothing(file: Path) -> None:
    assert tuning_file.read() == []
    tuning_file.load()
    assert known() == []


def test_what_is_written_is_read(file: Path) -> None:
    file.write_text(json.dumps(document()))
    tuning_file.load()
    assert known() == [("all_reduce", 1 << 20, 1 << 17)]
    (each,) = _native.tuning_table()
    assert (each.memory, each.ranks, each.is_learnt) == ("ordinary", 2, False)
    assert each.way == (1 << 17, False, False)
    assert each.times_us == [((1 << 17, False, False), 40.5), ((1 << 19, False, False), 52.0)]


def test_messages_both_ways_are_told_apart(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receives = Learnt(kind="recv", way=(0, False, True))
    swaps = Learnt(kind="recv", way=(1 << 18, False, False), sends_too=True)
    monkeypatch.setattr(_native, "tuning_table", lambda: [receives, swaps])
    tuning_file.save(0)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent.parent))
    classes = json.loads(file.read_text())["classes"]
    assert [each.get("sends_too") for each in classes] == [None, True]
    tuning_file.load()
    assert [(each.sends_too, each.way) for each in _native.tuning_table()] == [
        (False, receives.way),
        (True, swaps.way),
    ]


def test_only_what_was_learnt_is_written(file: Path) -> None:
    file.write_text(json.dumps(document()))
    before = file.stat()
    tuning_file.load()
    tuning_file.save(0)
    assert file.stat() == before


def test_what_was_learnt_joins_what_is_known(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(json.dumps(document()))
    before = file.stat()
    faster = Learnt(**{**CLASS, "way": (1 << 16, False, False), "times_us": ()})
    monkeypatch.setattr(_native, "tuning_table", lambda: [Learnt(), faster])
    tuning_file.save(1)
    assert file.stat() == before
    tuning_file.save(0)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent.parent))
    tuning_file.load()
    assert known() == [("all_reduce", 1 << 20, 1 << 16), ("broadcast", 1 << 22, 1 << 18)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps(document())[:-20],
        json.dumps({"format": tuning_file.FORMAT}),
        json.dumps(document(format=0)),
        json.dumps(document(format=True)),
        json.dumps(document(format="7")),
        json.dumps(document(classes=[{**CLASS, "kind": "all_reduced"}])),
        json.dumps(document(classes=[{**CLASS, "memory": "none"}])),
        json.dumps(document(classes=[{**CLASS, "bytes": 1000}])),
        json.dumps(document(classes=[{**CLASS, "ranks": 1}])),
        json.dumps(document(classes=[{**CLASS, "way": [-1, False, False]}])),
        json.dumps(document(classes=[{**CLASS, "way": [1 << 40, False, False]}])),
        json.dumps(document(classes=[{**CLASS, "way": [1 << 17, False]}])),
        json.dumps(document(classes=[{**CLASS, "way": 7}])),
        json.dumps(document(classes=[{**CLASS, "times_us": [[1]]}])),
        json.dumps(document(classes=[{**CLASS, "times_us": [[[1 << 17, False, False], 10**400]]}])),
        json.dumps(
            document(classes=[{**CLASS, "times_us": [[[1 << 17, False, False], math.nan]]}])
        ),
        json.dumps(
            document(classes=[{**CLASS, "times_us": [[[1 << 17, False, False], math.inf]]}])
        ),
        json.dumps(document(classes=[{**CLASS, "times_us": [[[1 << 17, False, False], -1]]}])),
        json.dumps(document(classes=[{**CLASS, "sends_too": True}])),
        json.dumps(document(classes=[{**CLASS, "kind": "recv", "ranks": 3}])),
        json.dumps(document(classes={"a": 1})),
        json.dumps(document(processor="another one")),
        "[" * 100_000,
        " " * (1 << 20) + json.dumps(document()),
    ],
)
def test_a_damaged_file_is_said_and_replaced(
    file: Path,
    damaged: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file.write_text(damaged)
    with caplog.at_level(logging.INFO, "pydist"):
        tuning_file.load()
    assert known() == []
    (line,) = caplog.messages
    assert line.startswith(f"{file} is not read: ")
    monkeypatch.setattr(_native, "tuning_table", lambda: [Learnt()])
    tuning_file.save(0)
    assert [each["kind"] for each in json.loads(file.read_text())["classes"]] == ["broadcast"]


def test_a_file_of_an_older_version_is_replaced(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(json.dumps(document(format=tuning_file.FORMAT - 1)))
    with caplog.at_level(logging.INFO, "pydist"):
        tuning_file.load()
    assert known() == []
    (line,) = caplog.messages
    assert f"of format {tuning_file.FORMAT - 1}, that of an older pydist" in line
    monkeypatch.setattr(_native, "tuning_table", lambda: [Learnt()])
    tuning_file.save(0)
    assert json.loads(file.read_text())["format"] == tuning_file.FORMAT


def test_a_file_of_a_newer_version_stays(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"format": tuning_file.FORMAT + 1, "whatever": []})
    file.write_text(text)
    with caplog.at_level(logging.INFO, "pydist"):
        tuning_file.load()
        monkeypatch.setattr(_native, "tuning_table", lambda: [Learnt()])
        tuning_file.save(0)
    assert file.read_text() == text
    (line,) = caplog.messages
    assert f"of format {tuning_file.FORMAT + 1}, that of a newer pydist" in line


def test_a_file_that_others_can_write_is_not_read(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(json.dumps(document()))
    for mode in (0o666, 0o660):
        file.chmod(mode)
        tuning_file.load()
    file.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        tuning_file.load()
        patch.setattr(_native, "tuning_table", lambda: [Learnt()])
        tuning_file.save(0)
    assert known() == []
    assert json.loads(file.read_text()) == document()
    assert [("others than this process's user" in line) for line in caplog.messages] == [True] * 3


def test_without_a_home_nothing_is_kept(
    file: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_native, "tuning_table", lambda: [Learnt()])
    before = sorted(tmp_path.iterdir())
    tuning_file.load()
    tuning_file.save(0)
    (line,) = caplog.messages
    assert "this user has no home folder; XDG_CACHE_HOME names another" in line
    assert sorted(tmp_path.iterdir()) == before


def test_a_fault_while_writing_is_one_line_of_the_log(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflows(_: object) -> None:
        raise OverflowError("int too large")

    monkeypatch.setattr(_native, "tuning_table", lambda: [Learnt()])
    monkeypatch.setattr(tuning_file, "_write", overflows)
    tuning_file.save(0)
    (line,) = caplog.messages
    assert line == f"{file} is not written: OverflowError('int too large')."


def test_links_and_folders_are_not_read(file: Path) -> None:
    target = file.with_name("target")
    target.write_text(json.dumps(document()))
    file.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        tuning_file.read()
    file.unlink()
    file.mkdir()
    with pytest.raises((Unusable, IsADirectoryError)):
        tuning_file.read()


def test_a_folder_that_cannot_be_written_is_said(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    monkeypatch.setattr(_native, "tuning_table", lambda: [Learnt()])
    with caplog.at_level(logging.INFO, "pydist"):
        tuning_file.load()
        tuning_file.save(0)
    (line,) = caplog.messages
    assert line.startswith("/proc/nothing/pydist/tuning-")
    assert "is not written: " in line


@pytest.mark.parametrize("mode", ["uncached", "off"])
def test_a_job_without_the_file(file: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(json.dumps(document()))
    before = file.stat()
    monkeypatch.setenv("PYDIST_TUNING", mode)
    _native.replace_tuning_table([_native.TunedClass(**CLASS)])  # of a job before
    tuning_file.load()
    assert known() == []
    monkeypatch.setattr(_native, "tuning_table", lambda: [Learnt()])
    tuning_file.save(0)
    assert file.stat() == before


# -- what is pinned


def test_what_the_user_says_is_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(size: int, kind: str = "all_reduce") -> list[tuple[int, bool, bool]]:
        return _native.tuning_candidates(kind, "ordinary", 2, size)

    for name in ("PYDIST_CHUNK_BYTES", "PYDIST_ONE_SHOT_BYTES", "PYDIST_SINGLE_COPY"):
        monkeypatch.delenv(name, raising=False)
    kib = 1024
    assert ways(256 * kib) == [
        (256 * kib, False, False),
        (0, False, False),
        (64 * kib, False, False),
        (128 * kib, False, False),
    ]
    in_pieces = [(size * kib, True, False) for size in (512, 64, 128, 256)]
    assert ways(64 << 20) == in_pieces
    single = (0, True, True)
    assert ways(64 << 20, "all_gather") == [*in_pieces, single]
    assert ways(128 * kib, "all_gather")[0] == (128 * kib, False, False)
    assert single not in ways(64 << 20, "broadcast")
    monkeypatch.setenv("PYDIST_SINGLE_COPY", "off")
    assert ways(64 << 20, "all_gather") == in_pieces
    monkeypatch.setenv("PYDIST_ONE_SHOT_BYTES", "65536")
    assert ways(64 * kib) == [(0, False, False)]
    assert (0, False, False) not in ways(256 * kib)
    monkeypatch.setenv("PYDIST_CHUNK_BYTES", "524288")
    assert ways(256 * kib) == [(512 * kib, False, False)]
    assert ways(64 << 20) == [(512 * kib, True, False)]


def test_a_misspelt_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDIST_TUNING", "of")
    with pytest.raises(InvalidUsage, match="PYDIST_TUNING='of' is not valid; use one of: on, unca"):
        _native.read_environment()


def _join_with(name: str, values: tuple[str, str]) -> None:
    os.environ[name] = values[int(os.environ["RANK"])]
    pydist.init("native")


@pytest.mark.parametrize(
    ("name", "values"),
    [("PYDIST_TUNING", ("on", "off")), ("PYDIST_CHUNK_BYTES", ("", "524288"))],
)
def test_ranks_that_are_set_otherwise_do_not_meet(name: str, values: tuple[str, str]) -> None:
    for outcome in rank_outcomes(_join_with, 2, name, values):
        assert outcome.error == "Mismatch"
        assert name in outcome.message


# -- jobs


def _reduce_often(calls: int) -> tuple[list[tuple[str, int, int]], float]:
    pydist.init("native")
    began_with = [(each.kind, each.bytes, each.way[0]) for each in _native.tuning_table()]
    values = torch.ones(200_000)
    total = 0.0
    for _ in range(calls):
        total += float(pydist.all_reduce(values.fill_(1.0))[0])
    pydist.shutdown()
    return began_with, total


def test_a_job_begins_with_what_the_one_before_has_found(tmp_path: Path) -> None:
    env: dict[str, str | None] = {"XDG_CACHE_HOME": str(tmp_path)}
    (began_with, total), *_ = run_ranks(_reduce_often, 2, 200, env=env)
    assert (began_with, total) == ([], 400.0)
    (file,) = (tmp_path / "pydist").iterdir()
    (found,) = json.loads(file.read_text())["classes"]
    assert (found["kind"], found["ranks"], found["bytes"]) == ("all_reduce", 2, 1 << 20)
    timed = {way[0] for way, time_us in found["times_us"] if time_us > 0}
    assert timed == {64 << 10, 128 << 10, 256 << 10, 512 << 10}
    assert found["way"][0] in timed
    for began_with, _ in run_ranks(_reduce_often, 2, 1, env=env):
        assert began_with == [("all_reduce", 1 << 20, found["way"][0])]


def _swap_often(calls: int) -> list[tuple[str, bool, tuple[int, bool, bool]]]:
    pydist.init("native")
    table = [(each.kind, each.sends_too, each.way) for each in _native.tuning_table()]
    rank, mine, theirs = pydist.rank(), torch.empty(1 << 18), torch.empty(1 << 18)
    for time in range(calls):
        sending = pydist.send(mine.fill_(2 * time + rank), 1 - rank, async_op=True)
        pydist.recv(theirs, 1 - rank)
        sending.wait()
        assert bool((theirs == 2 * time + 1 - rank).all()), time
    pydist.shutdown()
    return table


def test_a_job_begins_with_how_messages_were_quickest(tmp_path: Path) -> None:
    env: dict[str, str | None] = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run_ranks(_swap_often, 2, 400, env=env) == [[], []]
    (file,) = (tmp_path / "pydist").iterdir()
    (found,) = json.loads(file.read_text())["classes"]
    assert (found["kind"], found["bytes"], found["sends_too"]) == ("recv", 1 << 20, True)
    ways = [[128 << 10, False, False], [0, False, True]]
    assert sorted(way for way, _ in found["times_us"]) == sorted(ways)
    for table in run_ranks(_swap_often, 2, 1, env=env):
        assert table == [("recv", True, tuple(found["way"]))]


def test_jobs_that_are_not_tuned_leave_no_file(tmp_path: Path) -> None:
    for mode in ("uncached", "off"):
        run_ranks(
            _reduce_often, 2, 200, env={"XDG_CACHE_HOME": str(tmp_path), "PYDIST_TUNING": mode}
        )
    assert list(tmp_path.iterdir()) == []
