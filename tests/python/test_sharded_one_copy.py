"""`share_parameters=True`: one copy of the parameters for all ranks of a host."""

import copy
from pathlib import Path

import pytest
import torch
from launch import Ranks
from torch import nn
from twins import LIMIT_S, TIME_LIMIT, Twins, small_model

import pydist

pytestmark = TIME_LIMIT


def share(folder: str) -> None:
    """One copy of the parameters: the same training, a fraction of the memory."""
    for dtype in (torch.float32, torch.bfloat16):
        twins = Twins(
            small_model(dtype),
            torch.optim.AdamW,
            options={"lr": 0.01},
            share_parameters=True,
            master_weights=False,
        )
        for step in range(4):
            twins.step(step)
        twins.check("one copy")
        model = twins.models[0]
        first = next(model.parameters())
        pydist.barrier()
        if twins.rank == 0:
            with torch.no_grad():
                first[0, 0] = 42.0
        pydist.barrier()
        assert first[0, 0].item() == 42.0
        pydist.barrier()
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        pydist.barrier()
        twins.ours.step()
        pydist.barrier()
        if twins.rank == 0:
            with torch.no_grad():
                first[0, 0] = 43.0
        with pytest.raises(pydist.InvalidUsage, match=r"0.weight was written between two steps"):
            twins.ours.step()
        with pytest.raises(pydist.InvalidUsage, match="earlier step"):
            twins.ours.step()
        # Before the first step, also of what joins later; but for what all ranks load.
        for loads in ("by itself", "from a checkpoint", ""):
            module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            module[0].requires_grad_(False)
            model = pydist.DataParallel(module)
            optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, share_parameters=True)
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
            model(torch.ones(1, 4)).sum().backward()
            if not loads:
                optimizer.step()
                module[0].requires_grad_(True)
                model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            pydist.barrier()
            if loads:
                state = copy.deepcopy(optimizer.state_dict())
                if loads == "by itself":
                    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
                    optimizer.load_state_dict(state)
                else:
                    path = Path(folder, str(dtype))
                    pydist.save(path, model=model, optimizer=optimizer)
                    pydist.load(path, model=model, optimizer=optimizer)
                pydist.barrier()
            part = module[1] if loads else module[0]
            if twins.rank == 0:
                with torch.no_grad():
                    part.bias[-1] += 1.0
            with pytest.raises(
                pydist.InvalidUsage, match=r"[01].bias was written.*before the first"
            ):
                optimizer.step()
        model = pydist.DataParallel(nn.Linear(4, 4))
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, share_parameters=True)
        model(torch.ones(1, 4)).sum().backward()
        pydist.barrier()
        if twins.rank == 0:
            with torch.no_grad():
                model.bias[-1] += 1.0
        with pytest.raises(pydist.InvalidUsage, match=r"bias was written.*before the first"):
            optimizer.step()


def give_other_memory() -> None:
    """On all ranks, which means what it does without sharing; and on one alone."""
    twins = Twins(small_model(), torch.optim.SGD, options={"lr": 0.1}, share_parameters=True)
    twins.step(0)
    for model in twins.models:
        weight = next(model.parameters())
        weight.data = weight.detach() * 2
    twins.step(1)
    twins.check("other memory")
    first = next(twins.models[0].parameters())
    if twins.rank == 1:
        first.data = first.detach() * 2
    match = r"0\.weight was given other memory on 1 rank\(s\) between two steps"
    with pytest.raises(pydist.InvalidUsage, match=match):
        twins.ours.step()


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_other_memory_on_some_ranks(backend: str) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend, "PYDIST_DEBUG": "1"}) as ranks:
        ranks.run(give_other_memory, timeout=LIMIT_S)


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_one_copy_of_the_parameters(backend: str, tmp_path: Path) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend, "PYDIST_DEBUG": "1"}) as ranks:
        ranks.run(share, str(tmp_path), timeout=LIMIT_S)
