"""Training goes on with the survivors, from the last checkpoint, as one process would have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import rank_outcomes, run_ranks
from survivors_of import die, survivors_of
from torch import nn

import pydist

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 40.0
ROWS, STEPS, FAILS_AT = 24, 8, 5


def samples(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step)).double()


def train(folder: str, backend: str, sharded: bool) -> tuple[int, list[float]]:
    """Trains to the end, with whatever ranks are left: as in docs/failure.md."""
    pydist.init(backend, timeout=30)
    launched_as = pydist.rank()
    torch.manual_seed(0)
    module: nn.Module = nn.Linear(4, 2).double()
    while True:
        model = pydist.DataParallel(module)
        optimizer: Any
        if sharded:
            optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = 0
        if Path(folder, "last").exists():
            step = pydist.load(f"{folder}/last", model=model, optimizer=optimizer)["step"]
        try:
            while step < STEPS:
                if launched_as == 1 and step == FAILS_AT:
                    die()
                optimizer.zero_grad()
                mine = samples(step)[pydist.rank() :: pydist.world_size()]
                model(mine).square().mean().backward()
                optimizer.step()
                step += 1
                if step % 2 == 0:
                    pydist.save(
                        f"{folder}/last", model=model, optimizer=optimizer, extra={"step": step}
                    )
            break
        except pydist.Error:
            pydist.reform()
            module = model.module
            module.zero_grad()
    return pydist.world_size(), torch.cat(
        [p.detach().flatten() for p in module.parameters()]
    ).tolist()


@pytest.mark.parametrize(
    ("backend", "nprocs", "sharded"),
    [
        ("native", 3, True),
        ("gloo", 2, False),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ("native", 3, False),
                ("native", 4, True),
                ("gloo", 3, True),
                ("gloo", 4, False),
            ]
        ),
    ],
)
def test_training_goes_on_from_the_last_checkpoint(
    tmp_path: Path, backend: str, nprocs: int, sharded: bool
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    [(_, expected)] = run_ranks(train, 1, str(alone), backend, sharded, timeout=LIMIT_S)
    outcomes = rank_outcomes(train, nprocs, str(together), backend, sharded, timeout=LIMIT_S)
    for size, values in survivors_of(outcomes, [1]):
        assert size == nprocs - 1
        # Sums over ranks are rounded in another order.
        assert values == pytest.approx(expected, rel=1e-9)
