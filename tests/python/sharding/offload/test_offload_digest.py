"""The digest by which an offloaded step sees that the program has written parameters."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from gpu_ranks import needs_gpu_ranks
from gpu_twins import ENVIRONMENTS, start
from launch import run_ranks
from torch import Tensor, nn

import pydist
from pydist.planning.offload_estimate import step_bytes
from pydist.sharding.offload import digest as digest_module
from pydist.sharding.offload.digest import digest_bytes, digest_of

pytestmark = pytest.mark.timeout(60)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def digest(values: Tensor) -> int:
    return int(digest_of(values.reshape(-1)).item())


@pytest.mark.parametrize("dtype", DTYPES)
def test_permutations_differ(dtype: torch.dtype) -> None:
    eye = torch.eye(64, dtype=dtype)
    order = torch.Generator().manual_seed(0)
    written = [eye, eye.flip(0), eye.roll(1, 0), -eye, 2 * eye]
    written += [eye[torch.randperm(64, generator=order)] for _ in range(20)]
    assert len({digest(values) for values in written}) == len(written)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_pairs_that_change_places_differ(dtype: torch.dtype) -> None:
    order = torch.Generator().manual_seed(0)
    values = torch.randn(1024, generator=order).to(dtype)
    a, b = values[0].item(), values[1].item()
    for begin in range(0, 1020, 4):
        for step in (1, 2, 4, 64, 128):
            places = [(begin + n * step) % 1024 for n in range(4)]
            values[places] = torch.tensor([a, b, b, a], dtype=dtype)
            before = digest(values)
            values[places] = torch.tensor([b, a, a, b], dtype=dtype)
            assert digest(values) != before, places


def test_signs_count() -> None:
    """Of all words, or of a few: the highest bit alone changes."""
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    seen = {digest(values)}
    for begin in range(0, 1024, 2):
        other = values.clone()
        other[begin : begin + 2].neg_()
        seen.add(digest(other))
        other.neg_()
        seen.add(digest(other))
    assert len(seen) == 1 + 2 * 512


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_make_no_difference(dtype: torch.dtype) -> None:
    """Words are mixed with their place in all of the shard, and pieces count."""
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = digest(values)
    with mock.patch.object(digest_module, "PIECE_BYTES", 384):  # the last piece is shorter
        assert digest(values) == whole
        swapped = values.clone()
        count = 384 // values.itemsize
        swapped[:count], swapped[count : 2 * count] = values[count : 2 * count], values[:count]
        assert digest(swapped) != whole
        assert digest_bytes(10_000) == 2 * 384
        assert step_bytes(10_000) == 2 * 2 * 384  # one on each of two streams
    assert digest(values[:0]) == 0


def turn_upside_down() -> None:
    start(50)
    module = nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.eye(32))
    model = pydist.DataParallel(module.to("cuda"))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.5, offload="cpu")
    upside_down = torch.eye(32).flip(0)
    for number in range(2):
        optimizer.zero_grad()
        (model(torch.ones(1, 32, device="cuda")).sum() * 0).backward()
        if number == 1:
            module.weight.data.copy_(upside_down)
        optimizer.step()
    assert torch.equal(module.weight.detach().cpu(), upside_down)


@needs_gpu_ranks
def test_rows_that_change_places_are_a_write() -> None:
    run_ranks(turn_upside_down, 1, env=ENVIRONMENTS["nccl"], timeout=40.0)
