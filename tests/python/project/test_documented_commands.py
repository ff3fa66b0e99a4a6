"""The commands that nobody can run without a GPU: what they name is there."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from gpu_parts import PARTS
from launch import run_command

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "docs" / name for name in ("gpu.md", "cuda_kernels.md")]
# Where they stand: in the docs, and in the parts of `make test-gpu`.
COMMANDS = [page.read_text() for page in PAGES]
COMMANDS += [step.command for part in PARTS for step in part.steps]
# Each ends where its line, its cell, or the code does, or where a comment begins.
TEXTS = [
    command.strip()
    for text in COMMANDS
    for command in re.findall(r"python ((?:-m pytest|bench/)[^`#\n]*)", text)
]

# Prints how many tests each command selects; what it names is collected once for all.
COLLECT = """
import json, sys, pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

class Keep:
    def pytest_collection_modifyitems(self, items):
        self.items = list(items)

keep = Keep()
commands = json.loads(sys.argv[1])
files = sorted({file for command in commands for file in command["files"]})
status = pytest.main([*files, "--collect-only", "-q"], plugins=[keep])
print(json.dumps([status, [
    sum(
        item.nodeid.split("::")[0] in command["files"]
        and (not command["k"]
             or Expression.compile(command["k"]).evaluate(KeywordMatcher.from_item(item)))
        for item in keep.items
    )
    for command in commands
]]))
"""


def test_every_pytest_command_selects_tests() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+")
    parser.add_argument("-k", default="")
    parser.add_argument("-p")
    parser.add_argument("-rs", action="store_true")
    texts = [text for text in TEXTS if text.startswith("-m pytest") and "tests/" in text]
    commands = [vars(parser.parse_args(shlex.split(text)[2:])) for text in texts]
    assert len(commands) > 10
    done = run_command([sys.executable, "-c", COLLECT, json.dumps(commands)], cwd=ROOT)
    status, counts = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stdout
    assert [text for text, count in zip(texts, counts, strict=True) if count == 0] == []


def test_docs_name_the_parts_of_test_gpu() -> None:
    table = re.findall(
        r"^\| (\d+) \| (.*) \| [^|]* \|$", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE
    )
    assert table == [(str(number), part.what) for number, part in enumerate(PARTS, 1)]


def test_every_script_is_there() -> None:
    scripts = [ROOT / text.split()[0] for text in TEXTS if text.startswith("bench/")]
    text = "\n".join(COMMANDS)
    scripts += [ROOT / name for name in re.findall(r"pydist run [^`\n]*?(\S+\.py)", text)]
    assert len(scripts) > 5
    assert [script for script in scripts if not script.is_file()] == []
