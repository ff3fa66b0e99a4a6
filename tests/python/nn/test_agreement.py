"""Ranks that differ in a differentiable collective: in what requires a gradient, or by mistake."""

from collections.abc import Callable, Sequence

import pytest
import torch
from launch import Ranks
from torch import Tensor
from training import LIMIT_S, Runner, batch, joined

import pydist

pytestmark = pytest.mark.timeout(30)


def one_requires_a_gradient() -> None:
    """Those whose own input requires none take part in backward all the same."""
    rank, size = joined()
    for call in (pydist.nn.all_gather, pydist.nn.all_reduce, pydist.nn.gather):
        mine = torch.ones(2, requires_grad=rank == size - 1)
        made = call(mine)
        assert made.requires_grad
        made.sum().backward()
        if rank == size - 1:
            assert mine.grad is not None
            assert mine.grad.tolist() == ([1.0] * 2 if call is pydist.nn.gather else [size] * 2)
        else:
            assert mine.grad is None


def test_one_rank_alone_requires_a_gradient(run: Runner) -> None:
    run(one_requires_a_gradient)


def none_requires_a_gradient() -> None:
    joined()
    assert not pydist.nn.all_gather(torch.ones(2)).requires_grad
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        for op in ("sum", "max", "prod"):
            assert not pydist.nn.all_reduce(leaf, op).requires_grad


def test_nothing_is_recorded_where_no_rank_needs_it(run: Runner) -> None:
    run(none_requires_a_gradient)


def sub_groups() -> None:
    rank, size = joined()
    ranks = [rank for rank in range(size) if rank != 1]
    group = pydist.new_group(ranks)
    if rank not in ranks:
        with pytest.raises(pydist.InvalidUsage, match="not a member"):
            pydist.nn.all_gather(torch.ones(2), group=group)  # type: ignore[arg-type]
        return
    leaf = batch(rank, 2).requires_grad_()
    made = pydist.nn.all_gather(leaf, group=group)  # type: ignore[arg-type]
    torch.testing.assert_close(made, torch.cat([batch(each, 2) for each in ranks]))
    (made.sum() * (rank + 1)).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [sum(each + 1 for each in ranks)] * 2


def test_groups_of_some_ranks(run: Runner) -> None:
    run(sub_groups)


def alone() -> None:
    joined()
    leaf = batch(0, 3, 2).requires_grad_()
    made: list[Tensor] = [
        *(pydist.nn.all_reduce(leaf, op) for op in ("sum", "mean", "max", "min", "prod")),
        *(pydist.nn.reduce_scatter(leaf, op) for op in ("sum", "mean", "max", "min", "prod")),
        *(call(leaf) for call in (pydist.nn.all_gather, pydist.nn.all_to_all)),
        *(call(leaf) for call in (pydist.nn.gather, pydist.nn.scatter, pydist.nn.broadcast)),
        pydist.nn.whole_batch(leaf),
    ]
    for each in made:
        torch.testing.assert_close(each, leaf)
        (gradient,) = torch.autograd.grad(each.square().sum(), leaf)
        torch.testing.assert_close(gradient, 2 * leaf)


def test_one_rank() -> None:
    with Ranks(1) as ranks:
        ranks.run(alone, timeout=LIMIT_S)


# -- mistakes


def call_without_recording(x: Tensor, is_last: bool) -> None:
    with torch.set_grad_enabled(not is_last):
        pydist.nn.all_gather(x)


