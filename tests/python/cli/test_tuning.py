"""`pydist info --tuning`."""

import json
import os
from pathlib import Path

import pytest

from pydist.cli import main
from pydist.config import tuning_file
from pydist.config.processor_name import processor_name


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PYDIST_TUNING", "PYDIST_CHUNK_BYTES", "PYDIST_ONE_SHOT_BYTES"):
        monkeypatch.delenv(name, raising=False)
    path = tuning_file.path()
    path.parent.mkdir()
    path.write_text(
        json.dumps(
            {
                "format": tuning_file.FORMAT,
                "processor": processor_name(),
                "kernel": os.uname().release,
                "classes": [
                    {
                        "kind": "all_reduce",
                        "memory": "ordinary",
                        "ranks": 2,
                        "bytes": 1 << 18,
                        "way": [1 << 17, False, False],
                        "times_us": [
                            [[1 << 17, False, False], 18.5],
                            [[1 << 18, False, False], 29.6],
                            [[0, False, False], 24],
                        ],
                    },
                    {
                        "kind": "broadcast",
                        "memory": "symmetric",
                        "ranks": 4,
                        "bytes": 1 << 23,
                        "way": [0, True, False],
                        "times_us": [],
                    },
                    {
                        "kind": "all_gather",
                        "memory": "ordinary",
                        "ranks": 2,
                        "bytes": 1 << 19,
                        "way": [0, False, True],
                        "times_us": [[[0, False, True], 26.5]],
                    },
                    {
                        "kind": "all_reduce",
                        "memory": "shared",
                        "ranks": 2,
                        "bytes": 1 << 22,
                        "way": [0, False, True],
                        "times_us": [[[0, False, True], 87.5], [[0, True, True], 170]],
                    },
                    {
                        "kind": "recv",
                        "memory": "ordinary",
                        "ranks": 2,
                        "bytes": 1 << 20,
                        "way": [1 << 18, False, False],
                        "times_us": [[[1 << 18, False, False], 43.5], [[0, False, True], 82]],
                        "sends_too": True,
                    },
                ],
            }
        )
    )
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["info", "--tuning", *arguments]) == 0
    return capsys.readouterr().out


def row_with(text: str, output: str) -> str:
    (row,) = [" ".join(line.split()) for line in output.splitlines() if text in line]
    return row


def test_what_is_known_and_what_there_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys)
    assert f"PYDIST_TUNING=on: ranks begin with what {file} tells." in output
    assert row_with("18.5", output) == (
        "all_reduce ordinary 2 256 KiB pieces of 128 KiB 18.5 "
        "one shot: 24 us; pieces of 256 KiB: 29.6 us"
    )
    assert row_with("broadcast", output) == "broadcast symmetric 4 8 MiB streaming stores"
    assert row_with("26.5", output) == "all_gather ordinary 2 512 KiB single copies 26.5"
    assert row_with("87.5", output) == (
        "all_reduce shared 2 4 MiB in place 87.5 in place, streaming stores: 170 us"
    )
    assert row_with("43.5", output) == (
        "recv, both send ordinary 2 1 MiB pieces of 256 KiB 43.5 single copies: 82 us"
    )
    assert row_with("64 MiB", output).startswith("64 MiB pieces of 512 KiB, streaming stores; ")


def test_the_same_for_programs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(printed(capsys, "--json"))
    assert (report["tuning"], report["file"], report["problem"]) == ("on", str(file), None)
    assert [(each["kind"], each["way"]) for each in report["known"]] == [
        ("all_reduce", [1 << 17, False, False]),
        ("broadcast", [0, True, False]),
        ("all_gather", [0, False, True]),
        ("all_reduce", [0, False, True]),
        ("recv", [1 << 18, False, False]),
    ]
    assert [each["sends_too"] for each in report["known"]] == [False] * 4 + [True]
    assert {each["bytes"] for each in report["candidates"]} >= {1 << 14, 1 << 20, 1 << 26}


def test_a_file_that_cannot_be_used(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("{")
    assert f"{file} is not used: it is damaged" in printed(capsys)
    file.unlink()
    assert f"nothing has been found yet that {file} would tell." in printed(capsys)


def test_what_is_switched_off(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYDIST_TUNING", "off")
    assert printed(capsys) == "PYDIST_TUNING=off: everything goes the usual way.\n"
    monkeypatch.setenv("PYDIST_TUNING", "uncached")
    output = printed(capsys)
    assert "begin with nothing" in output
    assert "18.5" not in output
    monkeypatch.setenv("PYDIST_CHUNK_BYTES", "131072")
    assert row_with("1 MiB", printed(capsys)) == "1 MiB pieces of 128 KiB"


def test_one_table_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--tuning", "--topology"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err
