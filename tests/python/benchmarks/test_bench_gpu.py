"""What bench/ measures on GPUs: on fakes it says nothing, but has to run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import ddp_steps
import gpu_latency
import gpu_pairs
import gpu_ranks
import nccl_ring
import pytest
import staging
import torch
from gpu_ranks import needs_gpu_ranks
from launch import run_ranks
from staged_gpu import needs_gpu
from turns import Times

import pydist
from pydist.benchmarks.noise import ratio_of

pytestmark = pytest.mark.timeout(60)

RING = gpu_pairs.Case("nccl", 4096, "bfloat16", gpu_pairs.ring_beside_nccl)
LATENCY = gpu_pairs.Case("nccl", 8, "float32", gpu_pairs.beside_torchs_nccl)
STAGING = gpu_pairs.Case("native", 4096, "float32", gpu_pairs.staging_beside_copies)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([RING, LATENCY], marks=needs_gpu_ranks, id="nccl"),
        pytest.param([STAGING], marks=needs_gpu, id="native"),
    ],
)
def test_both_take_turns(cases: list[gpu_pairs.Case]) -> None:
    for times in gpu_pairs.measure(cases, 2, 0.0):
        assert ratio_of(times.subject_s, times.reference_s).low > 0


def test_the_latencys_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(cases: list[gpu_pairs.Case], nprocs: int, seconds: float) -> list[Times]:
        assert (nprocs, seconds) == (gpu_pairs.rank_count(), 0.5)
        assert [(case.size_bytes, case.dtype) for case in cases] == [
            (8, "bfloat16"),
            (65536, "bfloat16"),
        ]
        return [Times("torch's NCCL", [2e-5] * 20, [1e-5] * 20) for _ in cases]

    monkeypatch.setattr(gpu_pairs, "measure", measure)
    monkeypatch.setattr(gpu_pairs, "why_not", lambda backend: "")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    kept = tmp_path / "latency.json"
    flags = ["--sizes", "8,64K", "--dtype", "bfloat16", "--seconds", "0.5", "--json", str(kept)]
    assert gpu_latency.main(flags) == 0
    figures = json.loads(kept.read_text())["figures"]
    assert [(each["of"], each["subject_s"]) for each in figures] == [
        ("8 B", 2e-5),
        ("64 KiB", 2e-5),
    ]
    said = capsys.readouterr().out
    assert "20.0" in said
    assert "2.00" in said


def sums_by_both() -> tuple[float, float]:
    """Of 256, 1 and 1 in bfloat16, which has no 257: rounded at every step, and once."""
    gpu_ranks.install()
    pydist.init()
    term = 256.0 if pydist.rank() == 0 else 1.0
    sums = []
    for group in (None, gpu_pairs.ring_group()):
        tensor = torch.full((64,), term, dtype=torch.bfloat16, device="cuda")
        pydist.all_reduce(tensor, group=group)
        sums.append(float(tensor[0]))
    return sums[0], sums[1]


@needs_gpu_ranks
def test_only_one_of_them_is_the_ring() -> None:
    for by_nccl, by_ring in run_ranks(sums_by_both, 3, env={"PYDIST_BACKEND": "nccl"}):
        assert by_ring == 258.0
        assert by_nccl in (256.0, 258.0) if gpu_ranks.IS_REAL else by_nccl == 256.0


@needs_gpu_ranks
@pytest.mark.parametrize(("ranks", "backend"), [(2, "nccl"), (3, "native")])
def test_steps_beside_ddp(
    ranks: int,
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu_pairs, "why_not", lambda backend: "")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    kept = tmp_path / "new" / "steps.json"
    flags = ["--models", "tiny", "--seconds", "0", "--json", str(kept)]
    assert ddp_steps.main([*flags, "--ranks", str(ranks), "--backend", backend]) == 0
    assert "tiny" in capsys.readouterr().out
    (found,) = json.loads(kept.read_text())["figures"]
    assert (found["of"], found["ours_waits"]) == ("tiny", 0 if backend == "nccl" else None)
    assert len(found["ours_s"]) == len(found["ddp_s"]) > 1


def test_a_model_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, given: argparse.Namespace) -> ddp_steps.Found:
        assert (given.ranks, given.backend) == (gpu_pairs.rank_count(), "nccl")
        if name == "gpt":
            raise AssertionError("a rank ended")
        return ddp_steps.Found(name, [2e-3] * 20, [1e-3] * 20, 300, 200, int(name == "deep"), 4)

    monkeypatch.setattr(ddp_steps, "measure_alone", measure)
    monkeypatch.setattr(gpu_pairs, "why_not", lambda backend: "")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    kept = tmp_path / "steps.json"
    assert ddp_steps.main(["--models", "gpt,resnet", "--json", str(kept)]) == 1
    (figure,) = json.loads(kept.read_text())["figures"]
    assert figure["of"] == "resnet"
    assert figure["shown"].endswith(" of DDP, memory 1.50, waits 0, of DDP 4")
    said = capsys.readouterr().out
    assert "gpt was not measured: a rank ended" in said
    assert "1.50" in said
    assert ddp_steps.main(["--models", "resnet"]) == 0
    assert ddp_steps.main(["--models", "deep"]) == 1
    assert "The host waits for the GPU in a step of deep" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
@pytest.mark.parametrize(
    "script", [ddp_steps, gpu_latency, nccl_ring, staging], ids=lambda s: s.__name__
)
def test_without_a_gpu_they_say_why(script: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2  # type: ignore[attr-defined]
    assert "measured" in (said := capsys.readouterr().out)
    assert "is built without CUDA" in said or "CUDA finds none" in said
