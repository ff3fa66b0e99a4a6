"""Learning rates and batch sizes."""

import math
import os

import pytest
from launch import run_ranks

import pydist


def test_linear_and_sqrt() -> None:
    assert pydist.scale_lr(0.1, base_batch=256, batch=8192) == pytest.approx(3.2)
    assert pydist.scale_lr(0.1, base_batch=256, batch=64) == pytest.approx(0.025)
    assert pydist.scale_lr(1.0, base_batch=8, batch=16, rule="sqrt") == math.sqrt(2)
    assert pydist.scale_lr(0.1, base_batch=256) == 0.1  # a world of one


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr": 0.0, "base_batch": 1},
        {"lr": float("nan"), "base_batch": 1},
        {"lr": 0.1, "base_batch": 0},
        {"lr": 0.1, "base_batch": 8, "batch": 0},
        {"lr": 0.1, "base_batch": 8, "rule": "cubic"},
    ],
)
def test_nonsense_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(pydist.InvalidUsage):
        pydist.scale_lr(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "accumulation"), [(0, 1), (1, 0), (-3, 2)])
def test_a_batch_holds_at_least_one_sample(batch: int, accumulation: int) -> None:
    with pytest.raises(pydist.InvalidUsage):
        pydist.effective_batch_size(batch, accumulation)


def sizes() -> tuple[int, int, float]:
    alone = pydist.effective_batch_size(4, accumulation=2)
    pydist.init()
    return (
        alone,
        pydist.effective_batch_size(4, accumulation=2),
        pydist.scale_lr(0.5, base_batch=10),
    )


def test_the_world_counts() -> None:
    assert run_ranks(sizes, 3) == [(8, 24, 1.5)] * 3


def sizes_with_torch_alone() -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return pydist.effective_batch_size(int(os.environ["WORLD_SIZE"]))


def test_a_group_of_torch_counts_too() -> None:
    assert run_ranks(sizes_with_torch_alone, 2) == [4, 4]
