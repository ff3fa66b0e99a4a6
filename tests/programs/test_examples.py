"""The examples: the same losses with any number of processes, and after an interruption.

Most are run by ranks that are forked with torch loaded; one by a command as in README, which loads
torch in each process.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch import run_command
from tiny_gpt import EXAMPLES, TINY, near, run_example, train_gpt

pytestmark = pytest.mark.timeout(60)


def run_by_command(name: str, processes: int, *arguments: str) -> None:
    launcher = [sys.executable, "-m", "pydist", "run", "-n", str(processes)]
    done = run_command(
        [*launcher, str(EXAMPLES / name), *arguments],
        timeout=50,
        # One thread each: more would wait for each other by spinning, which takes tens of times as
        # long on a machine that is busy with other tests.
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def gpt_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("gpt")
    return folder, train_gpt(folder, 1)


def test_gpt_learns_and_leaves_its_results(gpt_alone: tuple[Path, list[float]]) -> None:
    folder, losses = gpt_alone
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.2
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("def ")
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    ("processes", "backend"),
    [
        (2, "native"),
        pytest.param(4, "native", marks=pytest.mark.thorough),
        pytest.param(2, "gloo", marks=pytest.mark.thorough),
    ],
)
def test_gpt_trains_the_same_on_any_number_of_processes(
    gpt_alone: tuple[Path, list[float]], tmp_path: Path, processes: int, backend: str
) -> None:
    losses = train_gpt(tmp_path, processes, backend=backend)
    assert len(losses) == 12
    assert losses == near(gpt_alone[1], 12)


@pytest.mark.thorough
def test_gpt_resumes_as_if_nothing_had_happened(
    gpt_alone: tuple[Path, list[float]], tmp_path: Path
) -> None:
    assert train_gpt(tmp_path, 1, "--stop-at", "5") == gpt_alone[1][:5]
    assert train_gpt(tmp_path, 1, "--resume") == gpt_alone[1]


def test_gpt_resumes_on_another_number_of_processes(
    gpt_alone: tuple[Path, list[float]], tmp_path: Path
) -> None:
    train_gpt(tmp_path, 2, "--stop-at", "5")
    # Three do not divide the batch.
    assert train_gpt(tmp_path, 3, "--resume") == near(gpt_alone[1], 12)


@pytest.mark.thorough
def test_gpt_refuses_a_checkpoint_of_another_run(gpt_alone: tuple[Path, list[float]]) -> None:
    folder, _ = gpt_alone
    arguments = [str(EXAMPLES / "train_gpt.py"), "--output", str(folder), "--resume", *TINY]
    done = run_command([sys.executable, *arguments, "--seed", "1"], timeout=50)
    assert done.returncode != 0
    assert "seed=1 (there: 0)" in done.stderr


@pytest.fixture(scope="module")
def digits_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return learn_digits(tmp_path_factory.mktemp("digits"), 1)


def learn_digits(
    folder: Path, processes: int, *arguments: str, run: Callable[..., None] = run_example
) -> dict[str, Any]:
    run("digits.py", processes, "--output", str(folder / "digits.json"), *arguments)
    result: dict[str, Any] = json.loads((folder / "digits.json").read_text())
    return result


def test_digits_are_learned_within_two_epochs(tmp_path: Path) -> None:
    assert learn_digits(tmp_path, 2, "--epochs", "2")["accuracy"] >= 0.9


@pytest.mark.thorough
def test_digits_are_read(digits_alone: dict[str, Any]) -> None:
    assert digits_alone["accuracy"] >= 0.97


@pytest.mark.thorough
def test_digits_train_the_same_on_several_processes(
    digits_alone: dict[str, Any], tmp_path: Path
) -> None:
    result = learn_digits(tmp_path, 4, run=run_by_command)
    assert result["losses"][:20] == near(digits_alone["losses"], 20)
    assert result["accuracy"] >= 0.97
    # Hundreds of steps later too it is the same training, if not to the last digit.
    assert result["losses"] == pytest.approx(digits_alone["losses"], abs=0.02)


@pytest.mark.thorough
def test_digits_resume_amid_an_epoch_on_another_number_of_processes(
    digits_alone: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = ("--checkpoint", str(tmp_path / "digits"), "--epochs", "1")
    run_example("digits.py", 2, *checkpoint, "--stop-at", "10")
    result = learn_digits(tmp_path, 3, *checkpoint)  # three do not divide the batch
    assert len(result["losses"]) == 22
    assert result["losses"] == near(digits_alone["losses"], 22)


def train_clip(folder: Path, processes: int, *arguments: str) -> dict[str, Any]:
    output = folder / "clip.json"
    run_example("clip.py", processes, "--output", str(output), *arguments)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


# Neither two nor four divide it evenly.
PAIRS = ("--batch", "31", "--steps", "12")


@pytest.fixture(scope="module")
def clip_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses: list[float] = train_clip(tmp_path_factory.mktemp("clip"), 1, *PAIRS, "--plain")[
        "losses"
    ]
    assert len(losses) == 12
    return losses


@pytest.mark.parametrize(
    ("processes", "arguments"),
    [
        (1, ()),
        (2, ()),
        (4, ("--plain",)),
        pytest.param(4, (), marks=pytest.mark.thorough),
        pytest.param(2, ("--plain",), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_clip_trains_the_same_on_any_number_of_processes(
    clip_alone: list[float], tmp_path: Path, processes: int, arguments: tuple[str, ...]
) -> None:
    assert train_clip(tmp_path, processes, *PAIRS, *arguments)["losses"] == near(clip_alone, 12)


def test_clip_names_what_it_sees(tmp_path: Path) -> None:
    result = train_clip(tmp_path, 2, "--steps", "120")
    assert result["losses"][-1] < 1
    assert result["accuracy"] > 0.8


def test_the_pipeline_trains_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    losses = []
    for processes in (1, 2, 4):
        output = tmp_path / f"{processes}.json"
        run_example("pipeline.py", processes, "--output", str(output))
        losses.append(json.loads(output.read_text())["losses"])
    assert len(losses[0]) == 30
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-12)] * 2
