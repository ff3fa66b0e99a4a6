"""The gradients of differentiable collectives, against torch's on what all ranks have.

What a collective computes on several ranks, one process can compute from the inputs of all of
them. `whole` is that function, on every rank: its outputs and its gradients are the expected ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from thorough import everyday
from torch import Tensor
from training import Runner, batch, joined

import pydist

pytestmark = pytest.mark.timeout(30)

OPS = ("sum", "mean", "max", "min", "prod")

# The inputs of all ranks, to the outputs of all ranks.
Whole = Callable[[list[Tensor]], list[Tensor]]


def combine(values: list[Tensor], op: str) -> Tensor:
    """What an op makes of the values of all ranks, by torch's functions."""
    stacked = torch.stack(values)
    if op == "max":
        return stacked.amax(0)
    if op == "min":
        return stacked.amin(0)
    found: Tensor = getattr(stacked, op)(0)
    return found


def losses_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A loss of each rank's output, another one for each rank."""
    return [
        (output * (7 * output.detach().cos() + rank + 1)).sum() + output.square().sum() / 3
        for rank, output in enumerate(outputs)
    ]


def rows_of(size: int) -> list[int]:
    """How many rows each rank has: uneven, and the last rank none."""
    return [3, 2, 0, 4][:size]


def check(ours: Callable[[Tensor], Tensor], whole: Whole, inputs: list[Tensor]) -> None:
    """Compares output, gradient and gradient of the gradient of this rank with one process's."""
    rank, size = joined()
    mine = inputs[rank].clone().requires_grad_()
    all_inputs = [each.clone().requires_grad_() for each in inputs]
    output, expected = ours(mine), whole(all_inputs)
    torch.testing.assert_close(output, expected[rank], rtol=1e-12, atol=1e-12)
    loss, total = losses_of([output] * size)[rank], sum(losses_of(expected), torch.zeros(()))
    (gradient,) = torch.autograd.grad(loss, mine, create_graph=True)
    gradients = torch.autograd.grad(total, all_inputs, create_graph=True)
    torch.testing.assert_close(gradient, gradients[rank], rtol=1e-11, atol=1e-11)
    # Every rank has a loss of its gradients; their sum is what one process would differentiate.
    penalty = gradient.sin().sum()
    (second,) = torch.autograd.grad(penalty, mine)
    penalties = torch.stack([each.sin().sum() for each in gradients]).sum()
    seconds = torch.autograd.grad(penalties, all_inputs)
    torch.testing.assert_close(second, seconds[rank], rtol=1e-10, atol=1e-10)


def reduce_everywhere(op: str) -> None:
    _, size = joined()
    inputs = [batch(rank, 3, 4) for rank in range(size)]
    check(
        lambda x: pydist.nn.all_reduce(x, op),
        lambda xs: [combine(xs, op)] * size,
        inputs,
    )


@pytest.mark.parametrize("op", OPS)
def test_all_reduce(run: Runner, op: str) -> None:
    run(reduce_everywhere, op)


def reduce_blocks(op: str, how: str) -> None:
    _, size = joined()
    rows = [2] * size if how == "even" else rows_of(size)
    inputs = [batch(each, sum(rows), 3) for each in range(size)]

    def ours(x: Tensor) -> Tensor:
        given: Any = x if how == "even" else x.split(rows)
        return pydist.nn.reduce_scatter(given, op)

    check(ours, lambda xs: list(combine(xs, op).split(rows)), inputs)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("how", ["even", "uneven"])
def test_reduce_scatter(run: Runner, op: str, how: str) -> None:
    run(reduce_blocks, op, how)


def gather_everywhere(how: str) -> None:
    _, size = joined()
    rows = [2] * size if how == "even" else rows_of(size)
    inputs = [batch(rank, rows[rank], 3) for rank in range(size)]
    check(pydist.nn.all_gather, lambda xs: [torch.cat(xs)] * size, inputs)


@pytest.mark.parametrize("how", ["even", "uneven"])
def test_all_gather(run: Runner, how: str) -> None:
    run(gather_everywhere, how)


def gather_at(root: int) -> None:
    _, size = joined()
    root %= size
    inputs = [batch(rank, rows_of(size)[rank], 3) for rank in range(size)]

    def whole(xs: list[Tensor]) -> list[Tensor]:
        # Without rows elsewhere.
        return [torch.cat(xs) if rank == root else torch.cat(xs)[:0] for rank in range(size)]

    check(lambda x: pydist.nn.gather(x, root), whole, inputs)


@pytest.mark.parametrize("root", [0, 1])
def test_gather(run: Runner, root: int) -> None:
    run(gather_at, root)


