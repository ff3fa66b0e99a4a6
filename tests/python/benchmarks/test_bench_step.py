"""`pydist bench step`, `overlap` and `startup`: what they make of times, and small runs of each."""

import argparse
import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from launch import clean_environment, rank_outcomes, run_command

import pydist
from pydist.benchmarks import startup
from pydist.benchmarks.processes.fresh_job import FreshJob, step_job
from pydist.benchmarks.steps import ddp_knobs, memory, step_times
from pydist.benchmarks.steps.models import DEFAULT_MODELS, MODELS
from pydist.benchmarks.steps.sharded import SHARDED
from pydist.benchmarks.steps.slow_link import Bucket, Round

PARAMETERS = {
    "gpt": 33_607_680,
    "wide": 6 * (2048 * 2048 + 2048),
    "deep": 200 * (64 * 64 + 64),
    "resnet": 11_173_962,
    "recommender": 8 * 100_000 * 32 + 282_529,
    "tiny": 4_680,
}


def run_command_of(name: str, arguments: list[str]) -> int:
    """As the command line does: parse, then main."""
    package = "pydist.benchmarks" if name == "startup" else "pydist.benchmarks.steps"
    module = importlib.import_module(f"{package}.{name}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    status: int = module.main(parser.parse_args(arguments))
    return status


# -- models


@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_large_as_they_claim(name: str) -> None:
    with torch.device("meta"):
        model, _ = MODELS[name].make()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["recommender", "tiny"])
def test_only_the_recommenders_tables_have_sparse_gradients(name: str) -> None:
    model, inputs = MODELS[name].make()
    model(*inputs).square().mean().backward()
    sparse = {key for key, p in model.named_parameters() if p.grad is not None and p.grad.is_sparse}
    tables = {f"tables.{i}.weight" for i in range(8)} if name == "recommender" else set()
    assert sparse == tables
    assert MODELS[name].is_sparse == bool(tables)
    assert all(p.grad is not None for p in model.parameters())


def test_the_default_models_are_all_but_the_one_for_trying_out() -> None:
    assert set(MODELS) - set(DEFAULT_MODELS) == {"tiny"}


# -- summaries of made-up times


def made_up_rounds(ddp_ms: float, ours_ms: float, count: int = 40) -> step_times.Rounds:
    """All arms drift together, as those of a shared machine do."""
    drift_s = [0.1 + 0.0001 * i for i in range(count)]

    def plus(added_ms: float) -> list[float]:
        return [s + added_ms * 1e-3 for s in drift_s]

    rounds = {arm: plus(2 * ddp_ms) for arm in ddp_knobs.KNOBS}
    rounds["DDP, 5 MiB"] = plus(ddp_ms)
    return {
        **rounds,
        step_times.ALONE: drift_s,
        step_times.OURS: plus(ours_ms),
        step_times.EXPOSED: [ours_ms * 0.5e-3] * count,
    }


def test_what_averaging_adds_is_compared_within_rounds() -> None:
    summary = step_times.summarize(made_up_rounds(ddp_ms=10, ours_ms=2))
    assert summary["rounds"] == 40
    assert summary["best_ddp"] == "DDP, 5 MiB"
    assert {arm: a["median"] for arm, a in summary["added_ms"].items()} == pytest.approx(
        {"DDP": 20, "DDP, 5 MiB": 10, "pydist": 2}
    )
    # The drift of 4 ms is in no interval: it meets both arms of a round.
    for over, expected in (("added_over_ddp", 0.1), ("added_over_best_ddp", 0.2)):
        assert summary[over] == pytest.approx(
            {"median": expected, "low": expected, "high": expected}
        )
    assert summary["exposed_ms"]["median"] == pytest.approx(1)
    assert summary["averaging_alone_ms"] is None
    alone_s = {step_times.AVERAGING: [0.003, 0.001, 0.002] * 20}
    summary = step_times.summarize(made_up_rounds(ddp_ms=10, ours_ms=2) | alone_s)
    assert summary["averaging_alone_ms"] == pytest.approx(2)
    assert summary["step_over_best_ddp"]["high"] < 1
    assert summary["warnings"] == []


def test_a_ratio_to_nothing_is_none_and_said_so() -> None:
    summary = step_times.summarize(made_up_rounds(ddp_ms=0, ours_ms=2))
    assert summary["added_over_ddp"] is None
    assert summary["added_over_best_ddp"] is None
    assert any("to tell whether" in warning for warning in summary["warnings"])
    json.dumps(summary, allow_nan=False)


