"""Batch norm and other buffers."""

from typing import Any

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import CLASSES, FEATURES, batch, dataset
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    )


def step_of(lib: Library, model: Any, optimizer: Any, number: int) -> Tensor:
    inputs, targets = batch(lib, number)
    loss = functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@program("torch DDP")
def batch_norm(lib: Library, record: Record) -> None:
    model = lib.DataParallel(with_batch_norm().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = step_of(lib, model, optimizer, step)
        model.eval()
        with torch.no_grad():
            outputs = model(batch(lib, 50)[0])
        model.train()
        record(model, optimizer, loss, local={"outputs": outputs})


@program("torch DDP")
def batch_norm_of_each_rank(lib: Library, record: Record) -> None:
    model = lib.DataParallel(with_batch_norm().to(lib.device), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        record(model, optimizer, step_of(lib, model, optimizer, step))


@program("torch DDP", buffers_of_rank_0=True)
def batch_norm_and_accumulation(lib: Library, record: Record) -> None:
    model = lib.DataParallel(with_batch_norm().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            inputs, targets = batch(lib, 2 * step)
            functional.cross_entropy(model(inputs), targets).backward()
        inputs, targets = batch(lib, 2 * step + 1)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def batch_norm_that_is_frozen(lib: Library, record: Record) -> None:
    model = lib.DataParallel(with_batch_norm().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.train()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()
        record(model, optimizer, step_of(lib, model, optimizer, step))


@program(without_ddp="torch's SyncBatchNorm wants a GPU")
def batch_norm_over_all_ranks(lib: Library, record: Record) -> None:
    module = lib.SyncBatchNorm.convert_sync_batchnorm(with_batch_norm().to(lib.device))
    model = lib.DataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        record(model, optimizer, step_of(lib, model, optimizer, step))


@program("torch DDP")
def statistics_averaged_after_an_epoch(lib: Library, record: Record) -> None:
    # timm's distribute_bn.
    model = lib.DataParallel(with_batch_norm().to(lib.device), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for step in range(2):
            loss = step_of(lib, model, optimizer, 2 * epoch + step)
        for name, buffer in model.module.named_buffers(recurse=True):
            if "running_mean" in name or "running_var" in name:
                dist.all_reduce(buffer)
                buffer /= float(dist.get_world_size())
        record(model, optimizer, loss)


class Centred(nn.Module):
    """DINO's: outputs are centred by a buffer that the loop itself moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs) - self.center
        return out


@program()
def a_buffer_that_all_ranks_write(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Centred().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = step_of(lib, model, optimizer, step)
        with torch.no_grad():
            mean = model(batch(lib, step)[0]).mean(0)
            dist.all_reduce(mean)
            model.module.center.mul_(0.9).add_(mean / dist.get_world_size(), alpha=0.1)
        record(model, optimizer, loss)


@program(warns="Rank 0 had changed center|Rank [12] had changed none", warns_alone=False)
def a_buffer_that_rank_0_writes(lib: Library, record: Record) -> None:
    # A temperature, say, that rank 0 decides on: torch's next forward has it on all ranks. pydist
    # copies it at the end of backward. (Gradients are the same, as all classes move alike.)
    model = lib.DataParallel(Centred().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    center = 0.0
    for step in range(3):
        before, center = center, center + 1.0 + step
        if lib.rank == 0:
            model.module.center.add_(1.0 + step)
        inputs, targets = batch(lib, step)
        outputs = model(inputs)
        used = model.module.layer(inputs) - outputs
        is_late = lib.name == "pydist" and lib.rank > 0
        assert torch.allclose(used, torch.full_like(used, before if is_late else center))
        loss = functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def a_buffer_that_rank_0_writes_and_sends(lib: Library, record: Record) -> None:
    # What pydist advises: all ranks have the value before their forward.
    model = lib.DataParallel(Centred().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        center = torch.zeros(CLASSES, device=lib.device)
        if lib.rank == 0:
            center += torch.arange(CLASSES, device=lib.device) * (1.0 + step)
        dist.broadcast(center, src=0)
        model.module.center.copy_(center)
        inputs, targets = batch(lib, step)
        outputs = model(inputs)
        loss = functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss, averaged={"outputs": outputs.mean()})


@program()
def a_buffer_that_is_replaced(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Centred().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.module.center = torch.full((CLASSES,), 0.5 * step, device=lib.device)
        record(model, optimizer, step_of(lib, model, optimizer, step))


@program("torch DDP", buffers_of_rank_0=True, on_gpu=False)
def stochastic_weight_averaging(lib: Library, record: Record) -> None:
    model = lib.DataParallel(with_batch_norm().to(lib.device))
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05)
    for step in range(4):
        loss = step_of(lib, model, optimizer, step)
        if step >= 2:
            averaged.update_parameters(model)
            schedule.step()
        record({"model": model, "average": averaged}, optimizer, loss)
    loader = torch.utils.data.DataLoader(dataset(), batch_size=6)
    update_bn(([rows.to(lib.device)] for rows, _ in loader), averaged)
    averaged.eval()
    with torch.no_grad():
        outputs = averaged(batch(lib, 50)[0])
    record({"average": averaged}, local={"outputs": outputs})


@program("torch DDP", buffers_of_rank_0=True, on_gpu=False)
def an_exponential_average_with_buffers(lib: Library, record: Record) -> None:
    model = lib.DataParallel(with_batch_norm().to(lib.device))
    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = step_of(lib, model, optimizer, step)
        averaged.update_parameters(model.module)
        record({"average": averaged}, optimizer, loss)


@program("torch DDP", buffers_of_rank_0=True)
def statistics_taken_anew_through_the_wrapper(lib: Library, record: Record) -> None:
    model = lib.DataParallel(with_batch_norm().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = step_of(lib, model, optimizer, step)
    loader = torch.utils.data.DataLoader(dataset(), batch_size=6)
    update_bn(([rows.to(lib.device)] for rows, _ in loader), model)
    record(model, optimizer, loss, training=model.training)
    for step in range(2, 4):
        record(model, optimizer, step_of(lib, model, optimizer, step))


@program("torch DDP")
def statistics_of_forwards_without_backward(lib: Library, record: Record) -> None:
    model = lib.DataParallel(with_batch_norm().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_of(lib, model, optimizer, 0)
    with torch.no_grad():
        for number in range(1, 4):
            model(batch(lib, number)[0])
        model.eval()
        outputs = model(batch(lib, 50)[0])
    record(model, local={"outputs": outputs})
