"""Optimizers that shard their state: torch's ZeroRedundancyOptimizer and its replacement.

Of the optimizer nothing is compared but the parameters that it makes: each rank has other state.
"""

import torch
from harness import Library, Record, program
from nets import batch, mlp
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional


@program()
def a_sharded_optimizer(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = lib.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        record(None, None, loss, parameters=dict(model.module.named_parameters()))


@program()
def a_sharded_optimizer_with_accumulation(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = lib.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            inputs, targets = batch(lib, 2 * step)
            functional.cross_entropy(model(inputs), targets).backward()
        inputs, targets = batch(lib, 2 * step + 1)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        record(None, None, loss, parameters=dict(model.module.named_parameters()), norm=norm)


@program()
def a_sharded_optimizer_with_a_closure(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = lib.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        record(None, None, loss, parameters=dict(model.module.named_parameters()))


@program()
def the_state_of_a_sharded_optimizer_walked(lib: Library, record: Record) -> None:
    # Frameworks go through an optimizer's state, to move it to a device say.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = lib.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    for step in range(2):
        for values in optimizer.state.values():
            for key, value in values.items():
                values[key] = value.to(lib.device) if isinstance(value, Tensor) else value
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(None, None, loss, parameters=dict(model.module.named_parameters()))


@program()
def the_sharded_optimizer_of_torch(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    for step in range(2):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(None, None, loss, parameters=dict(model.module.named_parameters()))
