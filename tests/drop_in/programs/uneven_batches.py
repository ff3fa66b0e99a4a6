"""Ranks with different numbers of batches, in join() and after it."""

import contextlib
from typing import Any

import torch
from harness import Library, Record, program
from nets import CLASSES, FEATURES, batch, mlp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional


def normalized(lib: Library) -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    return net.to(lib.device)


def train(lib: Library, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs, targets = batch(lib, step)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


@program("torch DDP")
def uneven_batches_joined(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        train(lib, model, optimizer, range(2 + lib.rank))
    record(parameters=dict(model.module.named_parameters()))


@program("torch DDP")
def gradients_after_join(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    with model.join():
        inputs, targets = batch(lib, 0)
        functional.cross_entropy(model(inputs), targets).backward()
    record(model)


@program("torch DDP")
def gradients_after_uneven_batches(lib: Library, record: Record) -> None:
    # Each rank keeps the gradients of its own last step, until it sets them to zero.
    model = lib.DataParallel(mlp().to(lib.device))
    with model.join():
        for step in range(2 + lib.rank):
            inputs, targets = batch(lib, step)
            model.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
    record(local={"gradients": [parameter.grad for parameter in model.parameters()]})
    inputs, targets = batch(lib, 5)
    model.zero_grad()
    functional.cross_entropy(model(inputs), targets).backward()
    record(model)


@program("torch DDP")
def gradients_after_join_in_views(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device), gradient_as_bucket_view=True)
    with model.join():
        inputs, targets = batch(lib, 0)
        functional.cross_entropy(model(inputs), targets).backward()
    record(model)


@program("torch DDP")
def buffers_after_join(lib: Library, record: Record) -> None:
    """The last rank has most batches; all have one in the first two steps."""
    model = lib.DataParallel(normalized(lib))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for more in (0, lib.rank):
        with model.join():
            train(lib, model, optimizer, range(2 + more))
        record(parameters=dict(model.module.named_parameters()))
        record(local={"buffers": list(model.module.buffers())})


@program("torch DDP", on_gpu=False)
def sparse_gradients_after_join(lib: Library, record: Record) -> None:
    model = lib.DataParallel(nn.Embedding(5, 3, sparse=True).to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[Tensor] = []
    with model.join():
        for step in range(2 + 2 * lib.rank):
            optimizer.zero_grad()
            rows = torch.tensor([step % 5, lib.rank, 4], device=lib.device)
            model(rows).square().mean().backward()
            gradient = model.module.weight.grad
            assert gradient is not None
            held.append(gradient)
            optimizer.step()
    own = model.module.weight.grad
    assert own is not None
    record(parameters=dict(model.module.named_parameters()))
    record(local={"held": [gradient.to_dense() for gradient in held], "own": own.to_dense()})


@program("torch DDP", refused="Join can't join a pydist.DataParallel")
def uneven_batches_joined_by_context(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        train(lib, model, optimizer, range(2 + lib.rank))
    record(parameters=dict(model.module.named_parameters()))


@program("torch DDP")
def local_steps_in_join(lib: Library, record: Record) -> None:
    """The model is that of the rank that ran most forwards, also where none of them averaged."""
    for averaged, local in ((0, 2 - lib.rank), (0, 1 + lib.rank), (1, 2 - lib.rank)):
        torch.manual_seed(3)
        model = lib.DataParallel(normalized(lib))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(averaged + local):
                inputs, targets = batch(lib, step)
                optimizer.zero_grad()
                with model.no_sync() if step >= averaged else contextlib.nullcontext():
                    functional.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
        record(parameters=dict(model.module.named_parameters()))
        if not averaged:  # otherwise torch has copied those of another rank, see docs/training.md
            record(local={"buffers": list(model.module.buffers())})


@program("torch DDP")
def steps_after_join(lib: Library, record: Record) -> None:
    """Buffers come from the last rank from then on."""
    model = lib.DataParallel(normalized(lib))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.join():
            train(lib, model, optimizer, range(2))
        train(lib, model, optimizer, range(2, 4))
        model.eval()
        # In torch, a forward with gradients copies the buffers.
        record(local={"outputs": model(torch.ones(2, FEATURES, device=lib.device)).detach()})
        model.train()
        record(parameters=dict(model.module.named_parameters()))
