"""The fake CUDA device of the tests behaves as CUDA does where tests rely on it."""

from __future__ import annotations

import fake_cuda
import pytest
import torch
from fake_cuda import needs_fake_cuda
from launch import run_ranks

pytestmark = [needs_fake_cuda, pytest.mark.timeout(60)]


def train(device: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(2, 4, 3),
        torch.nn.Flatten(),
        torch.nn.BatchNorm1d(24),
        torch.nn.Linear(24, 3),
    ).double()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(4):
        inputs, targets = torch.randn(5, 2, 8, dtype=torch.double), torch.randint(3, (5,))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [tensor.detach().cpu() for tensor in model.state_dict().values()]


def behaves_as_cuda() -> None:
    fake_cuda.install(2)
    assert str(torch.ones(1, device="cuda:1").add(1).device) == "cuda:1"
    # Longer than anything else here takes.
    fake_cuda.set_delay_us(50_000)
    pinned = torch.zeros(3).pin_memory()
    for _ in range(8):
        tensor = torch.zeros(3, device="cuda").add_(1)
        pinned.copy_(tensor, non_blocking=True)
        if pinned[0].item() == 0.0:
            break
        pinned.zero_()
    else:
        raise AssertionError("copies wait for the device although they were told not to")
    fake_cuda.synchronize()
    assert pinned.tolist() == [1.0] * 3
    assert tensor.cpu().tolist() == [1.0] * 3, "a copy to ordinary memory waits"
    for expected in range(2, 6):
        copied = tensor.add_(1).to("cuda:1")
        assert copied.tolist() == [expected] * 3, "a copy between devices waits for both"
    fake_cuda.set_delay_us(200)
    with fake_cuda.Stream() as stream:
        other = torch.zeros(3, device="cuda")
        other.add_(2)
    stream.synchronize()
    assert other.tolist() == [2.0] * 3
    for actual, expected in zip(train("cuda"), train("cpu"), strict=True):
        torch.testing.assert_close(actual, expected)
    # What CUDA's kernel asserts, and the CPU's does not use.
    x, one = torch.ones(4, 3, device="cuda"), torch.ones(3, device="cuda")
    for given, lacks in (
        ((None, one, one), "weight"),
        ((one, None, one), "save_mean"),
        ((one, one, None), "save_invstd"),
    ):
        weight, *saved = given
        with pytest.raises(RuntimeError, match=lacks):
            torch.ops.aten.native_batch_norm_backward(
                x, x, weight, one, one, *saved, False, 1e-5, [False, True, True]
            )


def test_it_behaves_as_cuda() -> None:
    run_ranks(behaves_as_cuda, 1)
