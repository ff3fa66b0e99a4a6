"""The loop of programs that are about their model alone."""

from __future__ import annotations

from typing import Any

import torch
from harness import Library, Record
from nets import batch
from torch import nn
from torch.nn import functional


def train(
    lib: Library,
    record: Record,
    module: nn.Module,
    *,
    steps: int = 3,
    optimizer_class: Any = torch.optim.AdamW,
    **options: Any,
) -> None:
    """The plain loop, for models that take rows and return what tells their classes."""
    model = lib.DataParallel(module.to(lib.device), **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_class(trained, lr=0.01)
    for step in range(steps):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)
