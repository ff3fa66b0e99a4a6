"""SyncBatchNorm against BatchNorm in one process, on the batches of all ranks put together.

Every rank computes the reference itself. Batches are uneven, and one of them is empty.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import Ranks
from normalized_batches import batches, scrambled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import LIMIT_S, Runner, assert_near, joined

import pydist
from pydist.job import groups
from pydist.parallel.sync_batch_norm import _statistics

pytestmark = pytest.mark.timeout(30)


def same_bits(tensor: Tensor) -> bool:
    """Whether all ranks have the very same values."""
    everyone = pydist.all_gather(tensor.detach().view(1, -1))
    return all(torch.equal(one, everyone[0]) for one in everyone)


def total(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return pydist.all_reduce(tensor)


# -- parity


SHAPES = {1: (3,), 2: (3, 4), 3: (3, 4, 2), 4: (3, 2, 3, 2)}

KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


def match_one_process(dims: int, arguments: dict[str, Any]) -> None:
    rank, size = joined()
    ours = pydist.SyncBatchNorm(3, dtype=torch.float64, **arguments)
    theirs = KINDS[dims](3, dtype=torch.float64, **arguments)
    scrambled(ours)
    scrambled(theirs)
    for step in range(4):
        inputs = batches(size, *SHAPES[dims], step=step)
        # Neither centred nor orthogonal to the input, so that every term of the gradient counts.
        pulls = [x + (7 * x).cos() for x in inputs]
        mine = inputs[rank].clone().requires_grad_()
        whole = torch.cat(inputs).requires_grad_()
        output = ours(mine)
        (output * pulls[rank]).sum().backward()
        expected = theirs(whole)
        (expected * torch.cat(pulls)).sum().backward()
        lengths = [len(x) for x in inputs]
        assert_near(output, expected.split(lengths)[rank])
        assert whole.grad is not None
        assert_near(mine.grad, whole.grad.split(lengths)[rank])
        for parameter, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_near(total(parameter.grad), reference.grad)
            parameter.grad = reference.grad = None
    for buffer, reference in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert_near(buffer, reference)
        assert same_bits(buffer)
    assert len(list(ours.buffers())) == (3 if arguments.get("track_running_stats", True) else 0)


@pytest.mark.parametrize("dims", SHAPES)
def test_dimensions(ranks: Ranks, dims: int) -> None:
    ranks.run(match_one_process, dims, {}, timeout=LIMIT_S)


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.3},
        {"affine": False},
        pytest.param(
            {"bias": False},
            marks=pytest.mark.skipif(
                "bias" not in inspect.signature(nn.BatchNorm1d).parameters,
                reason="this torch's batch norm always has a bias",
            ),
        ),
        {"track_running_stats": False},
    ],
    ids=str,
)
def test_arguments(run: Runner, arguments: dict[str, Any]) -> None:
    run(match_one_process, 3, arguments)


def layouts() -> None:
    rank, size = joined()
    generator = torch.Generator().manual_seed(0)
    counts = [4, 2, 0]
    images = [torch.randn(n, 6, 4, 8, generator=generator).double() for n in counts[:size]]
    volumes = [torch.randn(n, 6, 4, 2, 2, generator=generator).double() for n in counts[:size]]

    def check(change: Callable[[Tensor], Tensor], whole: list[Tensor]) -> tuple[Tensor, Tensor]:
        shape = change(whole[0]).shape
        ours = pydist.SyncBatchNorm(shape[1], dtype=torch.float64)
        mine = change(whole[rank]).detach().requires_grad_()
        everything = torch.cat([change(x) for x in whole]).requires_grad_()
        dims = [0, *range(2, everything.dim())]
        variance, mean = torch.var_mean(everything, dims, correction=0, keepdim=True)
        expected = (everything - mean) / (variance + ours.eps).sqrt()
        output = ours(mine)
        # Two losses: one whose gradient is a single number, expanded to the output's shape.
        for power in (1, 3):
            (gradient,) = torch.autograd.grad(output.pow(power).sum(), mine, retain_graph=True)
            (reference,) = torch.autograd.grad(
                expected.pow(power).sum(), everything, retain_graph=True
            )
            lengths = [len(x) for x in whole]
            assert_near(output, expected.split(lengths)[rank])
            assert_near(gradient, reference.split(lengths)[rank])
        return output, gradient

    for tensor in check(lambda x: x.to(memory_format=torch.channels_last), images):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    for tensor in check(lambda x: x.to(memory_format=torch.channels_last_3d), volumes):
        assert tensor.is_contiguous(memory_format=torch.channels_last_3d)
    for tensor in check(lambda x: x, images):
        assert tensor.is_contiguous()
    check(lambda x: x[:, ::2, 1:, ::3], images)
    check(lambda x: x.transpose(1, 3), images)
    check(lambda x: x.flatten(2).transpose(1, 2), images)


def test_layouts(run: Runner) -> None:
    run(layouts)


def narrow_inputs(name: str, params: str) -> None:
    rank, size = joined()
    dtype, params_dtype = getattr(torch, name), getattr(torch, params)
    eps = torch.finfo(dtype).eps
    counts = [40, 0, 9]
    generator = torch.Generator().manual_seed(1)
    # Far from zero, and many: sums kept in 16 bits would be off by several per cent.
    inputs = [
        (torch.randn(n, 3, 8, 8, generator=generator) + 4 + r).to(dtype)
        for r, n in enumerate(counts[:size])
    ]
    pulls = [torch.randn(x.shape, generator=generator).to(dtype) for x in inputs]
    ours = pydist.SyncBatchNorm(3, dtype=params_dtype)
    theirs = nn.BatchNorm2d(3, dtype=torch.float64)
    scrambled(ours)
    theirs.load_state_dict(ours.state_dict())
    mine = inputs[rank].clone().requires_grad_()
    whole = torch.cat(inputs).double().requires_grad_()
    output = ours(mine)
    output.backward(pulls[rank])
    expected = theirs(whole)
    expected.backward(torch.cat(pulls).double())
    assert output.dtype == dtype
    assert mine.grad is not None
    assert mine.grad.dtype == dtype
    assert whole.grad is not None
    lengths = [len(x) for x in inputs]
    # Computed in float32 and rounded once to the input's dtype: half a unit, and some float32.
    assert_near(output.double(), expected.split(lengths)[rank], 0.6 * eps)
    assert_near(mine.grad.double(), whole.grad.split(lengths)[rank], 0.6 * eps)
    # Statistics are float32 throughout, so only the parameters' own dtype may show.
    exact = 2 * torch.finfo(params_dtype).eps if params_dtype != torch.float32 else 1e-5
    assert_near(ours.running_mean.double(), theirs.running_mean, exact)
    assert_near(ours.running_var.double(), theirs.running_var, exact)
    for parameter, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == params_dtype
        grad, reference_grad = total(parameter.grad.double()), reference.grad
        assert reference_grad is not None
        # Relative to the number of terms of size one: the sums themselves may be near zero.
        terms = sum(lengths) * 64
        assert_near(grad / terms**0.5, reference_grad / terms**0.5, max(exact, 1e-5))


@pytest.mark.parametrize("params", ["float32", "same"])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_16_bit_inputs(run: Runner, name: str, params: str) -> None:
    run(narrow_inputs, name, name if params == "same" else params)


def far_from_zero() -> None:
    rank, size = joined()
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(50, 3, 10, generator=generator) + 1e4 for _ in range(size)]
    layer = pydist.SyncBatchNorm(3, momentum=1.0)
    layer(inputs[rank])
    variance, mean = torch.var_mean(torch.cat(inputs).double(), (0, 2))
    # A float32 near 1e4 has steps of 1e-3, which is how far a rank's mean may be off. E(x^2) -
    # E(x)^2 would be off by ten.
    torch.testing.assert_close(layer.running_mean.double(), mean, rtol=0, atol=2e-3)
    torch.testing.assert_close(layer.running_var.double(), variance, rtol=1e-3, atol=0)


def test_no_cancellation(run: Runner) -> None:
    run(far_from_zero)


def count_beyond_float32() -> None:
    rank, _ = joined()
    values = torch.zeros(1, 1, 2**24 + 1 if rank == 1 else 0, dtype=torch.bfloat16)
    _, _, count = _statistics(values, groups.layer_communicator())
    assert count == 2**24 + 1


def test_counts_are_exact(run: Runner) -> None:
    run(count_beyond_float32)


def under_autocast() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 3), pydist.SyncBatchNorm(3), nn.ReLU(), nn.Linear(3, 2))
    theirs = copy.deepcopy(ours)
    theirs[1] = nn.BatchNorm1d(3)
    inputs = batches(size, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(inputs[rank])
        expected = theirs(torch.cat(inputs))
        assert ours[1](ours[0](inputs[rank])).dtype == torch.bfloat16
    assert output.dtype == expected.dtype == torch.bfloat16
    part = expected.split([len(x) for x in inputs])[rank]
    # Both normalise the same 16-bit values in float32 and round once; then the last layer rounds.
    assert_near(output, part, 2 * torch.finfo(torch.bfloat16).eps)
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in ours.parameters())


def test_autocast(run: Runner) -> None:
    run(under_autocast)


# -- odd batches


def one_value_for_each_channel() -> None:
    rank, _ = joined()
    pydist.SyncBatchNorm(3)(torch.ones(int(rank == 1), 3))


def two_values_for_each_channel() -> None:
    rank, _ = joined()
    layer = pydist.SyncBatchNorm(3)
    layer(torch.full((int(rank != 0), 3), float(rank)))
    assert torch.equal(layer.running_mean, torch.full((3,), 0.1 * 1.5))


def test_a_single_value_is_refused_on_all_ranks(three: Ranks) -> None:
    outcomes = three.outcomes(one_value_for_each_channel, timeout=LIMIT_S)
    assert [outcome.error for outcome in outcomes] == ["ValueError"] * 3
    for outcome in outcomes:
        assert "Expected more than 1 value per channel when training" in outcome.message
    # The job goes on.
    three.run(two_values_for_each_channel, timeout=LIMIT_S)


def nothing_anywhere() -> None:
    joined()
    ours, theirs = pydist.SyncBatchNorm(3), nn.BatchNorm2d(3)
    for layer in (ours, theirs):
        mine = torch.empty(0, 3, 2, 2, requires_grad=True)
        output = layer(mine)
        output.sum().backward()
        assert output.shape == (0, 3, 2, 2)
        assert mine.grad is not None
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert torch.equal(ours.weight.grad, torch.zeros(3))
    assert torch.equal(ours.bias.grad, torch.zeros(3))


def test_empty_batches_on_all_ranks(run: Runner) -> None:
    run(nothing_anywhere)


def wrong_shapes() -> None:
    joined()
    layer = pydist.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="at least 2D input"):
        layer(torch.ones(3))
    with pytest.raises(ValueError, match=r"expected 3 channels, input has size \(2, 4\)"):
        layer(torch.ones(2, 4))
    # Nothing was sent: the ranks are still in step.
    layer(torch.ones(2, 3))


def test_wrong_shapes(run: Runner) -> None:
    run(wrong_shapes)


# -- autograd


def differentiate_twice() -> None:
    rank, size = joined()
    layer = pydist.SyncBatchNorm(3)
    mine = batches(size, 3, dtype=torch.float32)[rank].requires_grad_()
    (gradient,) = torch.autograd.grad(layer(mine).pow(2).sum(), mine, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_second_derivatives_are_refused(run: Runner) -> None:
    run(differentiate_twice)


def partial_gradients() -> None:
    rank, size = joined()
    inputs = batches(size, 3)
    lengths = [len(x) for x in inputs]
    ours = pydist.SyncBatchNorm(3, dtype=torch.float64)
    theirs = nn.BatchNorm1d(3, dtype=torch.float64)
    for needed in ("input", "weight", "bias"):
        mine, whole = inputs[rank].clone(), torch.cat(inputs)
        results = []
        for layer, x in ((ours, mine), (theirs, whole)):
            layer.weight.requires_grad_(needed == "weight")
            layer.bias.requires_grad_(needed == "bias")
            x.requires_grad_(needed == "input")
            wanted = x if needed == "input" else getattr(layer, needed)
            loss = layer(x).pow(3).sum()
            # Twice through one graph.
            first = torch.autograd.grad(loss, wanted, retain_graph=True)[0]
            assert torch.equal(first, torch.autograd.grad(loss, wanted)[0])
            results.append(first)
        ours_grad, theirs_grad = results
        if needed == "input":
            assert_near(ours_grad, theirs_grad.split(lengths)[rank])
        else:
            assert_near(total(ours_grad), theirs_grad)


def test_gradients_of_one_thing_alone(run: Runner) -> None:
    run(partial_gradients)


def recompute() -> None:
    rank, size = joined()
    inputs = batches(size, 3)
    grads = []
    for reentrant in (None, True, False):
        layer = pydist.SyncBatchNorm(3, dtype=torch.float64)
        mine = inputs[rank].clone().requires_grad_()
        if reentrant is None:
            output = layer(mine)
        else:
            output = checkpoint(layer, mine, use_reentrant=reentrant)
        output.pow(3).sum().backward()
        grads.append(mine.grad)
    assert_near(grads[1], grads[0])
    assert_near(grads[2], grads[0])


def test_activation_checkpoints(run: Runner) -> None:
    run(recompute)


def without_a_graph() -> None:
    rank, size = joined()
    inputs = batches(size, 3)
    layer = pydist.SyncBatchNorm(3, momentum=1.0, dtype=torch.float64)
    with torch.no_grad():
        assert not layer(inputs[rank]).requires_grad
    assert_near(layer.running_mean, torch.cat(inputs).mean(0))


def test_no_grad(run: Runner) -> None:
    run(without_a_graph)


# -- training


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(36, 2),
        nn.BatchNorm1d(2),
    ).double()


def train_beside_one_process(cap_mb: float) -> None:
    rank, size = joined()
    theirs = small_net()
    ours = pydist.DataParallel(
        pydist.SyncBatchNorm.convert_sync_batchnorm(small_net()), bucket_cap_mb=cap_mb
    )
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (ours, theirs)]
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        # Shares of one size whose distributions differ: local statistics would show.
        inputs = [
            torch.randn(4, 1, 6, 6, generator=generator).double() * (r + 1) + r for r in range(size)
        ]
        targets = [torch.randn(4, 2, generator=generator).double() for _ in range(size)]
        for net, x, y in (
            (ours, inputs[rank], targets[rank]),
            (theirs, torch.cat(inputs), torch.cat(targets)),
        ):
            net.zero_grad()
            (net(x) - y).square().mean().backward()
        for name, reference in theirs.named_parameters():
            assert_near(ours.get_parameter(name).grad, reference.grad, 1e-9)
        for optimizer in optimizers:
            optimizer.step()
    for name, reference in theirs.state_dict().items():
        # Rounding grows over ten steps of momentum.
        assert_near(ours.state_dict()[name], reference, 1e-9)


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_training_as_in_one_process(ranks: Ranks, cap_mb: float) -> None:
    ranks.run(train_beside_one_process, cap_mb, timeout=LIMIT_S)
