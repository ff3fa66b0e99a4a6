"""What make does again, and when."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make"),
]


class Builds:
    """`make build` into a folder of its own, with a Python that only takes down its calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls = folder / "calls"
        (folder / "venv" / "bin").mkdir(parents=True)
        self._write("venv/bin/python", f'echo "$@" >>"{self._calls}"')

    def _write(self, name: str, script: str) -> None:
        (self._folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (self._folder / name).chmod(0o755)

    def compiles(self, *, has_googletest: bool) -> list[str]:
        """What it says of the C++ tests each time that it compiles."""
        self._calls.write_text("")
        # It is asked for GoogleTest's headers, and nothing else here.
        self._write("compiler", f"cat >/dev/null; exit {0 if has_googletest else 1}")
        subprocess.run(
            [
                *("make", "build", f"OUT={self._folder}/build", f"VENV={self._folder}/venv"),
                f"CXX={self._folder}/compiler",
            ],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if "MAKE" not in name},
            check=True,
            capture_output=True,
        )
        return [
            word.removeprefix("cmake.define.PYDIST_BUILD_TESTS=")
            for call in self._calls.read_text().splitlines()
            if "--editable" in call
            for word in call.split()
            if "PYDIST_BUILD_TESTS" in word
        ]


def test_googletest_installed_after_a_build_is_noticed(tmp_path: Path) -> None:
    builds = Builds(tmp_path)
    assert builds.compiles(has_googletest=False) == ["OFF"]
    assert builds.compiles(has_googletest=False) == []
    assert builds.compiles(has_googletest=True) == ["ON"]
    assert builds.compiles(has_googletest=True) == []