# For each mistake: the call, given a tensor (2, 3) that requires a gradient and whether this rank
# is the last of three; a part of what the error says; and on which ranks the call itself is wrong:
# they get InvalidUsage and the others Error. Where no rank's is by itself, all get Mismatch.
MISTAKES: dict[str, tuple[Callable[[Tensor, bool], object], str, Sequence[int]]] = {
    "op without a gradient": (
        lambda x, _: pydist.nn.all_reduce(x, "bor"),
        "op='bor' has no gradient, and the tensor requires one",
        (0, 1, 2),
    ),
    "op without a gradient, of blocks": (
        lambda x, _: pydist.nn.reduce_scatter([x] * 3, "band"),
        "op='band' has no gradient",
        (0, 1, 2),
    ),
    "unknown op": (
        lambda x, _: pydist.nn.all_reduce(x, "median"),
        "op='median' is unknown; it is one of sum, mean, max",
        (0, 1, 2),
    ),
    "premul_sum": (
        lambda x, _: pydist.nn.all_reduce(x, "premul_sum"),
        "sum factor * tensor",
        (0, 1, 2),
    ),
    "no tensor on one": (
        lambda x, is_last: pydist.nn.all_gather([1, 2] if is_last else x),  # type: ignore[arg-type]
        "tensor is a list; it must be a torch tensor",
        (2,),
    ),
    "other functions": (
        lambda x, is_last: pydist.nn.all_reduce(x) if is_last else pydist.nn.all_gather(x),
        "pydist.nn.all_reduce(op='sum') on rank 2",
        (),
    ),
    "other ops": (
        lambda x, is_last: pydist.nn.all_reduce(x, "max" if is_last else "min"),
        "op='max') on rank 2",
        (),
    ),
    "other roots": (
        lambda x, is_last: pydist.nn.broadcast(x, int(is_last)),
        "root=1) on rank 2",
        (),
    ),
    "no such root": (
        lambda x, _: pydist.nn.gather(x, 3),
        "root=3 is no rank of the group; they are 0 to 2",
        (0, 1, 2),
    ),
    "other shapes": (
        lambda x, is_last: pydist.nn.all_reduce(x[:1] if is_last else x),
        "(2, 3) of torch.float32 on ranks 0, 1; (1, 3)",
        (),
    ),
    "other rows": (
        lambda x, is_last: pydist.nn.all_gather(x[:, :1] if is_last else x),
        "in dimension 0 alone: (2, 3) on ranks 0, 1; (2, 1) on rank 2",
        (),
    ),
    "other dtypes": (
        lambda x, is_last: pydist.nn.all_gather(x.double() if is_last else x),
        "torch.float32 on ranks 0, 1; torch.float64 on rank 2",
        (),
    ),
    "no_grad on one": (call_without_recording, "but rank 2 called it under torch.no_grad()", ()),
    "blocks that do not divide": (
        lambda x, _: pydist.nn.all_to_all(x),
        "(2, 3); its dimension 0 must be a multiple",
        (0, 1, 2),
    ),
    "too few blocks": (
        lambda x, _: pydist.nn.reduce_scatter([x] * 2),
        "tensor holds 2 blocks; the group has 3 ranks",
        (0, 1, 2),
    ),
    "nothing at the root": (
        lambda _, __: pydist.nn.scatter(None, 0),
        "tensor is None; it must be a torch tensor",
        (0,),
    ),
    "no receiver": (
        lambda x, _: pydist.nn.send(x, 3),
        "dst=3 is no rank of the group",
        (0, 1, 2),
    ),
}


def refused(kind: str) -> None:
    """Every rank reads what is wrong, and all can go on."""
    rank, size = joined()
    call, problem, wrong_on = MISTAKES[kind]
    expected = "Mismatch" if not wrong_on else "InvalidUsage" if rank in wrong_on else "Error"
    with pytest.raises(pydist.Error) as caught:
        call(torch.ones(2, 3, requires_grad=True), rank == size - 1)
    assert problem in str(caught.value), str(caught.value)
    assert type(caught.value).__name__ == expected
    assert pydist.nn.all_reduce(torch.ones(1)).item() == size


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_told_to_all(run: Runner, kind: str) -> None:
    run(refused, kind)


def leave_out_backward() -> str:
    rank, _ = joined()
    group = pydist.new_group(range(pydist.world_size()), timeout=0.5)
    leaf = torch.ones(2, requires_grad=True)
    made = pydist.nn.all_gather(leaf, group=group)  # type: ignore[arg-type]
    if rank == 1:
        # The others have read their error before this rank leaves the job.
        torch.distributed.barrier()
        return ""
    with pytest.raises(pydist.Timeout) as caught:
        made.sum().backward()
    torch.distributed.barrier()
    return str(caught.value)


def test_a_rank_without_backward_is_named(backend: str) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend}) as ranks:
        said = ranks.run(leave_out_backward, timeout=LIMIT_S)
    for text in (said[0], said[2]):
        assert "backward of pydist.nn.all_gather" in text
        assert "rank 1" in text