def test_noise_is_said() -> None:
    rounds = made_up_rounds(ddp_ms=10, ours_ms=2)
    rounds = {arm: [s * (1 + i % 2) for i, s in enumerate(t)] for arm, t in rounds.items()}
    assert any("something else" in warning for warning in step_times.summarize(rounds)["warnings"])


def test_a_round_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    journal = tmp_path / "rounds"
    assert step_times.read_rounds(journal) == {}
    journal.write_text('{"alone": 1.0, "DDP": 2.0}\n{"alone": 3.0, "DDP": 4.0}\n{"alone": 5.0, "D')
    assert step_times.read_rounds(journal) == {"alone": [1.0, 3.0], "DDP": [2.0, 4.0]}


def test_start_up_is_that_of_the_slowest_rank() -> None:
    first = {"began_s": 10.0, "torch_s": 11.0, "imported_s": 11.1, "told_s": 20.0}
    second = {"began_s": 10.5, "torch_s": 12.5, "imported_s": 12.9, "told_s": 20.0}
    job = FreshJob(
        9.0,
        [
            {**first, "joined_s": 20.2, "stepped_s": 21.0},
            {**second, "joined_s": 20.5, "stepped_s": 20.9},
        ],
    )
    assert job.import_s == pytest.approx((1.5, 0.25))
    assert job.join_s == pytest.approx(0.5)
    assert job.first_step_s == pytest.approx(12.0)
    summary = startup.summarize({"pydist": [job, job], "gloo": [job, job]})
    assert summary["import_pydist_over_torch"]["median"] == pytest.approx(1 / 6)
    assert summary["join_pydist_over_gloo"]["median"] == 1
    assert len(summary["warnings"]) == 1


def test_the_ideal_step_keeps_the_link_busy_from_the_first_bucket() -> None:
    buckets = {0: Bucket("a", 100, ready_s=1.0), 1: Bucket("b", 300, ready_s=1.5)}
    this = Round(began_s=0.0, computed_s=3.0, ended_s=6.0, buckets=buckets)
    assert this.ideal_end_s(bytes_per_s=100.0) == 5.0
    assert this.ideal_end_s(bytes_per_s=1e6) == 3.0


def test_the_engines_share_is_what_it_takes_beyond_alone() -> None:
    alone, ours = {"in_use_mib": 500.0}, {"in_use_mib": 520.0, "gradients_mib": 100.0}
    verdict = memory.engine_share(alone, ours, ranks=2)
    assert verdict == {"owned_mib": 10.0, "promised_mib": 10.0, "keeps_promise": True}
    assert not memory.engine_share(alone, {**ours, "in_use_mib": 521.0}, 2)["keeps_promise"]


# -- bad input


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("step", ["--models", "gtp"], "no model 'gtp'; use some of: gpt, wide"),
        ("step", ["-p", "0"], "-p 0 is not valid"),
        ("step", ["-p", "1000000"], "-p 1000000"),
        ("step", ["--seconds", "0"], "--seconds 0 is not valid"),
        ("step", ["--seconds", "nan"], "--seconds nan is not valid"),
        ("step", ["--json", "/no-such-folder/x.json"], "there is no folder /no-such-folder"),
        ("step", ["--parts", "speed"], "no part 'speed'"),
        ("overlap", ["--models", "recommender"], "sparse gradients, which do not pass"),
        ("overlap", ["--bandwidth", "-1"], "--bandwidth -1 is not valid"),
        ("overlap", ["--trace", "/no-such-folder/x.json"], "there is no folder"),
        ("sharded", ["--models", "recommender"], "sparse gradients, which no optimizer shards"),
        ("startup", ["-p", "1", "0"], "-p 0 is not valid"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    name: str, arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(pydist.InvalidUsage) as refused:
        run_command_of(name, arguments)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("step", ["-p", "3"], "-p 3 contradicts torchrun's variables, which started 1 ranks"),
        ("step", ["--parts", "memory"], "processes of their own"),
        ("startup", [], "without a launcher"),
    ],
)
def test_what_a_launcher_rules_out(
    name: str, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "1")
    with pytest.raises(pydist.InvalidUsage, match=said):
        run_command_of(name, arguments)


# -- small runs


COMMANDS = ("overlap", "step", "sharded")


def run_launched(path: str) -> list[int]:
    flags = ["--models", "tiny", "--seconds", "0.05", "--json"]
    return [run_command_of(name, [*flags, f"{path}-{name}"]) for name in COMMANDS]


