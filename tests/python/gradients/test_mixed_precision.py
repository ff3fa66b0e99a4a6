"""`torch.autocast` and gradient scaling."""

import copy

import pytest
import torch
from torch import Tensor, nn
from training import (
    TIME_LIMIT,
    Runner,
    assert_like_reference,
    assert_near,
    batch,
    joined,
    train_like_reference,
)

import pydist

pytestmark = TIME_LIMIT


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 1)
    )


def train_under_autocast(dtype: torch.dtype, cap_mb: float) -> None:
    joined()
    reference = make_net()
    model = pydist.DataParallel(copy.deepcopy(reference), bucket_cap_mb=cap_mb)

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            out = net(batch(rank, 5, 8, step=step, dtype=torch.float32))
        assert out.dtype == dtype
        return out.float().sin().mean()  # type: ignore[no-any-return]

    # Each rank's gradient is rounded in the 16-bit type here as there, but for what scaling by
    # 1/size before backward instead of after it changes: an eps of that type.
    tolerance = 4 * torch.finfo(dtype).eps
    train_like_reference(model, reference, loss, tolerance=tolerance)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_autocast(run: Runner, dtype: torch.dtype, cap_mb: float) -> None:
    run(train_under_autocast, dtype, cap_mb)


def autocast_outside_and_inside() -> None:
    """Backward within the context as well, and a cast that is cached between two forwards."""
    joined()
    reference = make_net()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = net(batch(rank, 5, 8, step=step, dtype=torch.float32))
            with torch.autocast("cpu", enabled=False):
                second = net(batch(rank, 5, 8, step=step + 7, dtype=torch.float32))
            assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float32)
            return first.float().sin().mean() + second.sin().mean()  # type: ignore[no-any-return]

    train_like_reference(model, reference, loss, tolerance=4 * torch.finfo(torch.bfloat16).eps)


def test_autocast_around_several_forwards(run: Runner) -> None:
    run(autocast_outside_and_inside)


# A gradient of this size times a scale of 2**16 is more than float32 holds.
_HUGE = 1e35


def scale_gradients(culprit: int) -> None:
    rank, size = joined()
    reference = make_net()
    model = pydist.DataParallel(copy.deepcopy(reference))
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    scales = []
    for step in range(5):
        ours.zero_grad()
        theirs.zero_grad()
        factor = _HUGE if step == 2 and rank == culprit else 1.0
        out = model(batch(rank, 5, 8, step=step, dtype=torch.float32))
        scaler.scale(out.sin().mean() * factor).backward()
        scaler.unscale_(ours)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(ours)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == 2:
            # Whose gradient it was makes no difference: nobody makes this step.
            assert not norm.isfinite()
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            continue
        for r in range(size):
            out = reference(batch(r, 5, 8, step=step, dtype=torch.float32))
            (out.sin().mean() / size).backward()
        assert_near(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0), 1e-5)
        theirs.step()
        assert_like_reference(model, reference, 1e-5)
    # Grown after two steps, halved after the one that overflowed, grown again.
    assert [scale / 2.0**16 for scale in scales] == [1, 2, 1, 1, 2]


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_step_that_overflowed_on_one_rank_is_skipped_on_all(run: Runner, culprit: int) -> None:
    run(scale_gradients, culprit)


def convert_after_wrapping(how: str) -> None:
    joined()
    model = pydist.DataParallel(nn.Sequential(nn.Linear(8, 2)))
    if how == "half":
        model.half()
    elif how == "bfloat16":
        model.bfloat16()
    else:
        model.to(torch.float64)
    dtype = next(model.parameters()).dtype
    with pytest.raises(pydist.InvalidUsage, match=rf"parameter 0\.weight was .* is .* {dtype} now"):
        model(batch(0, 5, 8, dtype=dtype))


@pytest.mark.parametrize("how", ["half", "bfloat16", "to"])
def test_converting_after_wrapping_is_refused(run: Runner, how: str) -> None:
    run(convert_after_wrapping, how)


def convert_there_and_back() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(8, 2, bias=False)).double().float()
    model(batch(rank, 5, 8, dtype=torch.float32)).sum().backward()
    mean = torch.stack([batch(r, 5, 8).sum(0) for r in range(size)]).mean(0)
    assert_near(model.weight.grad, mean.float().expand(2, 8), 1e-5)


def test_converting_there_and_back(run: Runner) -> None:
    run(convert_there_and_back)


def train_in_bfloat16() -> None:
    """Without autocast: the gradients themselves are 16 bits wide."""
    rank, size = joined()
    module = make_net().bfloat16()
    model = pydist.DataParallel(copy.deepcopy(module))
    gradients = []
    for r in range(size):
        module.zero_grad()
        module(batch(r, 5, 8, dtype=torch.bfloat16)).sum().backward()
        gradients.append([p.grad for p in module.parameters() if p.grad is not None])
    model(batch(rank, 5, 8, dtype=torch.bfloat16)).sum().backward()
    for index, parameter in enumerate(model.parameters()):
        everyone = torch.stack([of_rank[index] for of_rank in gradients])
        scale = everyone.abs().sum(0).max().item()
        # Of the largest sum that occurs on the way, an eps for each addition.
        torch.testing.assert_close(
            parameter.grad,
            everyone.double().mean(0).bfloat16(),
            rtol=0,
            atol=size * scale * torch.finfo(torch.bfloat16).eps,
        )


def test_a_model_in_bfloat16(run: Runner) -> None:
    run(train_in_bfloat16)
