"""One copy of the parameters on a host: one rank writes for all, or loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from training import batch
from twins import LIMIT_S, TIME_LIMIT, Twins, small_model

import pydist

pytestmark = TIME_LIMIT


def no_own_pages(optimizer: pydist.ShardedOptimizer) -> bool:
    """Whether this rank has a copy of nothing."""
    return not any(one_copy.written() for one_copy in optimizer._layout.copies)


def write_for_all() -> None:
    """`optimizer.writing()`: one rank writes, and all have it."""
    twins = Twins(small_model(), torch.optim.AdamW, options={"lr": 0.01}, share_parameters=True)
    model, optimizer = twins.models[0], twins.ours
    rank = twins.rank

    def both(factor: float) -> None:
        with optimizer.writing() as mine:
            assert mine == (rank == 0)
            if mine:
                for parameter in model.parameters():
                    parameter.mul_(factor)
                first = next(model.parameters())
                first.data = first.detach() + 1.0
        with torch.no_grad():
            for parameter in twins.models[1].parameters():
                parameter.mul_(factor)
            next(twins.models[1].parameters()).add_(1.0)

    for number in range(3):
        # What all have written alike before counts.
        with torch.no_grad():
            for each in twins.models:
                next(each.parameters()).mul_(2.0)
        both(0.5)
        twins.check("written")
        assert no_own_pages(optimizer)
        twins.step(number)
        twins.check("stepped")

    # What saves a parameter for backward sees that it has changed, on all ranks.
    loss = model(batch(rank, 6, 10, dtype=torch.float32)).square().mean()
    with optimizer.writing() as mine:
        if mine:
            model.module[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|raised"):
        loss.backward()
    twins.ours.zero_grad()
    with torch.no_grad():
        twins.models[1].module[2].weight.add_(1.0)
    twins.step(3)
    twins.check("stepped after that")


def fail_to_write_for_all() -> None:
    """Nothing of it stays, on any rank, and training goes on."""
    twins = Twins(small_model(), torch.optim.AdamW, options={"lr": 0.01}, share_parameters=True)
    model, optimizer = twins.models[0], twins.ours
    rank = twins.rank
    weight = next(model.parameters())
    twins.step(0)

    def spoil() -> None:
        weight.mul_(3.0)
        model.module[2].weight.data = model.module[2].weight.detach() * 2.0

    def raising_on(raising: int) -> None:
        with optimizer.writing() as mine:
            if mine:
                spoil()
            if rank == raising:
                raise KeyError("spoilt")

    def out_of_turn() -> None:
        with optimizer.writing():
            if rank == 2:
                spoil()

    def converting() -> None:
        with optimizer.writing() as mine:
            if mine:
                weight.data = weight.detach().double()

    def with_inside(act: Callable[[], object]) -> None:
        with optimizer.writing() as mine:
            if mine:
                spoil()
            act()

    for raising in (0, 1):
        own = pytest.raises(KeyError, match="spoilt")
        others = pytest.raises(pydist.Error, match=rf"rank {raising} raised inside.*KeyError")
        with own if rank == raising else others:
            raising_on(raising)
        twins.check("spoilt")
    with pytest.raises(pydist.InvalidUsage, match=r"rank 2 has written.*: 0\.weight, 2\.weight\."):
        out_of_turn()
    twins.check("written by a rank whose turn it was not")
    with pytest.raises(pydist.Error, match=r"0\.weight was .*float32.* and is .*float64"):
        converting()
    twins.check("converted")
    joining = nn.Linear(10, 33)
    model.module.add_module("joining", joining)
    with pytest.raises(pydist.Error, match=r"parameter joining\.weight, which was written inside"):
        with_inside(joining.weight.zero_)
    del model.module.joining
    for inside, match in (
        (lambda: optimizer.writing().__enter__(), "inside optimizer.writing"),
        (optimizer.step, r"step\(\) is called inside optimizer.writing"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=match):
            with_inside(inside)
    twins.check("nested")
    # The others don't come to the vote before a step, but to the end of the block.
    own = pytest.raises(pydist.InvalidUsage, match=r"step\(\) is called inside optimizer.writing")
    others = pytest.raises(pydist.Error, match="rank 0 raised inside")
    with own if rank == 0 else others, optimizer.writing() as mine:
        if mine:
            optimizer.step()
    twins.check("a step by the writer alone")
    twins.step(1)
    twins.check("stepped")
    # Where ranks have written apart before it, too.
    if rank == 1:
        weight.data.add_(1.0)
    with (
        pytest.raises(pydist.Mismatch, match=r"0\.weight was written by rank 1 alone"),
        optimizer.writing(),
    ):
        raise AssertionError("not reached")


def write_in_backward() -> None:
    twins = Twins(small_model(), torch.optim.SGD, share_parameters=True)
    model, optimizer = twins.models[0], twins.ours

    def hook(_: Tensor) -> None:
        with optimizer.writing():
            pass

    next(model.parameters()).register_hook(hook)
    with pytest.raises(pydist.Error, match="called within backward"):
        model(batch(twins.rank, 6, 10, dtype=torch.float32)).sum().backward()


def load(folder: str) -> None:
    """All ranks read it into the one copy: none has pages of its own of it."""
    for dtype in (torch.float32, torch.bfloat16):
        twins = Twins(small_model(dtype), torch.optim.AdamW, share_parameters=True)
        model, optimizer = twins.models[0], twins.ours
        path = Path(folder, str(dtype))
        for step in range(2):
            model(batch(twins.rank, 6, 10, step=step, dtype=dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pydist.save(path, model=model, optimizer=optimizer)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        pydist.load(path, model=model, optimizer=optimizer)
        assert no_own_pages(optimizer)
        for name, value in model.state_dict().items():
            assert torch.equal(value, saved[name]), name
        model(batch(twins.rank, 6, 10, dtype=dtype)).square().mean().backward()
        optimizer.step()
        assert no_own_pages(optimizer)
        if twins.rank == 0:
            # And what one rank writes from then on is its own.
            next(model.parameters()).data.zero_()
        pydist.barrier()
        assert twins.rank == 0 or bool(next(model.parameters()).detach().any())
        pydist.barrier()


def refuse_loading_inside(folder: str) -> None:
    twins = Twins(small_model(), torch.optim.SGD, share_parameters=True)
    pydist.save(folder, model=twins.models[0])
    with pytest.raises(pydist.Error, match=r"inside optimizer\.writing"), twins.ours.writing():
        pydist.load(folder, model=twins.models[0])
    twins.step(0)
    twins.check("after that")


@pytest.fixture(scope="module", params=everyday("native", thorough=("gloo",)))
def run_shared(request: pytest.FixtureRequest) -> Any:
    with Ranks(3, {"PYDIST_BACKEND": request.param}) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def test_one_rank_writes_for_all(run_shared: Any) -> None:
    run_shared(write_for_all)


def test_what_raises_while_one_rank_writes_leaves_nothing(run_shared: Any) -> None:
    run_shared(fail_to_write_for_all)


def test_writing_for_all_in_backward_is_refused(run_shared: Any) -> None:
    run_shared(write_in_backward)


def test_loading_makes_no_copies(run_shared: Any, tmp_path: Path) -> None:
    run_shared(load, str(tmp_path))


def test_loading_while_one_rank_writes_is_refused(run_shared: Any, tmp_path: Path) -> None:
    run_shared(refuse_loading_inside, str(tmp_path / "checkpoint"))
