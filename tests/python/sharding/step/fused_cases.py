"""Optimizers with a fused step, and how often their kernels were called."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from pydist import _native


@contextlib.contextmanager
def counted_calls() -> Iterator[list[int]]:
    """How many segments each call of a kernel has stepped."""
    calls: list[int] = []

    def counting(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(parameters: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(len(parameters))
            kernel(parameters, *args, **kwargs)

        return call

    with (
        mock.patch.object(_native, "adam_step", counting(_native.adam_step)),
        mock.patch.object(_native, "sgd_step", counting(_native.sgd_step)),
    ):
        yield calls


Class = type[torch.optim.Optimizer]

CASES: list[tuple[Class, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True, "maximize": True}),
    (torch.optim.Adam, {"lr": 1e-3, "betas": (0.3, 0.6)}),
    (torch.optim.Adam, {"lr": torch.tensor(1e-3), "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]