def test_ranks_of_a_launcher_are_used_and_the_first_one_reports(tmp_path: Path) -> None:
    outcomes = rank_outcomes(run_launched, 2, str(tmp_path / "report"))
    assert [outcome.value for outcome in outcomes] == [[0, 0, 0]] * 2, outcomes[0].describe()
    assert "whole steps with fused AdamW, 2 ranks" in outcomes[0].output
    assert "time that averaging adds to a step" in outcomes[0].output
    assert "backward on a slow link, 2 ranks" in outcomes[0].output
    assert outcomes[1].output == ""
    overlap, steps, sharded = (
        json.loads((tmp_path / f"report-{name}").read_text()) for name in COMMANDS
    )
    assert sharded["complete"]
    # How they compare on so small a model may be lost in noise.
    assert sharded["results"]["tiny"]["over_whole"].keys() == set(SHARDED)
    assert all(ms > 0 for ms in sharded["results"]["tiny"]["median_ms"].values())
    assert overlap["complete"]
    assert overlap["settings"]["ranks"] == 2
    assert overlap["results"]["tiny"]["steps"] >= 5
    # No link of its own makes anybody faster than it could be.
    assert overlap["results"]["tiny"]["step_over_ideal"]["low"] > 1
    assert steps["complete"]
    assert steps["machine"]["torch"] == torch.__version__
    times = steps["results"]["tiny"]["times"]
    assert times["rounds"] >= 10
    assert set(times["median_ms"]) == {"alone", "pydist", *ddp_knobs.KNOBS}
    assert 0 < times["exposed_ms"]["median"] < times["median_ms"]["pydist"]


INTERRUPTED = """
import argparse
from pydist.benchmarks.steps import step
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    raise SystemExit(step.main(parser.parse_args()))
"""


@pytest.mark.thorough
def test_an_interruption_leaves_the_rounds_so_far(tmp_path: Path) -> None:
    script, report, errors = tmp_path / "bench.py", tmp_path / "r.json", tmp_path / "errors"
    script.write_text(INTERRUPTED)
    flags = ["-p", "1", "--models", "tiny", "gpt", "--seconds", "600", "--json", str(report)]
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(script), *flags],
            stdout=subprocess.PIPE,
            stderr=file,
            env=clean_environment(),
            text=True,
        )
    try:
        deadline_s = time.monotonic() + 60
        while not errors.read_text().endswith("tiny: steps\n"):
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < deadline_s, errors.read_text()
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Not everything was measured" in output
    assert "forward and backward, 1 ranks" in output
    assert "Traceback" not in errors.read_text()
    written = json.loads(report.read_text())
    assert not written["complete"]
    assert list(written["results"]) == ["tiny"]
    assert written["results"]["tiny"]["times"]["rounds"] > 0
    assert "memory" not in written["results"]["tiny"]


@pytest.mark.thorough
def test_start_up_is_measured_in_new_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "_LEAST_ROUNDS", 1)
    path = tmp_path / "report.json"
    assert run_command_of("startup", ["-p", "1", "--seconds", "0.01", "--json", str(path)]) == 0
    assert "starting up" in capsys.readouterr().out
    written: dict[str, Any] = json.loads(path.read_text())
    result = written["results"]["1"]
    assert written["complete"]
    assert result["rounds"] == 1
    # Torch is hundreds of megabytes of libraries; pydist is one.
    assert 0 < result["import_pydist_over_torch"]["median"] < 1
    assert result["join_ms"]["pydist"] > 0


def test_a_rank_that_cant_start_is_named() -> None:
    with pytest.raises(pydist.Error, match=r"rank 0 of 1 did not start up: .*KeyError: 'no-model'"):
        step_job("gloo", 1, "no-model", pins=False)


def test_new_processes_end_with_the_one_that_started_them() -> None:
    script = (
        "import os, signal\n"
        "from pydist.benchmarks.processes import fresh_job\n"
        "def leave(processes, complaints):\n"
        "    print(*(process.pid for process in processes), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "fresh_job._hear = leave\n"
        # Of two ranks, so that the first one waits for somebody when its parent is gone.
        "fresh_job.step_job('pydist', 2, 'tiny', pins=False)\n"
    )
    done = run_command([sys.executable, "-c", script])
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline_s = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_memory_is_read_in_processes_of_their_own() -> None:
    ours = memory.measure_memory("tiny", "pydist", 1, pins=True)
    assert ours["gradients_mib"] == pytest.approx(4680 * 4 / (1 << 20))
    assert 0 < ours["in_use_mib"] <= ours["peak_mib"]
    # The engine's segments are what others don't have.
    assert any(owner.startswith("memfd:") for owner in ours["owners_mib"])
