"""`pydist.monitor`: what a job of several ranks writes, and that it neither waits nor fails."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch import Ranks, clean_environment, rank_outcomes, run_command, run_ranks
from time_limit import PATIENCE
from torch import nn

import pydist
from pydist.gpu.late_number import LateNumber
from pydist.job.log import logger

pytestmark = pytest.mark.timeout(90)

Lines = list[dict[str, Any]]


def lines_of(folder: Path) -> Lines:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def train(folder: str, counts: list[int], every: int = 3) -> tuple[list[list[float]], int]:
    """Trains on each rank, and monitors as many steps as told.

    Returns the weights at the end, and the bytes that were averaged on this rank.
    """
    pydist.init()
    rank = pydist.rank()
    torch.manual_seed(0)
    model = pydist.DataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pydist.monitor(
        folder, model=model, config={"lr": 0.1, "of": object()}, every=every
    ) as monitor:
        for step in range(1, max(counts) + 1):
            inputs = torch.full((rank + 1, 4), float(step + rank))
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step <= counts[rank]:
                monitor.step(loss=loss, samples=rank + 1, own=float(rank))
    return model.module.weight.tolist(), model.stats().bytes


def train_alone() -> list[list[float]]:
    """The same without a monitor."""
    pydist.init()
    rank = pydist.rank()
    torch.manual_seed(0)
    model = pydist.DataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 9):
        loss = model(torch.full((rank + 1, 4), float(step + rank))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.module.weight.tolist()  # type: ignore[no-any-return]


def test_a_line_for_each_step_with_the_numbers_of_all_ranks(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        trained = ranks.run(train, str(tmp_path / "a"), [8, 8])
        assert ranks.run(train_alone) == [weights for weights, _ in trained]
    lines = lines_of(tmp_path / "a")
    assert [line["step"] for line in lines] == list(range(1, 9))
    for line in lines:
        assert line["samples"] == 3
        # Rank 0 has one sample, rank 1 two: the mean is that of the samples.
        assert line["values"]["own"] == pytest.approx(2 / 3)
        assert line["samples_per_s"] == pytest.approx(3 / line["step_s"], rel=1e-4)
        assert min(line["ranks"]["lag_s"]) == 0 <= max(line["ranks"]["lag_s"])
        assert all(0 <= share <= 1 for share in line["ranks"]["waiting_share"])
    assert [line["elapsed_s"] for line in lines] == sorted(line["elapsed_s"] for line in lines)
    assert sum(line["bytes"] for line in lines) == sum(moved for _, moved in trained) > 0
    # Memory comes with the last step of a chunk, of the first, the last, and once a second.
    with_memory = [line["step"] for line in lines if "rss_bytes" in line["ranks"]]
    assert with_memory in ([3, 8], [3, 6, 8])
    for now, peak in zip(
        lines[2]["ranks"]["rss_bytes"], lines[2]["ranks"]["peak_rss_bytes"], strict=True
    ):
        assert 10**7 < now <= peak
    (start,) = json.loads((tmp_path / "a" / "config.json").read_text())["starts"]
    # No two runs would have that at the same address.
    assert start["config"] == {"lr": 0.1, "of": "<object object>"}
    assert start["world_size"] == 2
    assert "PYDIST_JOB_SECRET" not in start["variables"]


def lag(folder: str) -> None:
    """Rank 1 works longer in every step, and all wait for it."""
    pydist.init()
    model = pydist.DataParallel(nn.Linear(2, 2))
    with pydist.monitor(folder, model=model, every=2) as monitor:
        for _ in range(4):
            if pydist.rank() == 1:
                time.sleep(0.2)  # work that takes a known time
            model(torch.ones(1, 2)).sum().backward()
            monitor.step(samples=1)


def test_the_slow_rank_is_told_and_who_waits_for_it(tmp_path: Path) -> None:
    run_ranks(lag, 2, str(tmp_path / "a"))
    told = [line["ranks"] for line in lines_of(tmp_path / "a")]
    # Of all steps together: on a busy machine rank 0 may be the late one in any of them.
    lags, waiting = (
        [sum(ranks[key][rank] for ranks in told) for rank in range(2)]
        for key in ("lag_s", "waiting_share")
    )
    assert lags[0] < lags[1]
    assert waiting[0] > waiting[1]


@pytest.mark.parametrize("counts", [[8, 2], [8, 0], [4, 8]])
def test_a_rank_that_takes_fewer_steps_holds_up_nobody(tmp_path: Path, counts: list[int]) -> None:
    run_ranks(train, 2, str(tmp_path / "a"), counts, 2)
    lines = lines_of(tmp_path / "a")
    assert [line["step"] for line in lines] == list(range(1, counts[0] + 1))
    told = [line["step"] for line in lines if line["ranks"]["step_s"][1] is not None]
    assert told == list(range(1, min(counts) + 1))


def fail_amid(folder: str) -> None:
    pydist.init()
    with pydist.monitor(folder, every=4) as monitor:
        for step in range(6):
            monitor.step(loss=float(step))
        raise ValueError("of the program")


def test_a_program_that_raises_keeps_its_error_and_its_lines(tmp_path: Path) -> None:
    for outcome in rank_outcomes(fail_amid, 2, str(tmp_path / "a")):
        assert (outcome.error, outcome.message) == ("ValueError", "of the program")
    assert [line["step"] for line in lines_of(tmp_path / "a")] == [1, 2, 3, 4, 5, 6]


def disagree(folder: str, name: str, values: list[Any]) -> None:
    pydist.init()
    pydist.monitor(folder, **{name: values[pydist.rank()]})


@pytest.mark.parametrize(
    ("name", "values", "error", "text"),
    [
        ("every", [2, 3], "Mismatch", "every is 2 on rank 0 and 3 on rank 1"),
        ("first_step", [5, None], "Mismatch", "first_step is 5 on rank 0 and None on rank 1"),
        ("every", [0, 1], "InvalidUsage", "every=0"),
        ("config", [{}, 7], "InvalidUsage", "config=) is an int"),
        ("model", [None, nn.Linear(1, 1)], "InvalidUsage", "must be the pydist.DataParallel"),
    ],
)
def test_ranks_that_disagree_are_told_alike(
    tmp_path: Path, name: str, values: list[Any], error: str, text: str
) -> None:
    for outcome in rank_outcomes(disagree, 2, str(tmp_path / "a"), name, values):
        assert outcome.error == error
        assert text in str(outcome.message)


def monitor_in(folder: str) -> None:
    pydist.init()
    pydist.monitor(folder if pydist.rank() == 0 else "/nowhere/at/all")


def test_a_folder_that_cannot_be_written_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcomes = rank_outcomes(monitor_in, 2, str(tmp_path / "file" / "a"))
    assert [outcome.error for outcome in outcomes] == ["InvalidUsage"] * 2
    for outcome in outcomes:
        assert "can't write to" in str(outcome.message)
        assert "Not a directory" in str(outcome.message)


@pytest.mark.usefixtures("world_of_one")
class TestOneRank:
    """What needs no other ranks."""

    def test_numbers_that_json_does_not_know(self, tmp_path: Path) -> None:
        with pydist.monitor(tmp_path, every=1) as monitor:
            for loss in (float("nan"), torch.tensor(float("inf")), torch.tensor([-float("inf")])):
                monitor.step(loss, samples=torch.tensor(2))
        told = [line["values"]["loss"] for line in lines_of(tmp_path)]
        assert told == ["NaN", "Infinity", "-Infinity"]

    def test_a_run_goes_on_behind_its_last_whole_line(self, tmp_path: Path) -> None:
        for _ in range(2):
            with pydist.monitor(tmp_path, every=2) as monitor:
                monitor.step(loss=1.0)
                monitor.step(loss=1.0)
                monitor.step(loss=1.0)
            with (tmp_path / "steps.jsonl").open("a") as file:
                file.write('{"step": 99, "val')
        with pydist.monitor(tmp_path) as monitor:
            assert monitor.step_number == 6
        assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
        starts = json.loads((tmp_path / "config.json").read_text())["starts"]
        assert [start["first_step"] for start in starts] == [1, 4, 7]

    def test_a_run_goes_on_from_an_earlier_checkpoint(self, tmp_path: Path) -> None:
        with pydist.monitor(tmp_path) as monitor:
            for _ in range(5):
                monitor.step()
        with pydist.monitor(tmp_path, first_step=4) as monitor:
            monitor.step()
        assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5, 4]

    def test_a_second_writer_is_refused(self, tmp_path: Path) -> None:
        with (
            pydist.monitor(tmp_path),
            pytest.raises(pydist.InvalidUsage, match="a monitor that is open already writes it"),
        ):
            pydist.monitor(tmp_path)
        pydist.monitor(tmp_path).close()

    def test_a_second_process_is_refused(self, tmp_path: Path) -> None:
        """Also after somebody in the first one has read the file, and was refused himself."""
        program = f"import pydist; pydist.monitor({str(tmp_path)!r})"
        with pydist.monitor(tmp_path):
            assert lines_of(tmp_path) == []
            with pytest.raises(pydist.InvalidUsage):
                pydist.monitor(tmp_path)
            done = run_command([sys.executable, "-c", program])
        assert "a monitor that is open already writes it" in done.stderr

    def test_a_forked_child_leaves_the_run_to_its_parent(self, tmp_path: Path) -> None:
        program = (
            "import os, pydist\n"
            f"monitor = pydist.monitor({str(tmp_path)!r})\n"
            "monitor.step(loss=1.0)\n"
            "child = os.fork()\n"
            "if child: os.waitpid(child, 0)\n"
            "if child: monitor.step(loss=2.0)\n"
        )
        assert run_command([sys.executable, "-c", program]).returncode == 0
        assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]

    def test_counts_that_the_program_resets(self, tmp_path: Path) -> None:
        model = pydist.DataParallel(nn.Linear(4, 2))
        with pydist.monitor(tmp_path, model=model, every=1) as monitor:
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                monitor.step()
                model.reset_stats()
        told = [line["bytes"] for line in lines_of(tmp_path)]
        assert told[0] > 0
        assert told == [told[0]] * 3

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"loss": "1"}, r"step\(loss=\) is a str"),
            ({"loss": torch.ones(2)}, r"a tensor of shape \(2,\)"),
            ({"lr": torch.ones((), dtype=torch.complex64)}, "complex64"),
            ({"samples": -1}, r"samples=-1\.0"),
            ({"samples": float("nan")}, "samples=nan"),
        ],
    )
    def test_values_that_are_no_numbers(
        self, tmp_path: Path, values: dict[str, Any], text: str
    ) -> None:
        with (
            pydist.monitor(tmp_path) as monitor,
            pytest.raises(pydist.InvalidUsage, match=text),
        ):
            monitor.step(**values)

    def test_a_closed_monitor_takes_no_steps(self, tmp_path: Path) -> None:
        with pydist.monitor(tmp_path) as monitor:
            monitor.step()
        with pytest.raises(pydist.InvalidUsage, match="monitor that is closed"):
            monitor.step()

    def test_a_full_disk_is_a_warning_and_the_lines_after_it_are_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        write, is_full = os.pwrite, False

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            if is_full:
                if len(data) > 20:
                    return write(fd, data[:20], offset)  # half a line still found room
                raise OSError(28, "No space left on device")
            return write(fd, data, offset)

        def pwrite_once(fd: int, data: bytes, offset: int) -> int:
            if is_full and offset > end + 10:
                raise OSError(28, "No space left on device")
            return pwrite(fd, data, offset)

        end = 0
        monkeypatch.setattr(os, "pwrite", pwrite_once)
        with (
            caplog.at_level(logging.WARNING, "pydist"),
            pydist.monitor(tmp_path, every=1, tensorboard=False) as monitor,
        ):
            monitor.step()
            end, is_full = (tmp_path / "steps.jsonl").stat().st_size, True
            monitor.step()
            monitor.step()
            assert (tmp_path / "steps.jsonl").stat().st_size == end
            is_full = False
            monitor.step()
        assert [line["step"] for line in lines_of(tmp_path)] == [1, 4]
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2
        assert "No space left on device" in told[0]
        assert "2 steps are missing" in told[1]

    def test_a_value_on_a_device_is_read_one_step_late(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By a stand-in for what is on its way: it can be read as soon as the next step ends."""
        from pydist.monitoring import monitor as module

        reads: list[int] = []

        class OnItsWay(LateNumber):
            def read(self) -> float:
                reads.append(monitor.step_number)
                return super().read()

        monkeypatch.setattr(
            module, "taken", lambda name, value: OnItsWay(torch.tensor(float(value)), None)
        )
        with pydist.monitor(tmp_path, every=2) as monitor:
            for number in range(5):
                monitor.step(loss=number)
                assert number not in reads[number:]
        # While step n+1 ends, or the monitor closes: never in step n.
        assert reads == [1, 2, 3, 4, 5]
        assert [line["values"]["loss"] for line in lines_of(tmp_path)] == [0, 1, 2, 3, 4]

    def test_tensorboard_that_is_wanted_and_not_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(pydist.InvalidUsage, match="pip install tensorboard"):
            pydist.monitor(tmp_path, tensorboard=True)
        with pydist.monitor(tmp_path) as monitor:
            monitor.step(loss=1.0)
        written = [path.name for path in sorted(tmp_path.iterdir())]
        assert written == [".steps.lock", "config.json", "steps.jsonl"]

    def test_event_files_for_tensorboard(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        with pydist.monitor(tmp_path, tensorboard=True) as monitor:
            monitor.step(loss=2.0, samples=1)
            monitor.step(loss=1.0, samples=1)
        events = EventAccumulator(str(tmp_path)).Reload()
        assert [(each.step, each.value) for each in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
        assert "pydist/samples_per_s" in events.Tags()["scalars"]


def in_vain(folder: str) -> tuple[str, list[int]]:
    """The first chunk can't be written; returns what is said of that, and the steps written."""
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    logger.addHandler(handler)
    with pydist.monitor(folder, every=1, tensorboard=False) as monitor:
        assert monitor._files is not None
        with mock.patch.object(monitor._files, "write", side_effect=ZeroDivisionError):
            monitor.step(loss=1.0)
        with pytest.raises(pydist.InvalidUsage, match="too large"):
            monitor.step(loss=10**400)
        monitor.step(loss=1.0)
    logger.removeHandler(handler)
    return told.getvalue(), [line["step"] for line in lines_of(Path(folder))]


def test_a_chunk_that_can_not_be_written_is_no_fault_of_the_store(tmp_path: Path) -> None:
    ((told, steps),) = run_ranks(in_vain, 1, str(tmp_path))
    assert "can't write a chunk of steps: ZeroDivisionError" in told
    assert "store" not in told
    assert steps == [2]


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys, pydist\n"
        "monitor = pydist.monitor(sys.argv[1], every=3)\n"
        "for step in range(10**9):\n"
        "    monitor.step(loss=1.0)\n"
        "    if step == 20: print('under way', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    killer = threading.Timer(60 * PATIENCE, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        killer.cancel()
        process.kill()
        process.communicate()
    steps = [line["step"] for line in lines_of(tmp_path)]
    assert len(steps) >= 18
    assert steps == list(range(1, len(steps) + 1))


def test_a_program_that_just_ends_loses_no_line(tmp_path: Path) -> None:
    code = "import sys, pydist\npydist.monitor(sys.argv[1]).step(loss=1.0)\n"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=True,
        env=clean_environment(),
        timeout=60 * PATIENCE,
    )
    assert len(lines_of(tmp_path)) == 1
