"""`pydist bench tune`: what it takes of what it measured, and small runs."""

import json
import math
import sys
from pathlib import Path

import pytest
from launch import run_command

import pydist
from pydist.benchmarks.noise import Ratio
from pydist.benchmarks.tune import (
    CANDIDATES,
    NEVER,
    Compared,
    Rounds,
    Settings,
    best,
    compare,
    tune,
)
from pydist.cli import main

# -- what is taken


def test_choices_are_compared_with_the_first_turn_of_their_round() -> None:
    # The machine is twice as slow in the second round.
    rounds: Rounds = [
        [[1.0, 10.0], [0.5, 10.0], [2.0, 20.0]],
        [[2.0, 20.0], [1.0, 20.0], [4.0, 40.0]],
    ]
    faster, slower = compare([{}, {"sockets": 1}, {"sockets": 4}], rounds)
    assert faster.settings == {"sockets": 1}
    assert faster.ratio.median == pytest.approx(0.5**0.5)
    assert [ratio.median for ratio in faster.by_size] == [0.5, 1.0]
    assert slower.ratio.median == pytest.approx(2.0)


def of(settings: Settings, median: float, high: float) -> Compared:
    return Compared(settings, Ratio(median, median / 2, high), [])


def test_the_best_is_what_is_surely_faster() -> None:
    assert best([of({}, 0.5, 1.01), of({}, 1.2, 1.3)]) is None
    assert best([of({"a": 1}, 0.9, 0.95), of({"a": 2}, 0.8, 0.99), of({}, 0.5, 1.0)]) == of(
        {"a": 2}, 0.8, 0.99
    )


def times(by_value: dict[str, dict[int, float]]) -> tuple[list[str], list[list[Settings]]]:
    """What is said of each variable, and asked for, where values take such shares of the time."""
    said, asked = [], []

    def share_of(choice: Settings) -> float:
        return math.prod(by_value.get(name, {}).get(v, 1.1) for name, v in choice.items())

    def measure(choices: list[Settings], what: str) -> list[Compared]:
        said.append(what)
        asked.append(choices)
        first = share_of(choices[0])
        shares = [share_of(choice) / first for choice in choices[1:]]
        return [of(*each, each[1] * 1.01) for each in zip(choices[1:], shares, strict=True)]

    taken, ratio = tune(list(CANDIDATES), measure, lambda name, compared: None)
    assert (ratio is None) == (taken == {})
    said.append(str(taken))
    return said, asked


def test_each_variable_is_tried_with_what_was_taken_before() -> None:
    said, asked = times({"sockets": {4: 0.9}, "chunk_bytes": {131072: 0.8}})
    assert said == [*CANDIDATES, "all together", "{'sockets': 4, 'chunk_bytes': 131072}"]
    assert asked[1][:2] == [{"sockets": 4}, {"sockets": 4, "chunk_bytes": 131072}]
    # No one shot is larger than a chunk.
    sizes = [choice["one_shot_bytes"] for choice in asked[2][1:]]
    assert sizes == [value for value in CANDIDATES["one_shot_bytes"] if value <= 131072]
    assert asked[-1] == [{}, {"sockets": 4, "chunk_bytes": 131072}]


def test_what_goes_in_rounds_is_not_tried_where_nothing_does() -> None:
    said, asked = times({"rounds_from": {NEVER: 0.9}})
    assert said[-3:] == ["rounds_from", "all together", str({"rounds_from": NEVER})]
    assert len(asked) == len(CANDIDATES)


def test_nothing_is_taken_where_nothing_is_faster() -> None:
    said, _ = times({})
    assert said == [*CANDIDATES, "{}"]


# -- small runs

SMALL = ["tune", "-b", "4K", "-e", "16K", "--seconds", "0.01", "--no-pin"]


def measured(command: list[str], folder: Path) -> tuple[pydist.Config, dict[str, object]]:
    files = ["--output", str(folder / "tuned.toml"), "--json", str(folder / "tuned.json")]
    done = run_command([*command, *SMALL, *files])
    assert done.returncode == 0, done.stderr
    text = (folder / "tuned.toml").read_text()
    assert text in done.stdout
    report = json.loads((folder / "tuned.json").read_text())
    assert report["complete"]
    return pydist.Config.from_file(folder / "tuned.toml"), report["results"]


def test_a_run_leaves_a_configuration(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pydist", "bench"]
    config, results = measured(command, tmp_path)
    assert config["engine"] == results["engine"]
    assert "sockets" not in results  # on one host there are none
    assert "rounds_from" not in results
    assert isinstance(results["chunk_bytes"], list)
    assert len(results["chunk_bytes"]) == len(CANDIDATES["chunk_bytes"])


ON_HOSTS_OF_ONE = """
import os, sys
os.environ["PYDIST_HOST_ID"] = os.environ["RANK"]
from pydist.cli import main
sys.exit(main(["bench", *sys.argv[1:]]))
"""


@pytest.mark.thorough  # the run of one host is an everyday test
def test_a_run_under_a_launcher_tries_sockets_and_rounds_between_hosts(tmp_path: Path) -> None:
    program = tmp_path / "on_hosts_of_one.py"
    program.write_text(ON_HOSTS_OF_ONE)
    config, results = measured(
        [sys.executable, "-m", "pydist", "run", "-n", "3", str(program)], tmp_path
    )
    assert config["engine"] == results["engine"]
    assert isinstance(results["sockets"], list)
    assert isinstance(results["rounds_bytes"], list)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "1"], "one rank exchanges nothing"),
        (["-b", "2"], "needs 4 bytes or more"),
        (["--output", "/none/tuned.toml"], "there is no folder /none"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tune", *arguments]) == 2
    assert message in capsys.readouterr().err
