"""`pydist bench` on the collectives, from end to end."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from launch import clean_environment, run_command

import pydist
from pydist.benchmarks.interruption import interruptible
from pydist.benchmarks.processes import peers
from pydist.cli import main

pytestmark = pytest.mark.timeout(110)

COMMAND = [sys.executable, "-m", "pydist", "bench"]
QUICK = ["--seconds", "0", "-n", "3", "-w", "1"]


Bench = Callable[..., CompletedProcess[str]]


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Bench:
    """`pydist bench` in this process, which has torch loaded: its ranks are others anyway."""

    def run(*arguments: str) -> CompletedProcess[str]:
        status = main(["bench", *arguments])
        printed = capfd.readouterr()
        return CompletedProcess(arguments, status, printed.out, printed.err)

    return run


def rows_of(path: Path) -> list[dict[str, Any]]:
    report = json.loads(path.read_text())
    assert report["complete"] is True
    rows: list[dict[str, Any]] = report["rows"]
    return rows


# -- what comes out


@pytest.mark.thorough
def test_every_collective_on_two_ranks(bench: Bench, tmp_path: Path) -> None:
    results, table, picture = (tmp_path / name for name in ("r.json", "r.csv", "r.svg"))
    done = bench(
        *("all", "-p", "2", "-b", "1000", "-e", "100000", "-f", "100", *QUICK),
        *("--compare", "symmetric,gloo", "-J", str(results), "--csv", str(table)),
        *("--plot", str(picture)),
    )
    assert done.returncode == 0, done.stderr
    assert "# Out of bounds values : 0 OK" in done.stdout
    rows = rows_of(results)
    measured = {(row["collective"], row["arm"]) for row in rows if row["time_us"]}
    moving = set(pydist.collectives.__all__) - {
        "send",
        "recv",
        "symmetric_empty",
        "share_allocations",
    }
    for collective in moving | {"send_recv"}:
        for arm in ("pydist", "symmetric", "gloo", "roofline"):
            assert (collective, arm) in measured or (collective, arm) == ("barrier", "roofline")
    assert all(row["wrong"] == 0 for row in rows if row["time_us"] and row["size_bytes"])
    for row in rows:
        if row["time_us"] and row["size_bytes"]:
            assert row["p50_us"] <= row["p99_us"]
            assert row["algbw"] == pytest.approx(row["size_bytes"] / row["time_us"] / 1e3)
        if row["arm"] == "roofline" and row["time_us"]:
            assert row["percent_of_roofline"] == pytest.approx(100)
        if row["arm"] == "gloo" and row["time_us"] and row["place"] == "in":
            assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    with table.open() as file:
        read = list(csv.DictReader(file))
    assert [line["arm"] for line in read] == [row["arm"] for row in rows]
    assert picture.read_text().rstrip().endswith("</svg>")


def test_the_columns_are_those_of_nccl_tests_and_a_full_disk_ends_no_measurement(
    bench: Bench, tmp_path: Path
) -> None:
    table = tmp_path / "r.csv"
    flags = ["-b", "64", "-e", "256", "-f", "2", *QUICK, "--json", "/dev/full", "--csv", str(table)]
    done = bench("all_reduce", *flags)
    assert done.returncode == 1
    assert done.stderr.count("No space left") == 1
    assert "# Avg bus bandwidth" in done.stdout
    assert len(table.read_text().splitlines()) == 1 + 3 * 2 * 2
    titles = re.findall(r"[#%]?\w+", next(x for x in done.stdout.splitlines() if " redop" in x))
    columns = ["time", "p50", "p99", "algbw", "busbw", "%roof", "#wrong"]
    assert titles == ["size", "count", "type", "redop", "root", *columns, *columns]
    lines = [x.split() for x in done.stdout.splitlines() if re.match(r" +\d+ ", x)]
    assert [x[:5] for x in lines] == [
        [str(size), str(size // 4), "float32", "sum", "-1"] for size in (64, 128, 256)
    ]
    assert all(len(x) == 5 + 2 * len(columns) for x in lines)
    assert re.search(r"# State of the machine +: an all_reduce of 8 B takes .* after", done.stdout)
    if len(os.sched_getaffinity(0)) > 1:  # each rank has a core of its own
        assert re.search(r"# From core to core +: a cache line takes .* ns after", done.stdout)


@pytest.mark.thorough
def test_sums_over_three_ranks_on_symmetric_memory(bench: Bench, tmp_path: Path) -> None:
    results = tmp_path / "r.json"
    done = bench(
        *("all_reduce", "-p", "3", "-b", "998", "-e", "998", "-d", "bf16,float64", "-o", "max,avg"),
        *("-R", "2", *QUICK, "-J", str(results), "--no-pin", "-c", "2"),
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(results)
    kinds = {(row["type"], row["redop"]) for row in rows if row["arm"] == "symmetric"}
    assert kinds == {(t, op) for t in ("bfloat16", "float64") for op in ("max", "mean")}
    report = json.loads(results.read_text())
    assert report["pinned"] is False
    assert report["core_to_core_ns"] == []  # a rank may be moved at any time


@pytest.mark.thorough
def test_on_gloo_there_is_no_roofline(bench: Bench, tmp_path: Path) -> None:
    results = tmp_path / "r.json"
    done = bench(
        "all_reduce", "-b", "64", "-e", "64", *QUICK, "--backend", "gloo", "-J", str(results)
    )
    assert done.returncode == 0, done.stderr
    by_arm = {row["arm"]: row for row in rows_of(results)}
    assert by_arm["pydist"]["time_us"] > 0
    assert by_arm["pydist"]["percent_of_roofline"] is None
    assert "symmetric memory" in by_arm["roofline"]["unsupported"]
    assert json.loads(results.read_text())["core_to_core_ns"] == []


def test_under_a_launcher_the_ranks_are_its_own(tmp_path: Path) -> None:
    results = tmp_path / "r.json"
    done = run_command(
        [
            *(sys.executable, "-m", "pydist", "run", "-n", "2", "-m", "pydist", "bench"),
            *("all_gather", "-b", "96", "-e", "96", *QUICK, "--compare", "gloo"),
            *("-J", str(results)),
        ],
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(results.read_text())["ranks"] == 2
    assert done.stdout.count("# Avg bus bandwidth") == 1
    assert {row["arm"] for row in rows_of(results)} == {"pydist", "roofline", "gloo"}


@pytest.mark.parametrize("name", list(peers.PEERS))
def test_beside_an_mpi(bench: Bench, name: str, tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2] / "build" / "peers"
    try:
        peers.find(name, folder)
    except pydist.InvalidUsage:
        pytest.skip(f"{name} is not installed: python bench/peers/install.py {name}")
    results = tmp_path / "r.json"
    done = bench(
        *("all", "-b", "1000", "-e", "1000", *QUICK, "--compare", name),
        *("--peers", str(folder), "-J", str(results)),
    )
    assert done.returncode == 0, done.stderr
    rows = [row for row in rows_of(results) if row["arm"] == name]
    assert {row["collective"] for row in rows if row["time_us"]} == {
        row["collective"] for row in rows_of(results)
    }
    assert all(row["wrong"] == 0 for row in rows if row["time_us"] and row["size_bytes"])


@pytest.mark.thorough
def test_a_reader_that_has_seen_enough() -> None:
    command = " ".join(COMMAND) + " all_reduce -b 8 -e 8K -f 2 --seconds 0 | head -1"
    done = run_command(["bash", "-c", command], timeout=90)
    assert done.stdout.startswith("# pydist bench all_reduce")
    assert "Traceback" not in done.stderr


# -- the end comes early


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_rows(path: Path, count: int, process: "subprocess.Popen[str]") -> None:
    end_s = time.monotonic() + 60
    while not path.exists() or len(json.loads(path.read_text())["rows"]) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end_s
        time.sleep(0.05)


def ranks_of(process: "subprocess.Popen[str]") -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except (OSError, ValueError, IndexError):
            continue
        if b"pydist.benchmarks.processes.rank_process" in command and int(parent) == process.pid:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_that_ends_programs_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_interruption_leaves_what_was_measured(tmp_path: Path) -> None:
    results, table = tmp_path / "r.json", tmp_path / "r.csv"
    process = start(
        *("all_reduce", "-b", "8", "-e", "64K", "-i", "4", *QUICK),
        *("-J", str(results), "--csv", str(table), "--plot", str(tmp_path / "r.png")),
    )
    wait_for_rows(results, 4, process)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "# Not everything was measured" in out
    report = json.loads(results.read_text())
    assert report["complete"] is False
    sizes = {row["size_bytes"] for row in report["rows"]}
    assert sizes == {8 + 4 * i for i in range(len(sizes))}
    assert len(table.read_text().splitlines()) == len(report["rows"]) + 1
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.thorough
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    results = tmp_path / "r.json"
    process = start(*("all_reduce", "-b", "8", "-e", "64K", "-i", "4", *QUICK, "-J", str(results)))
    wait_for_rows(results, 4, process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert re.search(r"rank 1", out + err)
    assert json.loads(results.read_text())["complete"] is False


# -- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: WHAT"),
        (["all_redcue"], "invalid choice: 'all_redcue'"),
        (["all_reduce", "-b", "8M", "-e", "4K"], "no size"),
        (["all_reduce", "-b", "2", "-e", "3"], "holds an element"),
        (["all_reduce", "-b", "eight"], "is not a size"),
        (["all_reduce", "-f", "1"], "more than 1"),
        (["all_reduce", "-f", "nan"], "more than 1"),
        (["all_reduce", "-f", "inf"], "more than 1"),
        (["all_reduce", "--seconds", "nan"], "--seconds nan"),
        (["all_reduce", "--seconds", "inf"], "--seconds inf"),
        (["all_reduce", "-r", "0"], "-r 0: means nothing to all_reduce"),
        (["all_gather", "-o", "max"], "-o max: means nothing to all_gather"),
        (["all_reduce", "-f", "2", "-i", "8"], "exclude each other"),
        (["all_reduce", "-p", "0"], "-p 0 is not valid; use 1 rank or more"),
        (["all_reduce", "-p", "1000000"], "-p 1000000"),
        (["all_reduce", "-e", "900T"], "are free"),
        (["all_reduce", "-n", "0"], "must be 1 or more"),
        (["all_reduce", "-c", "-1"], "must be 0 or more"),
        (["all_reduce", "-d", "complex"], "-d complex: unknown"),
        (["all_reduce", "-o", "avg", "-d", "int8"], "not defined"),
        (["broadcast", "-r", "2"], "from 0 to 1"),
        (["all_reduce", "-R", "1"], "-R 1"),
        (["all_reduce", "--compare", "openmip"], "--compare openmip"),
        (["all_reduce", "--compare", "mpich", "--peers", "/nowhere"], "pip install mpich"),
        (["all_reduce", "--json", "/nowhere/r.json"], "no folder /nowhere"),
        (["all_reduce", "--csv", "/"], "folder"),
        (["all_reduce", "--plot", "r.gif"], ".png"),
        (["all_reduce", "--fast"], "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("pydist bench: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_in_a_checkout_its_script_installs_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = Path("bench/peers/install.py")
    script.parent.mkdir(parents=True)
    script.touch()
    assert main(["bench", "all_reduce", "--compare", "impi", "--peers", "/nowhere"]) == 2
    assert f"{script} impi --into /nowhere" in capsys.readouterr().err


def test_ranks_that_cannot_start_say_why(bench: Bench) -> None:
    done = bench("all_reduce", "-e", "8", "--backend", "nccl")
    assert done.returncode == 2
    assert done.stderr.startswith("pydist bench: the ranks of pydist could not start: ")
    assert done.stderr.count("\n") == 1