def scatter_from(root: int, how: str) -> None:
    _, size = joined()
    root %= size
    rows = [2] * size if how == "even" else rows_of(size)
    inputs = [batch(each, sum(rows), 3) for each in range(size)]

    def ours(x: Tensor) -> Tensor:
        # What other ranks give is ignored, and has a gradient of zero.
        given: Any = x if how == "even" else x.split(rows)
        return pydist.nn.scatter(given, root)

    def whole(xs: list[Tensor]) -> list[Tensor]:
        blocks = xs[root].split(rows)
        return [block + 0 * x.sum() for block, x in zip(blocks, xs, strict=True)]

    check(ours, whole, inputs)


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("how", ["even", "uneven"])
def test_scatter(run: Runner, root: int, how: str) -> None:
    run(scatter_from, root, how)


def broadcast_from(root: int) -> None:
    _, size = joined()
    root %= size
    inputs = [batch(rank, 2, 3) for rank in range(size)]
    check(
        lambda x: pydist.nn.broadcast(x, root),
        lambda xs: [xs[root] + sum(0 * x.sum() for x in xs)] * size,
        inputs,
    )


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast(run: Runner, root: int) -> None:
    run(broadcast_from, root)


def exchange(how: str) -> None:
    _, size = joined()
    # Row r, column q: how many rows rank r has for rank q.
    table = [[2 if how == "even" else (2 * r + q) % 4 for q in range(size)] for r in range(size)]
    inputs = [batch(rank, sum(table[rank]), 3) for rank in range(size)]

    def ours(x: Tensor) -> Tensor:
        if how == "even":
            return pydist.nn.all_to_all(x)
        return torch.cat(pydist.nn.all_to_all(x.split(table[pydist.rank()])))

    def whole(xs: list[Tensor]) -> list[Tensor]:
        blocks = [x.split(cuts) for x, cuts in zip(xs, table, strict=True)]
        return [torch.cat([each[rank] for each in blocks]) for rank in range(size)]

    check(ours, whole, inputs)


@pytest.mark.parametrize("how", ["even", "uneven"])
def test_all_to_all(run: Runner, how: str) -> None:
    run(exchange, how)


def lists_of_any_shapes() -> None:
    rank, size = joined()
    blocks = [
        torch.full((peer + 1, rank + 1), float(rank), dtype=torch.float64) for peer in range(size)
    ]
    leaves = [block.requires_grad_() for block in blocks]
    received = pydist.nn.all_to_all(leaves)
    for peer, block in enumerate(received):
        assert block.shape == (rank + 1, peer + 1)
        assert (block == peer).all()
    sum(((rank + 2) * block.sum() for block in received), torch.zeros(())).backward()
    for peer, leaf in enumerate(leaves):
        assert leaf.grad is not None
        assert (leaf.grad == peer + 2).all()


def test_blocks_of_any_shapes_are_exchanged(run: Runner) -> None:
    run(lists_of_any_shapes)


# -- in one piece: the derivative of what all ranks compute, by differences

CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"all_reduce {op}": lambda x, op=op: pydist.nn.all_reduce(x, op) for op in OPS},
    **{f"reduce_scatter {op}": lambda x, op=op: pydist.nn.reduce_scatter(x, op) for op in OPS},
    "all_gather": lambda x: pydist.nn.all_gather(x),
    "all_to_all": lambda x: pydist.nn.all_to_all(x),
    "broadcast": lambda x: pydist.nn.broadcast(x, pydist.world_size() - 1),
    "gather": lambda x: pydist.nn.gather(x, pydist.world_size() - 1),
    "scatter": lambda x: pydist.nn.scatter(x, pydist.world_size() - 1),
}


def differences(name: str) -> None:
    """All ranks compute the same function of the same tensor, so they can take differences of it.

    The tensor holds the inputs of all ranks, the result the outputs of all. "mean" makes one of the
    gradients that the ranks have of the tensor, each that of its own input; all_gather multiplies
    them by the number of ranks.
    """
    rank, size = joined()

    def whole(x: Tensor) -> Tensor:
        mine = pydist.nn.all_reduce(x, "mean")[rank]
        return pydist.nn.all_gather(CHAINS[name](mine))

    x = torch.stack([batch(each, size) for each in range(size)]).requires_grad_()
    assert torch.autograd.gradcheck(whole, (x,))
    assert torch.autograd.gradgradcheck(whole, (x,))


@pytest.mark.parametrize("name", CHAINS)
def test_gradcheck(run: Runner, name: str) -> None:
    run(differences, name)


# -- equal values, zeros, and what is no number


