"""The comparison of benchmarks with a baseline, on made-up results."""

import json
from pathlib import Path
from typing import Any

import baseline
import pytest
from baseline import Measured, Run, compare, judge, load, to_json

MACHINE = {
    "hardware": "abacus-2cpus-beads",
    "processor": "Abacus",
    "usable_cpus": 2,
    "physical_cores": 2,
    "l3_bytes": None,
    "governor": "unknown",
    "pydist": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.7",
}


def around(ratio: float, width: float = 0.02, others: float = 0.01) -> Measured:
    """With an interval of so much to each side."""
    return Measured(ratio, ratio * (1 - width), ratio * (1 + width), rounds=50, others=others)


def result(**ratios: Measured) -> dict[str, Any]:
    """As pytest-benchmark saves it."""
    benchmarks = [
        {
            "name": name,
            "extra_info": {
                "ratio": m.ratio,
                "low": m.low,
                "high": m.high,
                "others": m.others,
                "reference": "a copy",
            },
            "stats": {"rounds": m.rounds, "median": 1e-3},
        }
        for name, m in ratios.items()
    ]
    return {"machine_info": {**MACHINE, "kernel": "6.1"}, "benchmarks": benchmarks}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where baselines lie during the test."""
    monkeypatch.setattr(baseline, "BASELINES", tmp_path / "baselines")
    return tmp_path


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("now", "then", "verdict"),
    [
        (around(1.5), around(1.0), "regressed"),
        (around(1.0), around(1.5), "improved"),
        (around(1.0), around(1.0), "noise"),
        # Apart, but by less than the margin.
        (around(1.08), around(1.0), "noise"),
        (around(1.0), around(1.08), "noise"),
        # By more than the margin, but the intervals overlap.
        (around(1.5, 0.4), around(1.0, 0.4), "noise"),
        (around(1.0, 0.4), around(1.5, 0.4), "noise"),
        # Beside busy neighbours.
        (around(1.5, others=0.5), around(1.0), "noise"),
        (around(1.5), around(1.0, others=0.5), "noise"),
        (around(1.0), None, "new"),
        (None, around(1.0), "gone"),
    ],
)
def test_a_change_counts_beyond_both_intervals_and_margin(
    now: Measured | None, then: Measured | None, verdict: str
) -> None:
    assert judge(now, then, margin=0.1) == verdict


@pytest.mark.parametrize("factor", [1.05, 1.24, 1.26, 3.0])
def test_there_and_back_are_opposites(factor: float) -> None:
    opposite = {"regressed": "improved", "noise": "noise"}
    there = judge(around(factor), around(1.0), margin=0.25)
    assert judge(around(1.0), around(factor), margin=0.25) == opposite[there]


def test_benchmarks_of_either_run_are_compared() -> None:
    now = Run(MACHINE, {"b": around(2.0), "a": around(1.0)})
    then = Run(MACHINE, {"a": around(1.0), "c": around(1.0)})
    changes = compare(now, then, margin=0.1)
    assert [(change.name, change.verdict) for change in changes] == [
        ("b", "new"),
        ("a", "noise"),
        ("c", "gone"),
    ]
    assert [change.share for change in changes] == [None, 0.0, None]


def test_a_baseline_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    run = Run(
        MACHINE, {"bench_b[8B]": around(0.5), "bench_a": Measured(123.4, 120.0, 130.0, 9, 0.0)}
    )
    path = tmp_path / "baseline.json"
    path.write_text(to_json(run))
    assert load(path) == run


def test_a_baseline_holds_no_times_and_no_more_of_the_machine(tmp_path: Path) -> None:
    text = to_json(load(Path(write(tmp_path / "result.json", result(a=around(1.0))))))
    assert "median" not in text
    assert "kernel" not in text


def test_a_regression_ends_with_status_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(folder / "before.json", result(steady=around(1.0), slower=around(0.01)))
    after = write(folder / "after.json", result(steady=around(1.0), slower=around(0.02)))
    assert baseline.main(["save", before]) == 0
    assert (folder / "baselines" / "abacus-2cpus-beads.json").exists()
    assert baseline.main(["compare", before]) == 0
    assert baseline.main(["compare", after]) == 1
    said = capsys.readouterr().out
    assert "+100%" in said
    assert "1 regressed, 0 improved, 1 noise, 0 new, 0 gone" in said
    assert baseline.main(["compare", after, "--margin", "1.5"]) == 0
    # The other way round it is no regression, and a result serves as well as a baseline.
    assert baseline.main(["compare", before, "--against", after]) == 0


def test_disturbed_measurements_are_marked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(folder / "result.json", result(calm=around(1.0), busy=around(1.0, others=0.3)))
    assert baseline.main(["save", path]) == 0
    assert "1 marked *" in capsys.readouterr().out
    assert baseline.main(["compare", path]) == 0
    said = capsys.readouterr().out
    assert "1 marked *" in said
    assert "1 (0.98 to 1.02) *" in said


def test_names_with_brackets_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(MACHINE, {"bench_x[red-8B]": around(1.0)})
    baseline.show(compare(run, run, 0.1), 0.1)
    assert "x[red-8B]" in capsys.readouterr().out


def test_other_versions_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now, then = result(a=around(1.0)), result(a=around(1.0))
    then["machine_info"]["torch"] = "2.11.0"
    against = write(folder / "then.json", then)
    assert baseline.main(["compare", write(folder / "now.json", now), "--against", against]) == 0
    assert "torch: 2.13.0 now, 2.11.0 then" in capsys.readouterr().out


def test_without_a_baseline_it_says_how_to_save_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(folder / "result.json", result(a=around(1.0)))
    assert baseline.main(["compare", path]) == 2
    said = capsys.readouterr().err
    assert "abacus-2cpus-beads" in said
    assert f"baseline.py save {path}" in said
    assert baseline.main(["compare", path, "--allow-missing"]) == 0
    assert "no baseline" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "neither a result"),
        ("[]", "neither a result"),
        ("{}", "neither a result"),
        ('{"machine_info": {}, "benchmarks": []}', "neither a result"),
        ('{"machine": {}, "benchmarks": {"a": {"ratio": 1}}}', "neither a result"),
        (json.dumps(result(a=around(1.0))).replace('"ratio"', '"quota"'), "a has no ratio"),
        (
            json.dumps(result(a=around(1.0), b=around(1.0))).replace('"b"', '"a"'),
            "two benchmarks are called a",
        ),
    ],
)
def test_bad_files_end_with_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    path = folder / "result.json"
    path.write_text(content)
    assert baseline.main(["compare", str(path), "--allow-missing"]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_file_ends_with_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baseline.main(["save", str(folder / "nowhere.json")]) == 2
    assert "nowhere.json can't be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("margin", ["-0.1", "nan", "inf", "much"])
def test_the_margin_is_a_share(folder: Path, margin: str) -> None:
    with pytest.raises(SystemExit) as caught:
        baseline.main(["compare", "result.json", "--margin", margin])
    assert caught.value.code == 2
