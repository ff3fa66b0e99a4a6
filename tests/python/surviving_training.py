"""Training that goes on with the survivors, from the last checkpoint, as in docs/failure.md."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from survivors_of import die
from torch import nn

import pydist

LIMIT_S = 40.0
ROWS, STEPS, FAILS_AT = 24, 8, 5


def samples(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step)).double()


def train(
    folder: str,
    backend: str,
    sharded: bool,
    victims: Collection[int] = (1,),
    fail: Callable[[], None] = die,
    settle_s: float = 30.0,
) -> tuple[int, list[float]]:
    """Trains to the end, with whatever ranks are left; returns their number and the parameters.

    Args:
        folder: Where checkpoints go.
        backend: As for `pydist.init`.
        sharded: Whether the optimizer is.
        victims: The ranks that fail, unless there is only one rank.
        fail: What they do before they take part in a step.
        settle_s: As for `pydist.reform`.
    """
    pydist.init(backend, timeout=30)
    fails = pydist.rank() in victims and pydist.world_size() > 1
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
                if fails and step == FAILS_AT:
                    fail()
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
            pydist.reform(settle=settle_s)
            module = model.module
            module.zero_grad()
    return pydist.world_size(), torch.cat(
        [p.detach().flatten() for p in module.parameters()]
    ).tolist()