def ties(op: str) -> None:
    rank, size = joined()
    far = -9.0 if op == "max" else 9.0
    # By column: all ranks are equal; rank 0 and the last are; one alone is extreme.
    own = [1.0, 1.0 if rank in (0, size - 1) else far, 1.0 if rank == 0 else far]
    values = torch.tensor(own, dtype=torch.float64, requires_grad=True)
    pydist.nn.all_reduce(values, op).sum().backward()
    assert values.grad is not None
    among = len({0, size - 1})
    expected = [1.0, size / among if rank in (0, size - 1) else 0.0, size * float(rank == 0)]
    torch.testing.assert_close(values.grad, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("op", ["max", "min"])
def test_equal_extremes_share_the_gradient(run: Runner, op: str) -> None:
    run(ties, op)


def not_a_number() -> None:
    rank, size = joined()
    values = torch.tensor([1.0, torch.nan if rank == 0 else 1.0], requires_grad=True)
    found = pydist.nn.all_reduce(values, "max")
    assert found[0] == 1
    assert found[1].isnan()
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, size * float(rank == 0)]


def test_a_nan_counts_as_extreme(run: Runner) -> None:
    run(not_a_number)


def zeros() -> None:
    _, size = joined()
    inputs = [batch(rank, 4, 3) for rank in range(size)]
    inputs[0][1] = 0  # one zero
    for each in inputs:
        each[2] = 0  # all are zero
    inputs[0][3] = inputs[-1][3] = 0
    check(
        lambda x: pydist.nn.all_reduce(x, "prod"), lambda xs: [combine(xs, "prod")] * size, inputs
    )
    rows = [4] + [0] * (size - 1)
    check(
        lambda x: pydist.nn.reduce_scatter(x.split(rows), "prod"),
        lambda xs: list(combine(xs, "prod").split(rows)),
        inputs,
    )


def test_a_product_with_zeros_has_its_gradient(run: Runner) -> None:
    run(zeros)


# -- kinds of tensors


def any_tensors(dtype_name: str) -> None:
    """Tensors of other types and strides, from whole numbers, which no type rounds."""
    rank, size = joined()
    dtype = getattr(torch, dtype_name)
    inputs = [(batch(each, 4, 6) * 3).round().to(dtype) for each in range(size)]
    leaf = inputs[rank].clone().requires_grad_()
    strided = leaf.t()[::2]  # not contiguous
    assert not strided.is_contiguous()
    pull = torch.arange(12.0).view(3, 4).to(dtype)
    summed = pydist.nn.all_reduce(strided)
    assert summed.dtype == dtype
    torch.testing.assert_close(summed, torch.stack(inputs).sum(0).t()[::2])
    (summed * pull).sum().real.backward()
    expected = torch.zeros_like(leaf)
    expected.t()[::2] = pull * size
    torch.testing.assert_close(leaf.grad, expected)
    leaf.grad = None
    # The gradient of a sum is one number, expanded.
    pydist.nn.all_gather(strided).sum().real.backward()
    expected.t()[::2] = size
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize(
    "dtype", everyday("bfloat16", "complex128", thorough=("float16", "float32"))
)
def test_types_and_strides(run: Runner, dtype: str) -> None:
    run(any_tensors, dtype)


def nothing_at_all() -> None:
    _, size = joined()
    for shape in ((0,), (0, 3), (size, 0)):
        leaf = torch.empty(shape, requires_grad=True)
        made = [
            *(pydist.nn.all_reduce(leaf, op) for op in OPS),
            *(pydist.nn.reduce_scatter(leaf, op) for op in OPS),
            pydist.nn.all_gather(leaf),
            pydist.nn.gather(leaf),
            pydist.nn.scatter(leaf),
            pydist.nn.broadcast(leaf),
            pydist.nn.all_to_all(leaf),
        ]
        assert all(each.numel() == 0 for each in made)
        sum((each.sum() for each in made), torch.zeros(())).backward()
        assert leaf.grad is not None


def test_tensors_without_elements(run: Runner) -> None:
    run(nothing_at_all)


def scalars_and_integers() -> None:
    rank, size = joined()
    scalar = torch.tensor(float(rank), requires_grad=True)
    gathered = pydist.nn.all_gather(scalar)
    assert gathered.tolist() == list(range(size))
    gathered.square().sum().backward()
    assert scalar.grad is not None
    assert scalar.grad.item() == 2 * rank * size
    labels = pydist.nn.all_gather(torch.tensor([rank]))
    assert labels.tolist() == list(range(size))
    assert not labels.requires_grad
    bits = torch.tensor([1 << rank])
    assert pydist.nn.all_reduce(bits, "bor").item() == (1 << size) - 1
    of_all = torch.stack([bits] * size)
    assert pydist.nn.reduce_scatter(of_all, "bor").item() == (1 << size) - 1
    assert pydist.nn.all_reduce(torch.tensor([rank + 1]), "max").item() == size
    for op, dtype in (("prod", torch.int32), ("sum", torch.int16), ("max", torch.bool)):
        blocks = [torch.ones(peer + 1, dtype=dtype) for peer in range(size)]
        assert pydist.nn.reduce_scatter(blocks, op).dtype == dtype


def test_scalars_and_integers(run: Runner) -> None:
    run(scalars_and_integers)
