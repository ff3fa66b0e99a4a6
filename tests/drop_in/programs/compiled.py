"""torch.compile around the wrapper, inside it, and in place."""

from typing import Any

import torch
from harness import Library, Record, program
from nets import batch, mlp
from torch.nn import functional

# All of torch.compile but the generated kernels.
BACKEND = "aot_eager"


def train(lib: Library, record: Record, model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program(on_gpu=False)
def compiled_then_wrapped(lib: Library, record: Record) -> None:
    train(lib, record, lib.DataParallel(torch.compile(mlp(), backend=BACKEND)))


@program(on_gpu=False)
def wrapped_then_compiled(lib: Library, record: Record) -> None:
    train(lib, record, torch.compile(lib.DataParallel(mlp()), backend=BACKEND))


@program(on_gpu=False)
def a_compiled_module_in_place(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp())
    model.module.compile(backend=BACKEND)
    train(lib, record, model)


@program(on_gpu=False)
def a_compiled_step(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(inputs), targets)

    for step in range(2):
        inputs, targets = batch(lib, step)
        loss = loss_of(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program(on_gpu=False)
def a_compiled_optimizer(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step_optimizer() -> None:
        optimizer.step()

    for step in range(2):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        step_optimizer()
        record(model, optimizer, loss)
