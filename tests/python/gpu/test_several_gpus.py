"""One process on several GPUs: torch's parts do what the replicas on the CPU do.

Without CUDA, torch lacks what copies tensors between GPUs; stand-ins for these functions move them
between two fake devices one by one. All else of `torch.nn.parallel` runs.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import staged_gpu
import torch
from fake_cuda import needs_fake_cuda
from staged_tensors import BACKENDS, on_device, start
from torch import Tensor, nn
from training import TIME_LIMIT, assert_like_reference, assert_near, batch

import pydist

pytestmark = TIME_LIMIT


def broadcast(tensors: Sequence[Tensor], devices: Sequence[int], _: int) -> list[list[Tensor]]:
    first, *others = devices
    assert all(tensor.get_device() == first for tensor in tensors)
    return [list(tensors), *([t.to(f"cuda:{number}") for t in tensors] for number in others)]


def scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, _: Any
) -> list[Tensor]:
    pieces = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
    return [piece.to(f"cuda:{n}") for piece, n in zip(pieces, devices, strict=False)]


def gather(tensors: Sequence[Tensor], dim: int, onto: int) -> Tensor:
    return torch.cat([t.to("cpu" if onto < 0 else f"cuda:{onto}") for t in tensors], dim)


@contextlib.contextmanager
def copies_between_fakes() -> Any:
    accelerator = types.SimpleNamespace(
        is_available=lambda: True,
        current_accelerator=lambda: torch.device("cuda"),
        current_stream=lambda _: contextlib.nullcontext(),
        device_index=lambda _: contextlib.nullcontext(),
    )
    parts = {"_broadcast_coalesced": broadcast, "_scatter": scatter, "_gather": gather}
    with contextlib.ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(mock.patch.object(torch._C, name, part, create=True))
        stack.enter_context(mock.patch.object(torch, "accelerator", accelerator))
        stack.enter_context(mock.patch("torch.cuda.nccl.is_available", return_value=False))
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inside = nn.Linear(4, 6)
        self.outside = nn.Linear(6, 1)
        self.register_buffer("count", torch.zeros(1))
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.get_buffer("count").add_(len(x))
        y = self.outside(self.inside(x).tanh())
        return {"y": y, "mean": y.mean()}


def train_on_two() -> None:
    rank, size = start()
    reference = Net()
    model = pydist.DataParallel(Net().to("cuda:0"), device_ids=[0, torch.device("cuda:1")])
    assert model.device_ids == [0, 1]
    assert model.output_device == 0
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step, rows in enumerate([5, 4, 1]):
        batches = [batch(r, rows, 4, step=step) for r in range(size)]
        ours.zero_grad()
        theirs.zero_grad()
        with copies_between_fakes():
            outputs = model(batches[rank].to("cuda:0"))
            assert outputs["y"].device == torch.device("cuda:0")
            assert outputs["mean"].shape == (min(rows, 2),)
            outputs["y"].sin().mean().backward()
        reference(torch.cat(batches))["y"].sin().mean().backward()
        ours.step()
        theirs.step()
    assert model.get_buffer("count").item() == 3 + 2 + 1  # the first replica's rows
    reference.get_buffer("count").fill_(6)
    assert_like_reference(model, reference)
    onto_cpu = pydist.DataParallel(model.module, device_ids=[0, 1], output_device="cpu")
    x = batch(0, 3, 4)
    with copies_between_fakes(), torch.no_grad():
        y = onto_cpu(x.to("cuda:0"))["y"]
    assert y.device.type == "cpu"
    assert_near(y, reference(x)["y"])
    staged_gpu.synchronize()


@needs_fake_cuda
@BACKENDS
def test_two_gpus_train_as_one_device(backend: str) -> None:
    on_device(backend, train_on_two)
