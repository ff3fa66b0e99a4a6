"""bench/hosts/fit_model.py: from files of measurements to a file for `pydist plan --fitted`."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
from test_cost_fit import SIZES, timed
from test_exchange_time import TYPICAL
from training import TIME_LIMIT

from pydist.errors import InvalidUsage
from pydist.planning.cost_fit import Measurement
from pydist.planning.costs import LINK_BETA, FittedCosts

pytestmark = TIME_LIMIT

TOOL = Path(__file__).resolve().parents[3] / "bench" / "hosts" / "fit_model.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_model", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fits_and_compares(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = TYPICAL.at_rate(1.0)
    shapes = [(2, 1), (4, 1), (8, 1), (4, 2)]
    measured = timed(costs, shapes, SIZES, noise=0.02)
    source, target = tmp_path / "measured.json", tmp_path / "fit.json"
    source.write_text(json.dumps({"measurements": [asdict(m) for m in measured]}))
    flags = [str(source), "--link", "10", "--hold-out", "4x2", "--out", str(target)]
    assert tool.main(flags) == 0
    printed = capsys.readouterr().out
    # Two of six sizes for three shapes, and all of the fourth.
    assert "held out: 12 of 24" in printed
    assert "link.alpha_s = 4" in printed
    # A slow link hides what a processor does.
    assert tool.main([*flags, "--names", f"{LINK_BETA},link.alpha_s,link.rank_s_per_byte"]) == 0
    assert "link.rank_s_per_byte stays at" in capsys.readouterr().out
    assert tool.main(flags) == 0
    fit = FittedCosts.read(target)
    assert fit.ranks == 8
    assert fit.held_out_error is not None
    assert fit.held_out_error < 0.15
    assert fit.costs.value(LINK_BETA) == pytest.approx(costs.value(LINK_BETA), rel=0.05)

    # The held-out shape does something else.
    slower = [
        asdict(m) | {"seconds": m.seconds * (1.5 if str(m.shape) == "4x2" else 1)} for m in measured
    ]
    source.write_text(json.dumps({"measurements": slower}))
    assert tool.main(flags) == 1


def test_reads_what_pydist_bench_has_written(tool: ModuleType, tmp_path: Path) -> None:
    row = {
        "collective": "all_reduce",
        "arm": "pydist",
        "size_bytes": 8,
        "time_us": 2.0,
        "place": "in",
    }
    path = tmp_path / "bench.json"
    rows = [
        row,
        {**row, "size_bytes": 1 << 20, "time_us": 100.0},
        {**row, "arm": "gloo"},
        {**row, "place": "out"},
        {**row, "time_us": None},
        {**row, "collective": "broadcast"},
        {**row, "collective": "all_gather"},
    ]
    arms = {"pydist": "", "gloo": ""}
    saved = {"ranks": 4, "arms": arms, "machine": {"usable_cpus": 2}, "rows": rows}
    path.write_text(json.dumps(saved))
    found = tool.read(path)
    assert [(m.collective, m.size_bytes, m.way) for m in found] == [
        ("all_reduce", 8, "host inline"),
        ("all_reduce", 1 << 20, "host pipelined"),
        ("all_gather", 8, "auto"),
    ]
    assert {(m.hosts, m.ranks_per_host) for m in found} == {(1, 4)}
    assert found[1].seconds == pytest.approx(100e-6)
    assert found[1].ranks_per_core == 2


def test_reads_what_all_reduce_between_hosts_has_written(tool: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    sizes = {"8": {"pydist_s": [3e-5, 1e-5, 2e-5]}, "1024": {"pydist_s": [5e-5]}}
    saved = {"ranks_per_host": [2, 2], "machine": {"usable_cpus": 2}, "sizes": sizes}
    path.write_text(json.dumps(saved))
    assert tool.read(path) == [
        Measurement(2, 2, 8, 2e-5, ranks_per_core=2.0),
        Measurement(2, 2, 1024, 5e-5, ranks_per_core=2.0),
    ]
    path.write_text(json.dumps({**saved, "ranks_per_host": [2, 1]}))
    with pytest.raises(InvalidUsage, match=r"hosts with as many ranks each, and not \[2, 1\]"):
        tool.read(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"measurements": [{"hosts": 2}]}'])
def test_files_without_measurements(tool: ModuleType, tmp_path: Path, text: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(InvalidUsage, match=r"measured\.json holds no measurements"):
        tool.read(path)
    with pytest.raises(InvalidUsage, match="can't be read: No such file"):
        tool.read(tmp_path / "nowhere.json")
