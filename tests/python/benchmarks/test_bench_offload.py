"""`pydist bench sharded --offload`, on the stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import gpu_ranks
import pytest
import torch
from gpu_ranks import needs_gpu_ranks
from launch import rank_outcomes

import pydist
from pydist.benchmarks.steps import offload
from pydist.cli.bench import main

LIMIT_S = 60.0

pytestmark = pytest.mark.timeout(90)

FLAGS = ["sharded", "--offload", "--models", "tiny", "--seconds", "0.05", "--no-pin"]


def test_the_slowest_flow_bounds_the_step() -> None:
    rounds = {"to host": [2.0, 9.0, 2.0], "step": [4.0] * 3, "to device": [1.0] * 3}
    summary = offload.summarize(
        {**rounds, offload.WHOLE_STEP: [5.0] * 3}, dict.fromkeys(rounds, 8 * 10**9)
    )
    assert summary["bound_by"] == "step"
    assert summary["gb_per_s"] == {"to host": 4.0, "step": 2.0, "to device": 8.0}
    assert summary["median_ms"][offload.WHOLE_STEP] == 5e3


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pydist.InvalidUsage, match="and torch sees no GPU here"):
        main(FLAGS)
    assert capsys.readouterr().out == ""


def run(path: str) -> int:
    gpu_ranks.install()
    with mock.patch.object(offload, "require_gpu"):
        return main([*FLAGS, "--json", path])


@needs_gpu_ranks
def test_flows_of_a_small_model(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    outcomes = rank_outcomes(run, 2, str(path), env={"PYDIST_BACKEND": "nccl"}, timeout=LIMIT_S)
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes[0].describe()
    report = json.loads(path.read_text())
    assert report["complete"]
    assert report["settings"]["offload"]
    found = report["results"]["tiny"]
    assert found["bound_by"] == max(offload.FLOWS, key=lambda flow: found["median_ms"][flow])
    # float32: a gradient, and the value and two states there and back.
    assert found["bytes"]["to host"] == found["bytes"]["to device"]
    assert found["bytes"]["to host"] * 2 == found["pinned_bytes"]
    elements = sum(p.numel() for p in offload.MODELS["tiny"].make()[0].parameters())
    assert elements * 4 / 2 <= found["bytes"]["to host"] < elements * 4 / 2 * 1.2
    assert all(rate > 0 for rate in found["gb_per_s"].values())
    for told in (*offload.FLOWS, offload.WHOLE_STEP, "bounds the step", "GB/s a rank"):
        assert told in outcomes[0].output
    assert outcomes[1].output == ""
