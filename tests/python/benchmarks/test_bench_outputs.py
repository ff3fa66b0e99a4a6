"""Files that benchmarks leave: whole or not at all, and refused before anything is measured."""

import json
import os
import stat
from pathlib import Path

import pytest

import pydist
from pydist.benchmarks.outputs import json_text, require_writable, write_text_whole


def test_a_file_is_written_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    require_writable(path)
    assert list(tmp_path.iterdir()) == []
    write_text_whole(path, "one")
    require_writable(path)
    assert path.read_text() == "one"
    write_text_whole(path, "two")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    path.write_text("earlier")

    def is_full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", is_full)
    monkeypatch.setattr(Path, "replace", is_full)
    with pytest.raises(pydist.Error, match=r"results\.json can't be written: No space left"):
        write_text_whole(path, "later")
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "results.json", tmp_path / "link.json"
    link.symlink_to(target)
    require_writable(link)
    write_text_whole(link, "through")
    assert link.is_symlink()
    assert target.read_text() == "through"


def test_new_files_have_the_permissions_of_any_other(tmp_path: Path) -> None:
    usual, path = tmp_path / "usual", tmp_path / "results.json"
    usual.write_text("")
    write_text_whole(path, "")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)


def test_streams_are_written_to() -> None:
    require_writable(Path("/dev/null"))
    write_text_whole(Path("/dev/null"), "gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".", "is a folder"),
        ("missing/results.json", "there is no folder"),
        ("file/results.json", "there is no folder"),
        ("x" * 300, "name too long"),
    ],
)
def test_what_cant_be_written_is_refused(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pydist.InvalidUsage) as refused:
        require_writable(tmp_path / name)
    assert said in str(refused.value).replace("N", "n")
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_json_that_every_reader_takes() -> None:
    assert json.loads(json_text({"ratio": 0.5})) == {"ratio": 0.5}
    with pytest.raises(ValueError, match="JSON compliant"):
        json_text({"ratio": float("nan")})
