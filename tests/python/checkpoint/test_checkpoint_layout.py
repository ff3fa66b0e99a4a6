"""Checkpoints of parameters that lie in memory in another order, or have no elements."""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from training import assert_near, batch, joined

import pydist
from pydist.checkpoint.who_writes_what import of_rows
from pydist.parallel.bucket_planner import DEFAULT_CAP_BYTES

LIMIT_S = 20.0

pytestmark = pytest.mark.timeout(40)

# torch's fused steps ignore strides, and fail where some parameters have state and others none.
FUSED: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {"lr": 0.01, "fused": True}),
    (SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}),
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        yield ranks


class Laid(nn.Module):
    """Parameters in channels-last layout, transposed, and without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.image(x).square().mean((2, 3)) @ self.turned
        return out.square().mean() + self.nothing.sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(0, 2, 3, 6, 6, step=step)).backward()
        optimizer.step()


def contiguous(state: dict[str, Any]) -> dict[str, Any]:
    """A state of torch's as one of another layout has it."""
    state = copy.deepcopy(state)
    for values in state["state"].values():
        values |= {k: v.contiguous() for k, v in values.items() if isinstance(v, Tensor)}
    return state


def load_torchs(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def resume_in_layout(folder: str) -> None:
    """3 steps, and 3 more after loading in every way, against 6 without interruption."""
    rank, _ = joined()
    for kind, options in FUSED:
        expected = Laid()
        train(expected, kind(expected.parameters(), **options), range(6))
        model = Laid()
        plain = kind(model.parameters(), **options)
        wrapped = pydist.DataParallel(Laid())
        sharded = pydist.ShardedOptimizer(wrapped, kind, **options)
        train(model, plain, range(3))
        train(wrapped, sharded, range(3))
        pydist.save(f"{folder}/plain", model=model, optimizer=plain)
        pydist.save(f"{folder}/sharded", model=wrapped, optimizer=sharded)
        for name in ("plain", "sharded"):
            place = f"{folder}/{name}"
            state = pydist.checkpoint.to_torch(place)
            turned = {**state, "optimizer": contiguous(state["optimizer"])}
            ways: list[Callable[..., Any]] = [
                functools.partial(pydist.load, place),
                functools.partial(load_torchs, state),
                functools.partial(pydist.checkpoint.from_torch, turned),
            ]
            for way in ways:
                again = Laid()
                optimizer = kind(again.parameters(), **options)
                way(model=again, optimizer=optimizer)
                train(again, optimizer, range(3, 6))
                for ours, theirs in zip(again.parameters(), expected.parameters(), strict=True):
                    assert_near(ours, theirs)

    # A tensor that is cut along another dimension than the first.
    large = nn.ParameterList([torch.randn(1, 1200, 1024)])
    pydist.save(f"{folder}/large", model=pydist.DataParallel(copy.deepcopy(large)))
    again = nn.ParameterList([torch.zeros(1, 1200, 1024)])
    pydist.load(f"{folder}/large", model=again)
    assert torch.equal(again[0], large[0])
    # Ranks share out what all have, so all must have it alike.
    expected.to(memory_format=(torch.contiguous_format, torch.channels_last)[rank])
    parts: dict[str, Any] = {"optimizer": AdamW(expected.parameters())}
    train(expected, parts["optimizer"], range(1))
    with pytest.raises(pydist.InvalidUsage, match=r"parameter 2 lies in memory otherwise"):
        pydist.save(f"{folder}/otherwise", **parts)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((1, 2048, 1200), 3),
        ((2, 1, 3, 1 << 20), 6),
        ((1, (1 << 21) + 1), 3),
        ((3, 1 << 20), 3),
        ((1, 7, 9), 1),
        ((), 1),
        ((0, 5), 1),
    ],
)
def test_no_piece_is_larger_than_half_a_bucket(shape: tuple[int, ...], count: int) -> None:
    source = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    found = torch.full(shape, -1.0)
    pieces = list(of_rows("weight", source))
    assert len(pieces) == count
    for piece in pieces:
        assert piece.nbytes <= DEFAULT_CAP_BYTES // 2
        assert piece.whole == shape
        box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
        found[box] = piece.values()
        assert torch.equal(piece.copy().values(), piece.values())
    assert torch.equal(found, source)


def test_fused_steps_go_on_in_any_layout(two: Ranks, tmp_path: Path) -> None:
    two.run(resume_in_layout, str(tmp_path), timeout=LIMIT_S)
