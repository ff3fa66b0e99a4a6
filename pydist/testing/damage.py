"""What faults do: the actions, each at the place that was reached."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

Action = Literal[
    "kill",
    "stop",
    "delay",
    "raise",
    "corrupt",
    "exhaust-descriptors",
    "exhaust-threads",
    "exhaust-memory",
]


def send_to_itself(number: signal.Signals, seconds: float) -> None:
    """Sends this process a signal, at once or after so many seconds."""

    def send() -> None:
        os.kill(os.getpid(), number)

    if seconds == 0:
        send()
        return
    timer = threading.Timer(seconds, send)
    timer.daemon = True
    timer.start()


def pause(seconds: float) -> None:
    """Sleeps, as a rank that is slow."""
    time.sleep(seconds)


def corrupt(phase: str | None, about: Any) -> None:
    """Damages the data of a place; `about` is that place's object."""
    if phase == "checkpoint":
        _flip_a_bit(about)
    elif phase in ("forward", "step"):
        parameter = _first_parameter(about)
        with torch.no_grad():
            _change_first(parameter, lambda value: value + 1)
    else:
        tensor = _first_tensor(about)
        if tensor is not None:
            with torch.no_grad():
                _change_first(tensor, _wrong)


def _wrong(value: Tensor) -> Tensor:
    if value.is_floating_point() or value.is_complex():
        return value * torch.nan
    return ~value


def _change_first(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    if tensor.numel() == 0:
        return
    first = tensor[(0,) * tensor.ndim]
    # Through detach(): a leaf that requires a gradient is changed past autograd.
    first.detach().copy_(change(first.detach()))


def _first_parameter(about: Any) -> Tensor:
    if isinstance(about, nn.Module):
        return next(about.parameters())
    parameter: Tensor = about.param_groups[0]["params"][0]
    return parameter


def _first_tensor(about: Any) -> Tensor | None:
    """The first tensor among an operation's arguments, or in a list of them."""
    if isinstance(about, Tensor):
        return about
    if isinstance(about, np.ndarray):
        return torch.from_numpy(about)
    if isinstance(about, (list, tuple)):
        for each in about:
            found = _first_tensor(each)
            if found is not None:
                return found
    return None


def _flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
