"""CUDA devices for ranks on native and gloo: real ones, shared by all ranks, or fakes.

    import staged_gpu

    staged_gpu.install()            # in a rank, before torch does anything on "cuda"
    for device in staged_gpu.devices():
        with staged_gpu.stream(device):
            ...

Real ones are taken where torch sees any; fake_cuda says what the fakes are. What only they can do
(hold a stream up, refuse memory) is for tests marked `needs_fake_cuda`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import fake_cuda
import pytest
import torch

IS_REAL = torch.cuda.is_available()

needs_gpu = pytest.mark.skipif(
    not IS_REAL and fake_cuda.why_missing() != "",
    reason=f"torch sees no GPU, and there is no fake: {fake_cuda.why_missing()}",
)


def install(delay_us: int = 20) -> None:
    """Makes torch see CUDA devices: real ones, or two fakes whose streams dawdle."""
    if IS_REAL:
        torch.cuda.set_device(0)
    else:
        fake_cuda.install()
        fake_cuda.set_delay_us(delay_us)


def devices() -> list[str]:
    """The first two, or the only one."""
    count = min(2, torch.cuda.device_count()) if IS_REAL else 2
    return [f"cuda:{index}" for index in range(count)]


def set_delay_us(longest: int) -> None:
    """How long fake streams dawdle before each job."""
    if not IS_REAL:
        fake_cuda.set_delay_us(longest)


def synchronize() -> None:
    """Waits for the current device."""
    torch.cuda.synchronize() if IS_REAL else fake_cuda.synchronize()


@contextlib.contextmanager
def stream(device: str = "cuda:0") -> Iterator[None]:
    """Another stream than the default one, which has waited for nothing."""
    if IS_REAL:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            yield
    else:
        with fake_cuda.Stream(int(device[-1])):
            yield


@contextlib.contextmanager
def streams_in_turn() -> Iterator[None]:
    """Other streams, on all devices; a device's current one is done before, and goes on after."""
    with contextlib.ExitStack() as stack:
        # The last to be entered makes its device the current one.
        for device in reversed(devices()):
            if not IS_REAL:
                stack.enter_context(fake_cuda.Stream(int(device[-1])))
                continue
            outside, inside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
            inside.wait_stream(outside)
            stack.callback(outside.wait_stream, inside)
            stack.enter_context(torch.cuda.stream(inside))
        yield


class Stall:
    """Holds the current stream up until it is released; a real one for some seconds at most."""

    def __init__(self) -> None:
        self._fake = None if IS_REAL else fake_cuda.Stall()
        if IS_REAL:
            torch.cuda._sleep(8_000_000_000)  # cycles: 4 s of a GPU at 2 GHz

    def release(self) -> None:
        torch.cuda.synchronize() if self._fake is None else self._fake.release()
